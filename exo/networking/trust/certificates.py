"""X.509 certificates of an authority that is a number (RFC 5280)."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256

# For ever: a Raspberry Pi without a clock begins in 1970.
_SINCE, _UNTIL = datetime.datetime(1970, 1, 2), datetime.datetime(2999, 1, 1)


class Certificates:
    """`root` is the authority's own, whose key on P-256 follows from `number`; `certificate` is of
    `private_key`, which is made anew, for a server and client called `name`. All are PEM."""

    def __init__(self, number: int, name: str) -> None:
        authority = ec.derive_private_key(number % (_ORDER - 1) + 1, ec.SECP256R1())
        own = ec.generate_private_key(ec.SECP256R1())
        self.root = _of_authority(authority)
        self.certificate = _of_node(own.public_key(), name, authority)
        self.private_key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _of_authority(authority: ec.EllipticCurvePrivateKey) -> bytes:
    key = authority.public_key()
    identity = x509.SubjectKeyIdentifier.from_public_key(key)
    begun = _begun("exo cluster", key, is_authority=True).add_extension(identity, critical=False)
    return begun.sign(authority, SHA256()).public_bytes(Encoding.PEM)


def _of_node(
    key: ec.EllipticCurvePublicKey, name: str, authority: ec.EllipticCurvePrivateKey
) -> bytes:
    both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    begun = (
        _begun("exo node", key, is_authority=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
        .add_extension(signer, critical=False)
    )
    return begun.sign(authority, SHA256()).public_bytes(Encoding.PEM)


def _begun(
    subject: str, key: ec.EllipticCurvePublicKey, *, is_authority: bool
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("exo cluster"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(usage, critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
