"""Ranges of files from a peer: what was damaged on its way is told from its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from exo.download.hub_cache import RepoFile
from exo.download.supplier import SupplierFailed
from exo.networking.calls.peer_files import CHECKSUM, GrpcFilePeer

DATA = bytes(range(256)) * 1000
FILE = RepoFile("model.gguf", len(DATA), "0" * 40)


class Peer:
    """A fake peer that says `checksum` of what it sends."""

    def __init__(self) -> None:
        self.checksum: str | None = str(zlib.crc32(DATA))
        handler = grpc.unary_stream_rpc_method_handler(self._read)
        self._server = grpc.server(ThreadPoolExecutor(1))
        self._server.add_registered_method_handlers("exo.NodeService", {"ReadFile": handler})
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _read(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield DATA[:1000]
        yield DATA[1000:]
        if self.checksum is not None:
            context.set_trailing_metadata(((CHECKSUM, self.checksum),))

    def stop(self) -> None:
        self._server.stop(0).wait(5)


@pytest.fixture
def peer() -> Iterator[Peer]:
    running = Peer()
    yield running
    running.stop()


async def read(peer: Peer) -> bytes:
    asked = GrpcFilePeer("p", peer.address, "org/model")
    try:
        return b"".join([piece async for piece in asked.read(FILE, 0, len(DATA))])
    finally:
        asked.close()


async def test_what_comes_as_it_was_sent_is_taken(peer: Peer) -> None:
    assert await read(peer) == DATA


@pytest.mark.parametrize("said", ["12345", None])
async def test_what_comes_otherwise_is_refused(peer: Peer, said: str | None) -> None:
    peer.checksum = said
    with pytest.raises(SupplierFailed, match="node p sent was damaged on its way"):
        await read(peer)
