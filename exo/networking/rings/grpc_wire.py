"""gRPC as it is on the wire, without I/O: HTTP/2 frames, header blocks, flow control, messages.

The streams of a ring are spoken by this and not by grpcio, which wakes three threads a message and
so takes half of a hop (docs/decisions/008). Only what gRPC uses: no priorities, no pushes, no
compression of messages; header blocks are hpack's work.

Sources: RFC 9113 (HTTP/2), and PROTOCOL-HTTP2.md of the grpc repository.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import hpack

from exo.errors import InvalidFrame

MAX_MESSAGE = 300 * 2**20
"""Longer messages are refused, as grpcio refuses them in exo's other calls."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME = struct.Struct(">IBI")  # length << 8 | type, flags, stream
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")
_PREFIX = struct.Struct(">BI")  # of a message: compressed or not, length

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = 0, 1, 3, 4, 5
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 1, 2, 4, 5
_PROTOCOL_ERROR = 1

_DEFAULT_WINDOW = 2**16 - 1
_31_BITS = _MAX_WINDOW = 2**31 - 1  # of a word the highest bit is reserved
_MAX_FRAME = 2**24 - 1
_MAX_HEADERS = 2**16
_CREDIT = 2**24
"""Bytes taken after which the sender is told that it may send as many more."""


class WireListener(Protocol):
    """Who hears what came. `stream` is HTTP/2's number of a call on its connection."""

    def on_headers(self, stream: int, headers: dict[str, str]) -> None:
        """A call begins, or its answer begins or ends."""

    def on_message(self, stream: int, message: bytes) -> None: ...

    def on_end(self, stream: int) -> None:
        """The other side has sent all of a call."""

    def on_reset(self, stream: int) -> None:
        """The other side has cut a call short."""

    def on_goaway(self, reason: str) -> None: ...


