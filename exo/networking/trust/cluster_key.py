"""What nodes that share a secret prove to each other: certificates and signatures made from it."""

from __future__ import annotations

import hashlib
import hmac

OTHER_KEY = "has another cluster key than this node"
NO_KEY = "has no cluster key, and this node has one"
ONLY_IT_HAS_ONE = "has a cluster key, and this node has none"
SAME_KEY = "start all nodes of a cluster with the same --cluster-key-file"
"""What is said of a node whose key does not fit, after its name, and what to do."""

NODE_NAME = "node.exo"
"""What every certificate says of who has it. Nodes come and go by addresses; what counts is that
the cluster's key has signed."""

# What a guess takes: a seventh of a second and 16 MB on a machine of 2023.
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "maxmem": 2**26, "dklen": 80}
_SALT = b"exo cluster key 1"


class ClusterKey:
    """From one secret, on all machines alike: an authority's key, and one for signing what is not
    sent over a connection. A node has a key of its own, made anew each time, which the authority
    certifies; so who knows the secret trusts who knows it, and nobody else.

    `root`, `certificate` and `private_key` are PEM: the authority's, and this node's.
    """

    def __init__(self, secret: str) -> None:
        # Late: what makes them takes a tenth of a second to import, and most clusters have no key.
        from exo.networking.trust.certificates import Certificates

        derived = hashlib.scrypt(secret.encode(), salt=_SALT, **_SCRYPT)
        # 128 bits more than keys have, so that what is left over favours none.
        own = Certificates(int.from_bytes(derived[:48], "big"), NODE_NAME)
        self.root, self.certificate, self.private_key = own.root, own.certificate, own.private_key
        self._signing = derived[48:]

    def signature(self, message: bytes) -> str:
        """HMAC-SHA256, in hexadecimal."""
        return hmac.new(self._signing, message, hashlib.sha256).hexdigest()
