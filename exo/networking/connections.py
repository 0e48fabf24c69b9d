"""Where every connection between nodes is made: open, or sealed by the cluster's key."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from exo.networking.rpc import OPTIONS
from exo.networking.trust.cluster_key import NODE_NAME, ClusterKey
from exo.networking.trust.tunnel import OpenTunnel, SealedTunnel, Tunnel


class Connections:
    """With a key both ends prove that they know it, and all that passes is encrypted (TLS 1.3);
    without one neither."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        self._key = key
        self._contexts = (
            (_context(key, is_client=False), _context(key, is_client=True)) if key else None
        )

    @property
    def are_sealed(self) -> bool:
        return self._key is not None

    def channel(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        if self._key is None:
            return grpc.insecure_channel(address, [*OPTIONS, *options])
        return grpc.secure_channel(address, _of_client(self._key), [*_NAMED, *options])

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        if self._key is None:
            return grpc.aio.insecure_channel(address, OPTIONS)
        return grpc.aio.secure_channel(address, _of_client(self._key), _NAMED)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have it listen there, too. Returns the port.

        Raises:
            RuntimeError: it cannot.
        """
        if self._key is None:
            return int(server.add_insecure_port(address))
        own = [(self._key.private_key, self._key.certificate)]
        credentials = grpc.ssl_server_credentials(own, self._key.root, require_client_auth=True)
        return int(server.add_secure_port(address, credentials))

    def tunnel(self, *, is_client: bool) -> Tunnel:
        """What a new connection that is not gRPC's own goes through."""
        if self._contexts is None:
            return OpenTunnel()
        return SealedTunnel(self._contexts[is_client], NODE_NAME if is_client else None)


OPEN = Connections()

_NAMED = [*OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]


def _of_client(key: ClusterKey) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(key.root, key.private_key, key.certificate)


def _context(key: ClusterKey, *, is_client: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=key.root.decode())
    if not is_client:
        context.num_tickets = 0  # each connection proves itself
    with tempfile.TemporaryDirectory() as folder:  # of this user's alone; it wants a file
        file = Path(folder, "node.pem")
        file.write_bytes(key.certificate + key.private_key)
        context.load_cert_chain(file)
    return context
