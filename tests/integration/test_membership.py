"""Routes to a peer: the best one is used and moved to, one that does not work is explained."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from cluster import cluster, free_port, until

from exo.download.sharing import Sharing
from exo.download.store import ModelStore
from exo.inference.dummy.engine import DummyEngine, Faults
from exo.networking.calls.messages import PROTOCOL
from exo.networking.discovery.base import NoDiscovery, Route
from exo.networking.discovery.network import Network
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.generated.node_service_pb2_grpc import (
    NodeServiceServicer,
    add_NodeServiceServicer_to_server,
)
from exo.orchestration.config import NodeConfig
from exo.orchestration.node import StandardNode


class NoInterfaces(Network):
    """Whatever is reached, is reached over the worst kind of interface."""

    def __init__(self) -> None:
        super().__init__(["lo"], interval_s=3600)
        self.interfaces = []


@contextlib.asynccontextmanager
async def node(name: str, folder: Path, host: str = "127.0.0.1") -> AsyncIterator[StandardNode]:
    """A node in this process, on the dummy engine, that only hears what the test tells it."""
    config = NodeConfig(name, uuid.uuid4().hex, folder, node_host=host, memory_bytes=10**9)
    made = StandardNode(
        config,
        DummyEngine(Faults()),
        ModelStore(folder, []),
        Sharing(),
        NoDiscovery(),
        NoInterfaces(),
    )
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def view(of: StandardNode, name: str) -> tuple[str, str, str]:
    found = of.topology().nodes.get(name)
    return (found.state, found.address, found.problem) if found else ("", "", "")


async def test_a_peer_moves_to_a_better_route_when_one_appears(tmp_path: Path) -> None:
    # Every address of 127.0.0.0/8 is this machine: two of them stand for Wi-Fi and a cable.
    async with node("a", tmp_path) as a, node("b", tmp_path, host="0.0.0.0") as b:
        instance = b.config.instance_id
        a.membership.heard("b", instance, Route("127.0.0.2", b.port, "wlan0", 3))
        await until(lambda: view(a, "b")[0] == "alive", "b is reached over the worse route")
        assert view(a, "b")[1] == f"127.0.0.2:{b.port}"
        a.membership.heard("b", instance, Route("127.0.0.3", 9, "thunderbolt0", 1))
        a.membership.heard("b", instance, Route("127.0.0.4", b.port, "eth0", 2))
        await until(
            lambda: view(a, "b")[1] == f"127.0.0.4:{b.port}",
            "moved to the better route that works, past the best one that does not",
        )
        assert view(a, "b")[0] == "alive"
        assert len([n for n in a.topology().nodes if n == "b"]) == 1


async def test_a_hello_is_enough_to_be_found(tmp_path: Path) -> None:
    """One-way broadcast: b never hears of a, but a's hello says where a listens."""
    async with node("a", tmp_path) as a, node("b", tmp_path) as b:
        a.membership.heard("b", b.config.instance_id, Route("127.0.0.1", b.port))
        await until(lambda: view(b, "a")[0] == "alive", "b connects back")
        await until(lambda: view(a, "b")[0] == "alive", "a sees that b did")


async def test_a_peer_that_is_heard_but_not_reached_is_shown_with_what_to_check(
    tmp_path: Path,
) -> None:
    async with node("a", tmp_path) as a:
        a.membership.heard("b", "1", Route("127.0.0.1", free_port()))
        await until(lambda: view(a, "b")[0] == "unreachable", "it is shown")
        assert "firewall" in view(a, "b")[2]
        assert "heard but cannot be reached" in view(a, "b")[2]


class OneWay(NodeServiceServicer):
    """A peer that answers but, behind its firewall, never gets a connection back."""

    async def Hello(self, request: pb.HelloRequest, context: object) -> pb.HelloReply:
        return pb.HelloReply(protocol=PROTOCOL, node_id="b", instance_id="1")

    async def Heartbeats(self, requests, context):  # type: ignore[no-untyped-def]
        async for beat in requests:
            yield pb.Heartbeat(counter=beat.counter, sees_you=False)


async def test_a_peer_that_cannot_connect_back_is_shown_with_what_to_check(
    tmp_path: Path,
) -> None:
    server = grpc.aio.server()
    add_NodeServiceServicer_to_server(OneWay(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with node("a", tmp_path) as a:
        a.membership.heard("b", "1", Route("127.0.0.1", port))
        await until(lambda: "cannot connect back" in view(a, "b")[2], "it is explained")
        assert view(a, "b")[0] == "unreachable"
        assert str(a.port) in view(a, "b")[2]
    await server.stop(None)


async def test_a_restart_is_the_same_peer_and_a_twin_is_named(tmp_path: Path) -> None:
    async with node("a", tmp_path) as a:
        async with node("b", tmp_path) as b:
            a.membership.heard("b", b.config.instance_id, Route("127.0.0.1", b.port))
            await until(lambda: view(a, "b")[0] == "alive", "the first b")
            async with asyncio.timeout(10):
                while "two running nodes call themselves b" not in view(a, "b")[2]:
                    a.membership.heard("b", "another", Route("127.0.0.1", 9))
                    await asyncio.sleep(0.05)
        await until(lambda: view(a, "b")[0] != "alive", "it left")
        async with node("b", tmp_path) as again:
            route = Route("127.0.0.1", again.port)

            def alive() -> bool:
                a.membership.heard("b", again.config.instance_id, route)
                return view(a, "b")[0] == "alive"

            await until(alive, "the restarted b is used")


async def test_strangers_that_only_say_hello_are_forgotten(tmp_path: Path) -> None:
    async with node("a", tmp_path) as a:
        before = len(asyncio.all_tasks())
        for i in range(50):
            a.membership.heard(f"stranger{i}", "1", Route("127.0.0.1", 9))
        await until(
            lambda: len(a.topology().nodes) == 1 and len(asyncio.all_tasks()) <= before + 2,
            "nothing of them is left",
        )


async def test_wait_for_peers_waits(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        first = c.add("n0", "--wait-for-peers", "1")
        await until(lambda: "waiting for 1 peers" in first.tail(), "it waits")
        assert "exo is ready" not in first.tail()
        c.add("n1")
        await until(lambda: "exo is ready" in first.tail(), "it goes on")


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((host, port)) == 0


async def test_a_host_is_listened_on_once_its_ports_are_free(tmp_path: Path) -> None:
    async with node("a", tmp_path) as a:
        server = a._server
        assert not listens("127.0.0.2", a.port)
        await server.listen_also(["127.0.0.1", "127.0.0.2"])
        assert listens("127.0.0.2", a.port) and listens("127.0.0.2", server.ring_port)
        for taken in (a.port, server.ring_port):
            with socket.socket() as other:
                other.bind(("127.0.0.3", taken))
                other.listen()
                with pytest.raises(OSError, match=r"127\.0\.0\.3|in use"):
                    await server.listen_also(["127.0.0.3"])
        await server.listen_also(["127.0.0.3"])
        assert listens("127.0.0.3", a.port) and listens("127.0.0.3", server.ring_port)
    assert not listens("127.0.0.2", a.port)
