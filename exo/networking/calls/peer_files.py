"""Files of a peer, over gRPC.

A download runs on a thread of its own with an event loop of its own, and the node's channels belong
to the node's loop: so these are blocking calls on a channel of the download's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from exo.download.hub_cache import Listing, RepoFile
from exo.download.sharing import FilePeer, Held
from exo.download.supplier import Supplier, SupplierFailed
from exo.errors import DownloadFailed, PeerUnavailable
from exo.networking.calls import messages
from exo.networking.connections import OPEN, Connections
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.generated.node_service_pb2_grpc import NodeServiceStub

ASK_TIMEOUT_S = 2.0

SILENCE_S = 5.0
"""A peer that sends nothing of a file for so long has stalled."""


HUB_TIMEOUT_S = 30.0
"""The same where the peer has to ask the hub."""

CHECKSUM = "crc32"
"""Trailing metadata of a range: of a file in part no digest tells what became of it on its way."""

_NEVER = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED)

# A span is one stream, which would begin with a window of 64 KiB and frames of 16.
_BULK = [("grpc.http2.lookahead_bytes", 8 << 20), ("grpc.http2.max_frame_size", 4 << 20)]


class GrpcFilePeer(FilePeer):
    """`address`: host:port where the peer listens for nodes; `repo`: whose files are meant."""

    workers = 2

    def __init__(
        self, node_id: str, address: str, repo: str, connections: Connections = OPEN
    ) -> None:
        self.node_id = node_id
        self._repo = repo
        self.name = f"node {node_id}"
        # A place for every call that can be under way at once: a read waits for its peer, and must
        # not keep the peer from being asked what it has.
        self._threads = ThreadPoolExecutor(self.workers + _Relay.workers + 2, f"from {node_id}")
        self._channel = connections.channel(address, _BULK)
        self._stub = NodeServiceStub(self._channel)
        self._read = self._channel.unary_stream(
            "/exo.NodeService/ReadFile", pb.ReadFileRequest.SerializeToString
        )

    async def exchange(self, own_id: str, digests: Sequence[str]) -> list[Held]:
        request = pb.HeldFilesRequest(node_id=own_id, repo=self._repo, digests=digests)
        with self._errors():
            reply = await self._off(self._stub.HeldFiles, request, ASK_TIMEOUT_S)
        return [Held(file.digest, file.whole, file.blocks) for file in reply.files]

    async def listing(self, revision: str, *, ask_hub: bool) -> Listing | None:
        request = pb.ListRepoRequest(repo=self._repo, revision=revision, ask_hub=ask_hub)
        timeout_s = HUB_TIMEOUT_S if ask_hub else ASK_TIMEOUT_S
        with self._errors():
            reply = await self._off(self._stub.ListRepo, request, timeout_s)
        return messages.listing_from_pb(self._repo, reply)

    def relay(self) -> Supplier:
        return _Relay(self)

    async def _off(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise PeerUnavailable(f"{self.name} does not answer: {error}") from error

    async def read(self, file: RepoFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self.pieces(file, start, end, relay=False)) as pieces:
            async for piece in pieces:
                yield piece

    async def pieces(
        self, file: RepoFile, start: int, end: int, *, relay: bool
    ) -> AsyncGenerator[bytes, None]:
        """What the peer has of a range, or with `relay` the hub. Raises SupplierFailed."""
        request = pb.ReadFileRequest(
            repo=self._repo, digest=file.digest, start=start, end=end, relay=relay
        )
        call = self._read(request)
        silence_s = HUB_TIMEOUT_S if relay else SILENCE_S
        checksum = 0
        try:
            while True:
                async with asyncio.timeout(silence_s):
                    piece = await self._off(next, call, None)
                if piece is None:
                    break
                checksum = zlib.crc32(piece, checksum)
                yield piece
            if dict(call.trailing_metadata()).get(CHECKSUM) != str(checksum):
                raise SupplierFailed(
                    DownloadFailed(f"{file.path}: what {self.name} sent was damaged on its way")
                )
        except TimeoutError as error:
            raise SupplierFailed(
                DownloadFailed(f"{self.name} sent nothing of {file.path} for {silence_s:.0f} s")
            ) from error
        except grpc.RpcError as error:
            raise SupplierFailed(
                DownloadFailed(f"{file.path}: {self.name}: {error.details()}"),
                final=relay and error.code() in _NEVER,
            ) from error
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()
        self._threads.shutdown(wait=False)


class _Relay(Supplier):
    kind = "hub"
    workers = 4

    def __init__(self, peer: GrpcFilePeer) -> None:
        self._peer = peer
        self.name = f"the hub through {peer.name}"

    async def read(self, file: RepoFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        pieces = self._peer.pieces(file, start, end, relay=True)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece
