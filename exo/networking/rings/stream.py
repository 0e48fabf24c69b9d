"""The kept-open stream of frames from a member of a ring to the next: the side that sends."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import threading
from typing import Any
from urllib.parse import unquote

import grpc

from exo.errors import ExoError, InvalidFrame, PeerUnavailable
from exo.networking.rings.frames import Frame, encode_frame
from exo.networking.rings.grpc_wire import GrpcWire
from exo.networking.rings.hidden_states import Wire
from exo.networking.rpc import CALL_TIMEOUT_S, from_status
from exo.networking.trust.tunnel import OpenTunnel, Tunnel
from exo.tasks import tell

logger = logging.getLogger(__name__)

METHOD = "/exo.RingService/Frames"
CONTENT_TYPE = "application/grpc+msgpack"
PLAN = "exo-plan"
"""Metadata that names the plan whose frames come."""

STALL_S = 1.5
"""What was sent and not acknowledged by the peer's kernel for so long is lost, and with it the
connection: a firewall or a router has forgotten it. Heartbeats go by another one and say nothing.
Linux only; elsewhere a step's deadline ends it."""

_STREAM = 1  # HTTP/2's number of the one call on this connection
_READ = 2**16
_STATUSES = {str(status.value[0]): status.name for status in grpc.StatusCode}


class RingStream:
    """A gRPC call of a connection of its own (see grpc_wire).

    `send` writes to the socket at once, on whatever thread it is called: an engine's thread sends a
    step's outcome itself, which saves a hop the time that it takes to wake the event loop.
    """

    def __init__(
        self,
        peer: str,
        plan_hash: str,
        connection: socket.socket,
        wire: Wire = Wire.EXACT,
        tunnel: Tunnel | None = None,
    ) -> None:
        self._peer = peer
        self._hidden_states = wire
        self._plan_hash = plan_hash
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()  # over all that follows
        self._wire = GrpcWire(self, is_client=True)
        self._tunnel = tunnel or OpenTunnel()
        self.sent_bytes = 0
        self._is_blocked = False  # the loop waits until the socket takes more
        self._late: asyncio.TimerHandle | None = None
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[ExoError] = self._loop.create_future()

    @classmethod
    async def open(
        cls,
        peer: str,
        host: str,
        port: int,
        plan_hash: str,
        wire: Wire = Wire.EXACT,
        tunnel: Tunnel | None = None,
    ) -> RingStream:
        """Through the tunnel, if any. Raises PeerUnavailable if nobody there speaks gRPC."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                stream = cls(peer, plan_hash, await _connected(host, port), wire, tunnel)
                try:
                    await stream._begin(f"{host}:{port}")
                except BaseException:
                    stream.cancel()
                    raise
                return stream
        except (TimeoutError, OSError) as error:
            why = "no answer" if isinstance(error, TimeoutError) else error
            raise PeerUnavailable(
                f"no ring stream to {peer}, port {port}: {why}. "
                "If there is a firewall, it must let this port through"
            ) from error

    async def _begin(self, authority: str) -> None:
        self._loop.add_reader(self._socket, self._on_readable)
        with self._lock:
            headers = [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", METHOD),
                (":authority", authority),
                ("content-type", CONTENT_TYPE),
                ("te", "trailers"),
                (PLAN, self._plan_hash),
            ]
            self._wire.open(_STREAM)
            self._wire.send_headers(_STREAM, headers)
            self._write()
        either: list[asyncio.Future[Any]] = [self._answered, self._over]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            raise self._over.result()

    def send(self, frame: Frame) -> None:
        """Send a frame, at once or when the connection takes more. May be called on any thread.

        Raises:
            InvalidFrame: it cannot be encoded.
            PeerUnavailable: the stream is cut.
            ExoError: that with which the peer refused an earlier frame.
        """
        message = encode_frame(frame, self._hidden_states)
        with self._lock:
            if self._over.done():
                raise self._over.result()
            self._wire.send_message(_STREAM, message)
            self._write()

    async def closed(self) -> ExoError:
        """Wait until the stream ends, which it never should; why it did."""
        return await asyncio.shield(self._over)

    def cancel(self) -> None:
        self._end(PeerUnavailable(f"the ring stream to {self._peer} was closed"))

    # The connection -----------------------------------------------------------------------------

    def _write(self) -> None:
        outgoing = self._tunnel.seal(self._wire.outgoing)
        if self._is_blocked or not outgoing:
            return
        try:
            sent = self._socket.send(outgoing)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            tell(self._loop, self._cut, _in_words(error))
            return
        self.sent_bytes += sent
        del outgoing[:sent]
        if outgoing:
            self._is_blocked = True
            tell(self._loop, self._wait_until_writable)

    def _wait_until_writable(self) -> None:
        with self._lock:
            if not self._over.done():
                self._loop.add_writer(self._socket, self._on_writable)
                silent = f"it took no bytes for {CALL_TIMEOUT_S:.0f} s"
                self._late = self._loop.call_later(CALL_TIMEOUT_S, self._cut, silent)

    def _on_writable(self) -> None:
        with self._lock:
            self._loop.remove_writer(self._socket)
            assert self._late is not None
            self._late.cancel()
            self._is_blocked = False
            self._write()

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._cut(_in_words(error))
            return
        if not data:
            self._cut("the peer closed it")
            return
        try:
            with self._lock:
                self._wire.receive(self._tunnel.receive(data))
                self._write()
                if self._wire.is_greeted and not self._answered.done():
                    self._answered.set_result(None)
        except InvalidFrame as error:
            self._cut(error.message)

    def on_headers(self, stream: int, headers: dict[str, str]) -> None:
        if headers.get(":status", "200") != "200":
            self._cut(f"HTTP status {headers[':status']}")
        elif "grpc-status" in headers:
            status = _STATUSES.get(headers["grpc-status"], headers["grpc-status"])
            details = unquote(headers.get("grpc-message", ""))
            self._end(from_status(self._peer, status, details, headers))

    def on_message(self, stream: int, message: bytes) -> None:
        """The Ack that would end the call, which never ends by itself."""

    def on_end(self, stream: int) -> None:
        self._cut("the peer ended it")

    def on_reset(self, stream: int) -> None:
        self._cut("the peer reset it")

    def on_goaway(self, reason: str) -> None:
        self._cut(f"the peer hung up: {reason}")

    def _cut(self, why: str) -> None:
        self._end(PeerUnavailable(f"the ring stream to {self._peer} was cut: {why}"))

    def _end(self, error: ExoError) -> None:
        with self._lock:
            if self._over.done():
                return
            logger.debug("the ring stream to %s ends: %s", self._peer, error.message)
            self._over.set_result(error)
            if self._late is not None:
                self._late.cancel()
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()


def _in_words(error: OSError) -> str:
    """The system's own limit (TCP_USER_TIMEOUT) may come before that of `_wait_until_writable`."""
    if error.errno == errno.ETIMEDOUT:
        return f"it took no bytes for {STALL_S:g} s"
    return str(error)


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            stall_ms = int(1000 * STALL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        await loop.sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection
