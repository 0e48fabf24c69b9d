"""What nodes that share a secret prove to each other: certificates and signatures made from it."""

from __future__ import annotations

import datetime
import hashlib
import hmac

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NODE_NAME = "node.exo"
"""What every certificate says of who has it. Nodes come and go by addresses; what counts is that
the cluster's key has signed."""

# Rates of guessing: a seventh of a second and 16 MB for each on a machine of 2023.
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "maxmem": 2**26, "dklen": 80}
_SALT = b"exo cluster key 1"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256

# For ever: a Raspberry Pi without a clock begins in 1970.
_SINCE, _UNTIL = datetime.datetime(1970, 1, 2), datetime.datetime(2999, 1, 1)


class ClusterKey:
    """From one secret, on all machines alike: an authority's key (P-256), and one for signing what
    is not sent over a connection. A node has a key of its own, made anew each time, which the
    authority certifies; so who knows the secret trusts who knows it, and nobody else.

    `root`, `certificate` and `private_key` are PEM: the authority's, and this node's.
    """

    def __init__(self, secret: str) -> None:
        derived = hashlib.scrypt(secret.encode(), salt=_SALT, **_SCRYPT)
        # 128 bits more than the order has, so that what is left over favours no number.
        number = int.from_bytes(derived[:48], "big") % (_ORDER - 1) + 1
        authority = ec.derive_private_key(number, ec.SECP256R1())
        self._signing = derived[48:]
        own = ec.generate_private_key(ec.SECP256R1())
        self.root = _certified("exo cluster", authority.public_key(), authority, is_authority=True)
        self.certificate = _certified("exo node", own.public_key(), authority)
        self.private_key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def signature(self, message: bytes) -> str:
        """HMAC-SHA256, in hexadecimal."""
        return hmac.new(self._signing, message, hashlib.sha256).hexdigest()


def _certified(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> bytes:
    """An X.509 certificate by the authority (RFC 5280), which gRPC and OpenSSL both take."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name("exo cluster"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(_usage(is_authority=is_authority), critical=True)
    )
    if is_authority:
        own = x509.SubjectKeyIdentifier.from_public_key(key)
        builder = builder.add_extension(own, critical=False)
    else:
        both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        name = x509.SubjectAlternativeName([x509.DNSName(NODE_NAME)])
        builder = (
            builder.add_extension(name, critical=False)
            .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
            .add_extension(by, critical=False)
        )
    return builder.sign(authority, SHA256()).public_bytes(Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
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
