"""The kept-open stream of frames from a member of a ring to the next: the side that receives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from urllib.parse import quote

from exo.errors import EngineFailed, ExoError, InvalidFrame
from exo.listening import ListeningPort, open_port
from exo.networking.connections import OPEN, Connections
from exo.networking.rings.frames import Frame, decode_frame
from exo.networking.rings.grpc_wire import GrpcWire
from exo.networking.rings.stream import CONTENT_TYPE, METHOD, PLAN
from exo.networking.rpc import status_of
from exo.networking.trust.tunnel import Tunnel

logger = logging.getLogger(__name__)

OnFrame = Callable[[str, Frame], None]
"""Called with a plan's hash and a frame of it; an ExoError it raises ends the stream."""

IDLE_S = 30.0
"""How long a connection on which no call is open is kept."""

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class RingServer:
    """The gRPC service `RingService`, on a port of its own (see grpc_wire)."""

    def __init__(self, on_frame: OnFrame, connections: Connections = OPEN) -> None:
        self._on_frame = on_frame
        self._connections = connections
        self._ports: list[ListeningPort] = []
        self._sessions: set[_Session] = set()

    async def listen(self, hosts: list[str], port: int) -> int:
        """On the given hosts too, all on one port; 0 picks a free one. Returns the port.

        Raises:
            OSError: the port is taken.
        """
        opened: list[socket.socket] = []
        try:
            for host in hosts:
                opened.append(open_port(host, port))
                port = opened[-1].getsockname()[1]
        except OSError:
            for one in opened:
                one.close()
            raise
        self._ports += [ListeningPort(one, self._session) for one in opened]
        return port

    def _session(self) -> _Session:
        tunnel = self._connections.tunnel(is_client=False)
        return _Session(self._on_frame, self._sessions, tunnel)

    async def stop(self) -> None:
        for port in self._ports:
            await port.close()
        for session in list(self._sessions):
            session.cut()
        self._ports.clear()


class _Session(asyncio.Protocol):
    """A connection. Its failure is its own."""

    def __init__(self, on_frame: OnFrame, sessions: set[_Session], tunnel: Tunnel) -> None:
        self._on_frame = on_frame
        self._sessions = sessions
        self._tunnel = tunnel
        self._wire = GrpcWire(self, is_client=False)
        self._plans: dict[int, str] = {}  # of each open stream
        self._transport: asyncio.Transport | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sessions.add(self)
        _notice_a_lost_peer(transport.get_extra_info("socket"))
        self._watch_idleness()

    def connection_lost(self, exc: Exception | None) -> None:
        self._sessions.discard(self)
        if self._idle is not None:
            self._idle.cancel()

    def cut(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            self._wire.receive(self._tunnel.receive(data))
        except InvalidFrame as error:
            peer = self._transport.get_extra_info("peername")
            logger.info("a connection from %s to the ring is refused: %s", peer, error.message)
            self._wire.send_goaway()
            self._flush()
            self._transport.close()
            self._plans.clear()
        else:
            self._flush()
        self._watch_idleness()

    def _watch_idleness(self) -> None:
        if not self._plans and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.cut)
        elif self._plans and self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _flush(self) -> None:
        assert self._transport is not None
        outgoing = self._tunnel.seal(self._wire.outgoing)
        if outgoing:
            self._transport.write(bytes(outgoing))
            outgoing.clear()

    def on_headers(self, stream: int, headers: dict[str, str]) -> None:
        if stream in self._plans:
            return
        if headers.get(":path") != METHOD:
            error = InvalidFrame(f"this port answers {METHOD}, not {headers.get(':path')}")
            self._refuse(stream, error)
            return
        self._plans[stream] = headers.get(PLAN, "")
        self._wire.open(stream)

    def on_message(self, stream: int, message: bytes) -> None:
        plan_hash = self._plans[stream]
        try:
            self._on_frame(plan_hash, decode_frame(message))
        except ExoError as error:
            self._refuse(stream, error)
        except Exception as error:
            logger.exception("a frame of plan %s", plan_hash)
            self._refuse(stream, EngineFailed(f"{type(error).__name__}: {error}"))

    def on_end(self, stream: int) -> None:
        """The sender will send no more: it gets the answer that the call has."""
        if self._plans.pop(stream, None) is not None:
            self._wire.send_headers(stream, _ANSWER)
            self._wire.send_message(stream, b"")
            self._wire.send_headers(stream, [("grpc-status", "0")], last=True)
            self._wire.close(stream)

    def on_reset(self, stream: int) -> None:
        self._plans.pop(stream, None)

    def on_goaway(self, reason: str) -> None:
        """The sender opens no more calls, and then closes the connection."""

    def _refuse(self, stream: int, error: ExoError) -> None:
        assert self._transport is not None
        peer = self._transport.get_extra_info("peername")
        logger.info("a ring stream of %s was refused: %s", peer, error.message)
        self._plans.pop(stream, None)
        self._wire.close(stream)
        status, details, metadata = status_of(error)
        message = quote(details, safe=_PRINTABLE)
        trailers = [("grpc-status", str(status.value[0])), ("grpc-message", message), *metadata]
        self._wire.send_headers(stream, [*_ANSWER, *trailers], last=True)
        self._wire.send_reset(stream)


def _notice_a_lost_peer(connection: socket.socket) -> None:
    """Have the system ask, after 30 s without a word, whether the other side is still there: a
    machine that was unplugged says no goodbye."""
    # macOS calls the first one by its old name.
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    # macOS refuses where the other side has gone meanwhile, sandboxes may not know them.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ((idle, 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_ANSWER = [(":status", "200"), ("content-type", CONTENT_TYPE)]
