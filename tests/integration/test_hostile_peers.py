"""Whatever comes to a node's port, in any phase of a session: the process lives, what it holds is
back at its baseline, and the next request gives the exact tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median_low

import grpc
import grpc.aio
import msgspec
import psutil
import pytest
from cluster import Cluster, ExoProcess, until

from exo.inference.sampling import SamplingParams
from exo.networking.calls.messages import PROTOCOL
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.generated.node_service_pb2_grpc import NodeServiceStub

ROLES = {"head": "3GB", "middle": "2GB", "tail": "1GB", "api": "500KB"}

# --- ways to be a bad peer on a raw connection -------------------------------------------------


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def fin(port: int) -> None:
    connect(port).close()


def rst(port: int) -> None:
    with connect(port) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def http_get(port: int) -> None:
    with connect(port) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        _read_some(s)


def tls_hello(port: int) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connect(port) as s, contextlib.suppress(OSError):
        # No TLS; or it is, and a certificate is wanted.
        with context.wrap_socket(s) as sealed:
            assert sealed.recv(1) == b""


def noise(port: int) -> None:
    with connect(port) as s:
        try:
            s.sendall(os.urandom(2**20))
            _read_some(s)
        except OSError:
            pass  # refused in the middle of it


def lying_length(port: int) -> None:
    with connect(port) as s:
        # HTTP/2's preface, then a frame that says it is 16 MiB and is not.
        s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01abc")
        _read_some(s)


def _read_some(s: socket.socket) -> None:
    s.settimeout(0.3)
    try:
        while s.recv(4096):
            pass
    except OSError:
        pass


RAW = [fin, rst, http_get, tls_hello, noise, lying_length]


Holdings = dict[str, tuple[int, ...]]


@contextlib.contextmanager
def ring_at_rest(folder: Path, **environment: str) -> Iterator[tuple[Cluster, Holdings]]:
    """Nodes, and what they hold after their first answers: one for all tests, so that what each
    leaves a little of adds up."""
    c = Cluster(folder)
    try:
        for role, memory in ROLES.items():
            c.add(role, "--memory", memory, EXO_DUMMY_FAULTS="delay=0.005", **environment)

        async def measured() -> Holdings:
            await c.together()
            for role in ("api", "middle"):
                await c.nodes[role].chat("exact")
            return await at_rest(c)

        yield c, asyncio.run(measured())
    finally:
        c.stop()


@pytest.fixture(scope="module")
def ring_and_baseline(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Cluster, Holdings]]:
    """One cluster for all tests of this file: each must leave it as it found it."""
    with ring_at_rest(tmp_path_factory.mktemp("ring")) as found:
        yield found


@pytest.fixture
def ring(ring_and_baseline: tuple[Cluster, Holdings]) -> Cluster:
    return ring_and_baseline[0]


@pytest.fixture
def baseline(ring_and_baseline: tuple[Cluster, Holdings]) -> Holdings:
    return ring_and_baseline[1]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Holdings]]:
    """The same with a cluster key."""
    folder = tmp_path_factory.mktemp("sealed")
    with ring_at_rest(folder, EXO_CLUSTER_KEY="what all of them know") as found:
        yield found


async def holdings(c: Cluster) -> Holdings:
    """What each process holds: tasks, sequences, plans, descriptors."""
    found = {}
    for name, node in c.nodes.items():
        status = (await node.get("/v1/topology"))["status"]
        assert node.process is not None
        descriptors = psutil.Process(node.process.pid).num_fds()
        found[name] = (status["tasks"], status["sequences"], len(status["places"]), descriptors)
    return found


def memory(c: Cluster) -> dict[str, int]:
    return {
        name: psutil.Process(node.process.pid).memory_info().rss
        for name, node in c.nodes.items()
        if node.process is not None
    }


async def unharmed(
    c: Cluster,
    before: Holdings,
    misbehave: Callable[[ExoProcess], Awaitable[None]],
    times: int = 3,
) -> None:
    """Misbehaviour towards every role, back at the baseline, the same tokens."""
    expected = await c.nodes["api"].chat("exact")
    assert await c.nodes["middle"].chat("exact") == expected
    memory_before = memory(c)
    for node in c.nodes.values():
        for _ in range(times):
            await misbehave(node)

    async def back_at_baseline() -> bool:
        assert all(node.lives for node in c.nodes.values())
        now = await holdings(c)
        return all(
            all(a <= b + 1 for a, b in zip(now[name], before[name], strict=True)) for name in now
        )

    try:
        await until(back_at_baseline, "everything is freed", 15)
    except AssertionError as error:
        raise AssertionError(f"before {before}\nnow {await holdings(c)}") from error
    for name, rss in memory(c).items():
        assert rss < memory_before[name] + 60 * 2**20, f"{name} grew"
    for role in ("api", "head"):
        assert await c.nodes[role].chat("exact") == expected
    assert await c.nodes["api"].ring() == ["head", "middle", "tail"]


async def at_rest(c: Cluster) -> Holdings:
    """The median of two seconds: a node that looks after its plans, or an answer that has just
    ended, makes a moment's count a task or two lower or higher."""
    seen = []
    for _ in range(9):
        seen.append(await holdings(c))
        await asyncio.sleep(0.25)
    columns = {name: zip(*(moment[name] for moment in seen), strict=True) for name in c.nodes}
    return {name: tuple(map(median_low, counts)) for name, counts in columns.items()}