class GrpcWire:
    """One end of a connection. `outgoing` is what waits to be sent: whoever does the I/O takes it
    from there, after every call of a method."""

    def __init__(self, listener: WireListener, *, is_client: bool) -> None:
        self._listener = listener
        self.outgoing = bytearray(_PREFACE if is_client else b"")
        self.is_greeted = False
        """Whether the other side speaks HTTP/2."""
        self._preface = b"" if is_client else _PREFACE
        self._partial = bytearray()  # of a frame
        self._wanted = 0  # length the partial frame has to grow to
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._block: tuple[int, int, bytes] | None = None  # stream, flags, header block so far
        self._messages: dict[int, bytearray] = {}  # of each open stream the message so far
        self._taken = {0: 0}  # by stream, and by all of them as 0: bytes not yet given credit for
        self._window = _DEFAULT_WINDOW  # what may be sent, on all streams together
        self._windows: dict[int, int] = {}  # and on each
        self._initial_window = _DEFAULT_WINDOW
        self._max_frame = 2**14
        self._waiting: deque[tuple[int, memoryview]] = deque()  # 0: frames that need no window
        self._send(
            _SETTINGS,
            b"".join(
                _SETTING.pack(*pair)
                for pair in (
                    (_ENABLE_PUSH, 0),
                    (_INITIAL_WINDOW_SIZE, _MAX_WINDOW),
                    (_MAX_FRAME_SIZE, _MAX_FRAME),
                )
            ),
        )
        self._send(_WINDOW_UPDATE, _WORD.pack(_MAX_WINDOW - _DEFAULT_WINDOW))

    def open(self, stream: int) -> None:
        """Take and send messages on a stream from now on."""
        self._messages[stream] = bytearray()
        self._taken[stream] = 0
        self._windows[stream] = self._initial_window

    def close(self, stream: int) -> None:
        """Drop what still comes on a stream."""
        self._messages.pop(stream, None)
        self._taken.pop(stream, None)
        self._windows.pop(stream, None)
        self._waiting = deque(item for item in self._waiting if item[0] != stream)

    def send_headers(
        self, stream: int, headers: Iterable[tuple[str, str]], *, last: bool = False
    ) -> None:
        """Begin or end a call or an answer, after the messages sent before."""
        block = self._encoder.encode(list(headers))
        flags = _END_HEADERS | (_END_STREAM if last else 0)
        self._waiting.append((0, memoryview(_frame(_HEADERS, block, stream, flags))))
        self._flush()

    def send_message(self, stream: int, message: bytes) -> None:
        """Send a message, or as much of it as the other side has room for and the rest later."""
        self._waiting.append((stream, memoryview(_PREFIX.pack(0, len(message)) + message)))
        self._flush()

    def send_reset(self, stream: int) -> None:
        """Nothing more is wanted on a stream."""
        self._send(_RST_STREAM, bytes(4), stream)

    def send_goaway(self) -> None:
        """The other side breaks the protocol."""
        self._send(_GOAWAY, bytes(4) + _WORD.pack(_PROTOCOL_ERROR))

    def receive(self, data: bytes) -> None:
        """Take what came over the connection.

        Raises:
            InvalidFrame: it is not what gRPC sends. The connection is of no more use.
        """
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at = 0
        if self._preface:
            if not data.startswith(self._preface):
                if not self._preface.startswith(data):
                    raise InvalidFrame(f"the connection begins with {data[:24]!r}, not as gRPC's")
                self._keep(data, len(self._preface))
                return
            at, self._preface = len(self._preface), b""
        end = at + _FRAME.size
        while len(data) >= end:
            word, flags, stream = _FRAME.unpack_from(data, at)
            kind, length = word & 0xFF, word >> 8
            if kind != _DATA or not self.is_greeted:
                self._check(kind, length)
            end += length
            if len(data) < end:
                break
            self._take(kind, flags, stream & _31_BITS, data[at + _FRAME.size : end])
            at, end = end, end + _FRAME.size
        if at < len(data):
            self._keep(data[at:], end - at)

    def _check(self, kind: int, length: int) -> None:
        if not self.is_greeted:
            if kind != _SETTINGS:
                raise InvalidFrame("the other side does not begin with HTTP/2's settings")
            self.is_greeted = True
        if length > _MAX_HEADERS:
            raise InvalidFrame(f"an HTTP/2 frame of type {kind} and {length} bytes")

    def _keep(self, partial: bytes, wanted: int) -> None:
        self._partial += partial
        self._wanted = wanted

    def _send(self, kind: int, payload: bytes, stream: int = 0, flags: int = 0) -> None:
        self.outgoing += _frame(kind, payload, stream, flags)

    def _flush(self) -> None:
        """Send what waits, as far as the windows reach."""
        while self._waiting:
            stream, payload = self._waiting[0]
            if stream:
                room = min(self._window, self._windows.get(stream, 0), self._max_frame)
                if room <= 0:
                    return
                piece, rest = payload[:room], payload[room:]
                self._window -= len(piece)
                self._windows[stream] -= len(piece)
                self.outgoing += _FRAME.pack(len(piece) << 8 | _DATA, 0, stream)
                self.outgoing += piece
                if rest:
                    self._waiting[0] = (stream, rest)
                    continue
            else:
                self.outgoing += payload
            self._waiting.popleft()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and kind != _CONTINUATION:
            raise InvalidFrame("a header block was broken off")
        if stream == 0 and kind in (_DATA, _HEADERS):
            raise InvalidFrame("a call without a number")
        if kind == _DATA:
            self._take_data(flags, stream, payload)
        elif kind == _HEADERS:
            block = _unpadded(flags, payload)
            self._take_block(stream, flags, block[5:] if flags & _PRIORITY else block)
        elif kind == _CONTINUATION:
            if self._block is None or self._block[0] != stream:
                raise InvalidFrame("a header block goes on that was not begun")
            _, first, block = self._block
            self._take_block(stream, first | flags & _END_HEADERS, block + payload)
        elif kind == _SETTINGS:
            if not flags & _ACK:
                self._take_settings(payload)
        elif kind == _PING:
            if not flags & _ACK:
                self._send(_PING, payload, 0, _ACK)
        elif kind == _WINDOW_UPDATE:
            self._take_window(stream, payload)
        elif kind == _RST_STREAM:
            if stream in self._messages:
                self.close(stream)
                self._listener.on_reset(stream)
        elif kind == _GOAWAY:
            self._listener.on_goaway(payload[8:].decode(errors="replace"))
        elif kind == _PUSH_PROMISE:
            raise InvalidFrame("an HTTP/2 push")

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._credit(0, len(payload))
        received = self._messages.get(stream)
        if received is None:
            return
        self._credit(stream, len(payload))
        data = _unpadded(flags, payload)
        if received:
            received += data
            data = bytes(received)
            received.clear()
        at = 0
        while len(data) - at >= _PREFIX.size and stream in self._messages:
            compressed, length = _PREFIX.unpack_from(data, at)
            if compressed or length > MAX_MESSAGE:
                raise InvalidFrame(f"a message of {length} bytes, compressed: {bool(compressed)}")
            end = at + _PREFIX.size + length
            if len(data) < end:
                break
            self._listener.on_message(stream, data[at + _PREFIX.size : end])
            at = end
        received += data[at:]
        if flags & _END_STREAM and stream in self._messages:
            self._listener.on_end(stream)

    def _credit(self, stream: int, count: int) -> None:
        self._taken[stream] += count
        if self._taken[stream] >= _CREDIT:
            self._send(_WINDOW_UPDATE, _WORD.pack(self._taken[stream]), stream)
            self._taken[stream] = 0

    def _take_block(self, stream: int, flags: int, block: bytes) -> None:
        if len(block) > _MAX_HEADERS:
            raise InvalidFrame(f"headers of {len(block)} bytes")
        if not flags & _END_HEADERS:
            self._block = (stream, flags, block)
            return
        self._block = None
        try:
            headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
        except hpack.HPACKError as error:
            raise InvalidFrame(f"headers that cannot be read: {error}") from error
        self._listener.on_headers(stream, headers)
        if flags & _END_STREAM and stream in self._messages:
            self._listener.on_end(stream)

    def _take_settings(self, payload: bytes) -> None:
        if len(payload) % _SETTING.size:
            raise InvalidFrame(f"HTTP/2 settings of {len(payload)} bytes")
        for key, value in _SETTING.iter_unpack(payload):
            if key == _HEADER_TABLE_SIZE:
                self._encoder.header_table_size = min(value, 4096)
            elif key == _MAX_FRAME_SIZE:
                if not 2**14 <= value <= _MAX_FRAME:
                    raise InvalidFrame(f"HTTP/2 frames of at most {value} bytes")
                self._max_frame = value
            elif key == _INITIAL_WINDOW_SIZE:
                if value > _MAX_WINDOW:
                    raise InvalidFrame(f"an HTTP/2 window of {value} bytes")
                for stream in self._windows:
                    self._windows[stream] += value - self._initial_window
                self._initial_window = value
        self._send(_SETTINGS, b"", 0, _ACK)
        self._flush()

    def _take_window(self, stream: int, payload: bytes) -> None:
        if len(payload) != _WORD.size:
            raise InvalidFrame(f"a window update of {len(payload)} bytes")
        more = _WORD.unpack(payload)[0] & _31_BITS
        if stream == 0:
            self._window += more
        elif stream in self._windows:
            self._windows[stream] += more
        self._flush()


def _frame(kind: int, payload: bytes, stream: int, flags: int) -> bytes:
    return _FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise InvalidFrame("padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]
