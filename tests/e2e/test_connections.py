"""More connections than a process may have files, and the names of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from cluster import Cluster, ExoProcess, cluster, until

pytestmark = pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="the limits of another process are Linux's to set"
)


@pytest.fixture
async def ring(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as c:
        for name in ("n0", "n1"):
            c.add(name, "--memory", "1GB")
        await c.together()
        await c.nodes["n0"].chat()
        yield c


def files(node: ExoProcess) -> list[int]:
    assert node.process is not None
    return sorted(int(one.name) for one in Path(f"/proc/{node.process.pid}/fd").iterdir())


@contextlib.contextmanager
def crowd(node: ExoProcess, count: int) -> Iterator[None]:
    """Who connects and says nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            address = "127.0.0.1", node.api_port
            stack.enter_context(contextlib.closing(socket.create_connection(address, 5)))
        yield


async def test_a_crowd_takes_no_files_from_peers_and_models(ring: Cluster) -> None:
    node = ring.nodes["n0"]
    assert node.process is not None
    most = len(files(node)) + 70
    resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (most, most))
    logged = node.log.stat().st_size
    with crowd(node, 200):
        await until(lambda: "nearly all files are open" in node.tail(2000), "it says so")
        assert len(files(node)) < most - 20
        # Its peer is there and may ask it; nobody is lost and nothing is planned anew.
        assert await ring.nodes["n1"].chat() == await ring.nodes["n1"].chat("hello")
        assert await ring.nodes["n1"].live_nodes() == {"n0", "n1"}
    assert await until(node.answers, "who comes later is let in")
    assert await node.chat()
    said = [line for line in node.tail(10_000).splitlines() if "exo.listening" in line]
    assert len([line for line in said if " W " in line]) == 1, "once a minute"
    assert node.log.stat().st_size - logged < 2**20
    assert "died" not in node.tail(10_000)


async def test_a_silent_connection_keeps_nobody_from_stopping(ring: Cluster) -> None:
    node = ring.nodes["n0"]
    with crowd(node, 20):
        await asyncio.to_thread(node.stop)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
async def test_localhost_is_this_node_by_ipv6_too(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        everywhere = c.add("n1", "--chatgpt-api-host", "::")
        node = c.add("n0")
        await c.together()
        async with aiohttp.ClientSession() as session:
            for host, port in (
                ("[::1]", node.api_port),
                ("localhost", node.api_port),
                ("127.0.0.1", everywhere.api_port),
                ("[::1]", everywhere.api_port),
            ):
                async with session.get(f"http://{host}:{port}/healthcheck") as answer:
                    assert answer.status == 200, host
        assert f"http://[::1]:{everywhere.api_port}" not in everywhere.tail()
        assert f"chat at http://127.0.0.1:{everywhere.api_port}" in everywhere.tail()
