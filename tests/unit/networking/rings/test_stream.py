"""The ring's stream between exo's two ends, sealed and not, and between each of them and grpcio,
which proves that what they speak is gRPC."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo.errors import CacheMiss, ExoError, InvalidFrame, PeerUnavailable, PlanMismatch
from exo.inference.batch import ForwardBatch, Slice
from exo.networking.connections import OPEN, Connections
from exo.networking.rings import grpc_wire
from exo.networking.rings import server as server_module
from exo.networking.rings import stream as stream_module
from exo.networking.rings.frames import Frame, Release, Step, decode_frame, encode_frame
from exo.networking.rings.grpc_wire import GrpcWire
from exo.networking.rings.server import RingServer
from exo.networking.rings.stream import RingStream
from exo.networking.rpc import OPTIONS, abort
from exo.networking.trust.cluster_key import ClusterKey

PLAN = "a plan"


def step(number: int, tokens: int, hidden: int = 16) -> Step:
    """With random hidden states."""
    values = np.random.default_rng(number).standard_normal((tokens, hidden), dtype=np.float32)
    batch = ForwardBatch((Slice("s", 0, tokens),), np.arange(tokens, dtype=np.int32))
    return Step(number, batch, values)


def same(a: Frame, b: Frame) -> bool:
    return encode_frame(a) == encode_frame(b)


class Received:
    """Frames as they come, and what their receiver answers them with."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.error: Exception | None = None

    def on_frame(self, plan_hash: str, frame: Frame) -> None:
        assert plan_hash == PLAN
        if self.error is not None:
            raise self.error
        self.frames.append(frame)

    async def are(self, expected: list[Frame]) -> None:
        async with asyncio.timeout(20):
            while len(self.frames) < len(expected):
                await asyncio.sleep(0.01)
        assert len(self.frames) == len(expected)
        assert all(map(same, self.frames, expected))


SEALED = Connections(ClusterKey("all nodes of a cluster know it"))


class SealedPort(int):
    """Where who connects has to know the key."""


@contextlib.asynccontextmanager
async def own_server(received: Received, connections: Connections = OPEN) -> AsyncIterator[int]:
    server = RingServer(received.on_frame, connections)
    try:
        yield await server.listen(["127.0.0.1"], 0)
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def sealed_server(received: Received) -> AsyncIterator[int]:
    async with own_server(received, SEALED) as port:
        yield SealedPort(port)


@contextlib.asynccontextmanager
async def grpcio_server(received: Received) -> AsyncIterator[int]:
    async def frames(requests, context):  # type: ignore[no-untyped-def]
        plan_hash = dict(context.invocation_metadata())["exo-plan"]
        async for message in requests:
            try:
                received.on_frame(plan_hash, decode_frame(message))
            except ExoError as error:
                await abort(context, error)
        return b""

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_unary_rpc_method_handler(frames)
    server.add_registered_method_handlers("exo.RingService", {"Frames": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=0)


Server = Callable[[Received], contextlib.AbstractAsyncContextManager[int]]
SERVERS = pytest.mark.parametrize("server", [own_server, sealed_server, grpcio_server])


@contextlib.asynccontextmanager
async def stream_to(port: int) -> AsyncIterator[RingStream]:
    sealed = SEALED if isinstance(port, SealedPort) else OPEN
    tunnel = sealed.tunnel(is_client=True)
    stream = await RingStream.open("a peer", "127.0.0.1", int(port), PLAN, tunnel=tunnel)
    try:
        yield stream
    finally:
        stream.cancel()


@SERVERS
async def test_frames_arrive_whole_and_in_order(server: Server) -> None:
    """Small ones, and ones larger than HTTP/2's frames, its first windows and a socket's buffer."""
    frames: list[Frame] = [step(1, 1), Release(("s", "t")), step(2, 300, 4096), step(3, 1)]
    frames += [step(number, 200, 2048) for number in range(4, 24)]
    received = Received()
    async with server(received) as port, stream_to(port) as stream:
        for frame in frames:
            stream.send(frame)
        await received.are(frames)


@SERVERS
async def test_any_thread_may_send(server: Server) -> None:
    frames: list[Frame] = [step(number, 1 + number % 50, 1024) for number in range(1, 200)]
    received = Received()
    async with server(received) as port, stream_to(port) as stream:
        thread = threading.Thread(target=lambda: [stream.send(frame) for frame in frames])
        thread.start()
        await received.are(frames)
        thread.join()


@SERVERS
@pytest.mark.parametrize(
    "error", [PlanMismatch("another plan: 100 % wrong ✗"), CacheMiss("x", param="y")]
)
async def test_a_refusal_arrives_as_the_error_it_was(server: Server, error: ExoError) -> None:
    received = Received()
    received.error = error
    async with server(received) as port, stream_to(port) as stream:
        stream.send(Release(("s",)))
        async with asyncio.timeout(5):
            found = await stream.closed()
        assert (type(found), found.message, found.param) == (type(error), str(error), error.param)
        with pytest.raises(type(error)):
            stream.send(Release(("s",)))


async def test_a_bug_in_the_receiver_is_an_error_of_the_stream() -> None:
    received = Received()
    received.error = ZeroDivisionError("oh")
    async with own_server(received) as port, stream_to(port) as stream:
        stream.send(Release(("s",)))
        async with asyncio.timeout(5):
            assert "ZeroDivisionError: oh" in (await stream.closed()).message
    # Nobody else is harmed.
    received.error = None
    async with own_server(received) as port, stream_to(port) as stream:
        stream.send(Release(("s",)))
        await received.are([Release(("s",))])


@SERVERS
async def test_a_server_that_goes_cuts_the_stream(server: Server) -> None:
    received = Received()
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(server(received))
        stream = await stack.enter_async_context(stream_to(port))
        stream.send(Release(("s",)))
        await received.are([Release(("s",))])
        closing = asyncio.create_task(stream.closed())
    async with asyncio.timeout(5):
        assert isinstance(await closing, PeerUnavailable)
    with pytest.raises(PeerUnavailable):
        stream.send(Release(("s",)))


async def test_a_port_that_is_taken_on_one_address_leaves_nothing_behind() -> None:
    server = RingServer(Received().on_frame)
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            await server.listen(["127.0.0.1", "127.0.0.2"], port)
        socket.create_server(("127.0.0.1", port)).close()
    await server.stop()


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(PeerUnavailable, match="no ring stream to a peer, port"):
            await RingStream.open("a peer", "127.0.0.1", taken.getsockname()[1], PLAN)


class _Mute(asyncio.Protocol):
    """Says one thing and then nothing, and reads nothing."""

    def __init__(self, greeting: bytes, connections: list[asyncio.Transport]) -> None:
        self._greeting, self._connections = greeting, connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._connections.append(transport)
        transport.pause_reading()
        transport.write(self._greeting)


@contextlib.asynccontextmanager
async def mute(greeting: bytes) -> AsyncIterator[int]:
    connections: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Mute(greeting, connections), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(20):
            yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in connections:
            connection.abort()


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 200 OK\r\n\r\nhello, I am no gRPC at all"])
async def test_somebody_who_speaks_no_grpc(
    greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "CALL_TIMEOUT_S", 0.3)
    async with mute(greeting) as port:
        with pytest.raises(PeerUnavailable):
            await RingStream.open("a peer", "127.0.0.1", port, PLAN)


@pytest.mark.parametrize("server", [own_server, sealed_server])
@pytest.mark.parametrize("greeting", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_who_opens_no_call_is_hung_up_on(
    server: Server, greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = Received()
    async with server(received) as port, stream_to(port) as stream:
        monkeypatch.setattr(server_module, "IDLE_S", 0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(greeting)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while await reader.read(100):
                    pass
        writer.close()
        stream.send(step(0, 1))  # who has one open stays
        await received.are([step(0, 1)])


async def test_a_peer_that_takes_no_more_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with mute(bytes(GrpcWire(Unheard(), is_client=False).outgoing)) as port:
        stream = await RingStream.open("a peer", "127.0.0.1", port, PLAN)
        monkeypatch.setattr(stream_module, "CALL_TIMEOUT_S", 0.3)
        for number in range(1, 40):
            stream.send(step(number, 256, 2048))
        found = await stream.closed()
    assert isinstance(found, PeerUnavailable)
    assert "took no bytes" in found.message


@contextlib.asynccontextmanager
async def grpcio_call(port: int) -> AsyncIterator[grpc.aio.StreamUnaryMultiCallable]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        yield channel.stream_unary("/exo.RingService/Frames")


async def test_grpcio_is_served() -> None:
    frames: list[Frame] = [step(1, 1), step(2, 300, 4096), Release(("s",)), step(3, 100, 512)]
    received = Received()
    async with own_server(received) as port, grpcio_call(port) as frames_call:
        call = frames_call(metadata=(("exo-plan", PLAN),))
        for frame in frames:
            await call.write(encode_frame(frame))
        await call.done_writing()
        assert await call == b""
        await received.are(frames)


async def test_grpcio_is_refused() -> None:
    received = Received()
    received.error = PlanMismatch("no such plan")
    async with own_server(received) as port, grpcio_call(port) as frames_call:
        call = frames_call(metadata=(("exo-plan", PLAN),))
        await call.write(encode_frame(Release(("s",))))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() == grpc.StatusCode.ABORTED
        assert refused.value.details() == "no such plan"
        # The connection still serves: two calls at once on it.
        received.error = None
        calls = [frames_call(metadata=(("exo-plan", PLAN),)) for _ in range(2)]
        for call in calls:
            await call.write(encode_frame(Release(("s",))))
        calls.pop().cancel()
        await calls[0].done_writing()
        assert await calls[0] == b""


# The wire without a connection --------------------------------------------------------------------


class Unheard:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ended = False
        self.wire: GrpcWire | None = None

    def on_headers(self, stream: int, headers: dict[str, str]) -> None:
        if self.wire is not None:
            self.wire.open(stream)

    def on_message(self, stream: int, message: bytes) -> None:
        self.messages.append(message)

    def on_end(self, stream: int) -> None:
        self.ended = True

    def on_reset(self, stream: int) -> None:
        self.ended = True

    def on_goaway(self, reason: str) -> None:
        self.ended = True


def sent(payloads: list[bytes]) -> bytes:
    """What a client sends whose server has given it all windows."""
    client = GrpcWire(Unheard(), is_client=True)
    client.receive(bytes(GrpcWire(Unheard(), is_client=False).outgoing))
    client.open(1)
    client.send_headers(1, [(":method", "POST"), (":path", "/x/y"), ("a-key", "a value")])
    for payload in payloads:
        client.send_message(1, payload)
    client.send_headers(1, [("a-trailer", "x")], last=True)
    return bytes(client.outgoing)


def pieces(data: bytes, seed: int, longest: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    at = 0
    while at < len(data):
        end = at + chance.randint(1, longest)
        yield data[at:end]
        at = end


@given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 1000, 70_000]), max_size=6),
    seed=st.integers(0, 1000),
    longest=st.sampled_from([1, 7, 500, 100_000]),
)
@settings(max_examples=60, deadline=None)
def test_however_bytes_are_cut_the_messages_are_the_same(
    sizes: list[int], seed: int, longest: int
) -> None:
    payloads = [bytes([i]) * size for i, size in enumerate(sizes)]
    heard = Unheard()
    heard.wire = GrpcWire(heard, is_client=False)
    for piece in pieces(sent(payloads), seed, longest):
        heard.wire.receive(piece)
    assert heard.messages == payloads
    assert heard.ended


@given(seed=st.integers(0, 2**32), flips=st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_raise_invalid_frame_or_nothing(seed: int, flips: int) -> None:
    chance = random.Random(seed)
    data = bytearray(sent([b"hello", b"x" * 300, b""]))
    for _ in range(flips):
        data[chance.randrange(24, len(data))] = chance.randrange(256)
    heard = Unheard()
    heard.wire = GrpcWire(heard, is_client=False)
    with contextlib.suppress(InvalidFrame):
        heard.wire.receive(bytes(data))


def test_no_more_is_sent_than_the_other_side_has_room_for() -> None:
    """HTTP/2's first window is 65,535 bytes; the rest follows as room is given."""
    client, server_heard = GrpcWire(Unheard(), is_client=True), Unheard()
    client.outgoing.clear()
    client.open(1)
    client.send_message(1, b"x" * 200_000)
    frames = 65_535 // 2**14 + 1
    assert len(client.outgoing) == 65_535 + 9 * frames
    server_heard.wire = GrpcWire(server_heard, is_client=False)
    client.receive(bytes(server_heard.wire.outgoing))
    assert len(client.outgoing) > 200_000


@pytest.mark.parametrize("piece", [2**30, 100_000])
def test_room_is_given_for_what_was_taken_and_no_more(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first window is HTTP/2's largest: a byte too much would break the connection."""
    monkeypatch.setattr(grpc_wire, "_CREDIT", 1)  # at once
    client, heard = GrpcWire(Unheard(), is_client=True), Unheard()
    heard.wire = server = GrpcWire(heard, is_client=False)
    client.receive(bytes(server.outgoing))
    client.open(1)
    client.send_headers(1, [(":path", "/x/y")])
    server.receive(bytes(client.outgoing))
    server.outgoing.clear()
    message = b"x" * 300_000
    for _ in range(3):
        client.outgoing.clear()
        client.send_message(1, message)
        for at in range(0, len(client.outgoing), piece):
            server.receive(bytes(client.outgoing[at : at + piece]))
    assert heard.messages == [message] * 3
    given: dict[int, int] = {}
    for at in range(0, len(server.outgoing), 13):
        _, kind, _, stream, room = struct.unpack_from(">HxBBII", server.outgoing, at)
        assert kind == 8  # a window update
        given[stream] = given.get(stream, 0) + room
    taken = 3 * (len(message) + 5)
    assert given == {0: taken, 1: taken}