async def survives(c: Cluster, before: Holdings, way: Callable[[int], None]) -> None:
    async def misbehave(node: ExoProcess) -> None:
        for port in (node.node_port, node.ring_port):
            await asyncio.to_thread(way, port)

    await unharmed(c, before, misbehave)


@pytest.mark.parametrize("way", RAW)
async def test_on_a_bare_connection(
    ring: Cluster, baseline: Holdings, way: Callable[[int], None]
) -> None:
    await survives(ring, baseline, way)


@pytest.mark.parametrize("way", RAW)
async def test_on_a_bare_connection_where_a_key_is_wanted(
    sealed: tuple[Cluster, Holdings], way: Callable[[int], None]
) -> None:
    await survives(*sealed, way)


async def test_a_peer_without_the_key_does_nothing(sealed: tuple[Cluster, Holdings]) -> None:
    async def misbehave(node: ExoProcess) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{node.node_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await NodeServiceStub(channel).Goodbye(
                    pb.GoodbyeRequest(node_id="tail", instance_id="x"), timeout=5
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    await unharmed(*sealed, misbehave, times=1)


# --- a peer that speaks the protocol and then misbehaves ---------------------------------------


class Liar:
    """A raw client of one node's gRPC ports."""

    def __init__(self, node: ExoProcess) -> None:
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{node.node_port}")
        self.ring_channel = grpc.aio.insecure_channel(f"127.0.0.1:{node.ring_port}")
        self.stub = NodeServiceStub(self.channel)
        self.ring_call = self.ring_channel.stream_unary("/exo.RingService/Frames")

    async def __aenter__(self) -> Liar:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.ring_channel.close()


def hello_request(**changes: object) -> pb.HelloRequest:
    fields = {"protocol": PROTOCOL, "cluster": "x", "node_id": "liar", "instance_id": "1"}
    return pb.HelloRequest(**fields | {"port": 9} | changes)


async def wrong_hello(node: ExoProcess) -> None:
    async with Liar(node) as liar:
        for request in (
            hello_request(),
            hello_request(protocol=99),
            hello_request(cluster=node.cluster, node_id=node.name),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await liar.stub.Hello(request, timeout=5)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def hello_and_gone(node: ExoProcess) -> None:
    """The root that dies before the config. Its port leads nowhere, so it stays a stranger."""
    async with Liar(node) as liar:
        await liar.stub.Hello(hello_request(cluster=node.cluster), timeout=5)


async def heartbeat_and_gone(node: ExoProcess) -> None:
    async with Liar(node) as liar:
        call = liar.stub.Heartbeats(metadata=(("exo-node-id", "liar"),))
        await call.write(pb.Heartbeat(counter=1))
        assert not (await call.read()).sees_you


async def prepare_and_gone(node: ExoProcess) -> None:
    async with Liar(node) as liar:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in liar.stub.Prepare(pb.PrepareRequest(model_id="no such model")):
                pass
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        call = liar.stub.Prepare(pb.PrepareRequest(model_id="dummy"))
        await call.read()
        call.cancel()


def lying_plan(node: ExoProcess, end: int = 8) -> pb.Plan:
    shard = pb.Shard(model_id="dummy", start_layer=0, end_layer=end, n_layers=8)
    member = pb.Plan.Member(node_id=node.name, shard=shard)
    return pb.Plan(
        model_id="dummy", epoch=1, planner_id="liar", checkpoint="x", members=[member], hash="0"
    )


async def lying_load(node: ExoProcess) -> None:
    async with Liar(node) as liar:
        for plan in (pb.Plan(), lying_plan(node), lying_plan(node, end=5), lying_plan(node, end=9)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in liar.stub.LoadShard(pb.LoadShardRequest(plan=plan)):
                    pass
            assert refused.value.code() in (
                grpc.StatusCode.ABORTED,
                grpc.StatusCode.INVALID_ARGUMENT,
            )


async def lying_frames(node: ExoProcess) -> None:
    """Frames of no plan, and ones that are none or lie about their shape."""
    plan = (await node.get("/v1/topology"))["plans"][0]["hash"]
    slices, states = [["s", 0, 2, None, 0]], bytes(32)
    frames: list[tuple[str, object]] = [
        ("nothing", [3, ["s"]]),
        (plan, []),
        (plan, [4, ["s"]]),
        (plan, [1, 10**9, slices, [1], "float32", 4, states]),
        (plan, [1, 10**9, slices, [1, 2], "float32", 9, b"x"]),
        (plan, [1, 10**9, slices, [1, 2], "object", 4, states]),
        (plan, [1, 10**9, slices, [1, -2], "float32", 4, states]),
        (plan, [1, 10**9, slices, [1, 2**40], "float32", 4, states]),
        (plan, [1, 0, slices, [1, 2], "float32", 4, states]),
    ]
    for stream_plan, frame in frames:
        async with Liar(node) as liar:
            call = liar.ring_call(metadata=(("exo-plan", stream_plan),))
            await call.write(msgspec.msgpack.encode(frame))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() in (
                grpc.StatusCode.ABORTED,
                grpc.StatusCode.INVALID_ARGUMENT,
            )


async def false_failure(node: ExoProcess) -> None:
    async with Liar(node) as liar:
        error = pb.Error(code="engine_failed", message="a lie")
        failure = pb.StepFailure(plan_hash="nothing", step=1, node_id="liar", error=error)
        await liar.stub.ReportFailure(failure, timeout=5)


def generate_and_gone(prompt_tokens: int, read: int) -> Callable[[ExoProcess], Awaitable[None]]:
    async def misbehave(node: ExoProcess) -> None:
        """An API node that dies in prefill, or after some tokens of decode."""
        plan = (await node.get("/v1/topology"))["plans"][0]["hash"]
        request = pb.GenerateRequest(
            plan_hash=plan,
            sequence_id=os.urandom(4).hex(),
            prompt=[65] * prompt_tokens,
            sampling=msgspec.msgpack.encode(SamplingParams(temperature=0)),
            max_tokens=1000,
        )
        async with Liar(node) as liar:
            call = liar.stub.Generate(request)
            if node.name != "head":
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async for _ in call:
                        pass
                assert refused.value.code() == grpc.StatusCode.ABORTED
                return
            for _ in range(read):
                await call.read()

    return misbehave


async def unreadable_sampling(node: ExoProcess) -> None:
    plan = (await node.get("/v1/topology"))["plans"][0]["hash"]
    for lie in (b"", b"\xff", msgspec.msgpack.encode([9.0]), msgspec.msgpack.encode({"a": 1})):
        async with Liar(node) as liar:
            call = liar.stub.Generate(
                pb.GenerateRequest(plan_hash=plan, sequence_id="s", prompt=[65], sampling=lie)
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def retire_nothing(node: ExoProcess) -> None:
    async with Liar(node) as liar:
        await liar.stub.RetirePlan(pb.RetirePlanRequest(plan_hash="nothing"), timeout=5)
        await liar.stub.Goodbye(pb.GoodbyeRequest(node_id="liar", instance_id="2"), timeout=5)


SPOKEN = {
    "hello: wrong": wrong_hello,
    "hello: gone before the config": hello_and_gone,
    "hello: one heartbeat and gone": heartbeat_and_gone,
    "plan: prepare and gone": prepare_and_gone,
    "load: a plan that lies": lying_load,
    "decode: frames that lie": lying_frames,
    "decode: a failure that is none": false_failure,
    "prefill: the client's node dies": generate_and_gone(2000, 0),
    "decode: the client's node dies": generate_and_gone(5, 3),
    "prefill: sampling that cannot be read": unreadable_sampling,
    "release: of what is not there": retire_nothing,
}


@pytest.mark.parametrize("phase", SPOKEN)
async def test_in_the_protocol(ring: Cluster, baseline: Holdings, phase: str) -> None:
    await unharmed(ring, baseline, SPOKEN[phase], times=2)
