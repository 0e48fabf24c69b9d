"""TLS without I/O, for connections that are not gRPC's own."""

from __future__ import annotations

import ssl
from typing import Protocol

from exo.errors import InvalidFrame

_PIECE = 2**18


class Tunnel(Protocol):
    """One end of a connection."""

    def seal(self, data: bytearray) -> bytearray:
        """Take all of `data`; what waits to be sent over the connection, from which whoever does
        the I/O takes it."""

    def receive(self, data: bytes) -> bytes:
        """What came over the connection, unsealed; as much as is there of it.

        Raises:
            InvalidFrame: the other end has not proved that it knows the cluster's key, or it is
                no TLS. The connection is of no more use.
        """


class OpenTunnel:
    """Where there is no key."""

    def seal(self, data: bytearray) -> bytearray:
        return data

    def receive(self, data: bytes) -> bytes:
        return data


class SealedTunnel:
    """TLS with certificates on both sides. `outgoing` is what waits to be sent, after every call of
    a method. Not for two threads at once."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None) -> None:
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._received, self._sealed, server_side=not server_name, server_hostname=server_name
        )
        self._is_open = self._is_broken = False
        self._waiting = bytearray()  # until both ends have proved who they are
        self.outgoing = bytearray()

    def send(self, data: bytes | bytearray) -> None:
        """Seal `data`, now or once the tunnel is open; if it never will be, `data` is dropped."""
        if self._is_broken:
            return
        if self._is_open:
            self._write(data)
        else:
            self._waiting += data
            self._open()

    def seal(self, data: bytearray) -> bytearray:
        self.send(data)
        data.clear()
        return self.outgoing

    def receive(self, data: bytes) -> bytes:
        self._received.write(data)
        try:
            if not self._is_open:
                self._open()
            return self._read() if self._is_open else b""
        except ssl.SSLError as error:
            self._is_broken = True
            self.outgoing += self._sealed.read()  # which tells the other end why
            raise InvalidFrame(_in_words(error, was_open=self._is_open)) from error

    def _open(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            self._is_open = True
            self._write(self._waiting)
            self._waiting.clear()
        self.outgoing += self._sealed.read()

    def _write(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:  # a record has 16 KiB at most
            rest = rest[self._tls.write(rest) :]
        rest.release()
        self.outgoing += self._sealed.read()

    def _read(self) -> bytes:
        pieces = []
        try:
            while piece := self._tls.read(_PIECE):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        self.outgoing += self._sealed.read()  # an answer to what is TLS's own
        return b"".join(pieces)


def _in_words(error: ssl.SSLError, *, was_open: bool) -> str:
    reason = error.reason or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in reason:
        return "the other end has another cluster key"
    return f"its TLS is broken: {reason}" if was_open else "the other end has no cluster key"
