"""`exo doctor` finds what was broken on purpose, by name, and says what to do."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cluster import cluster, free_port, until
from namespaces import AS_ANYBODY, can_unshare

from exo.networking.calls.messages import PROTOCOL
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.generated.node_service_pb2_grpc import (
    NodeServiceServicer,
    add_NodeServiceServicer_to_server,
)

OWN_MOUNTS = (*AS_ANYBODY, "--mount")


def doctor(
    *arguments: str, port: int = 9, before: tuple[str, ...] = (), **environment: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status, and the findings that are not ok, by what was looked at. (No node is at the
    default port.)"""
    command = [*before, sys.executable, "-m", "exo.cli.main", "doctor", "--json", *arguments]
    command += ["--chatgpt-api-port", str(port)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | environment
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert all(f["mend"] for f in found if f["level"] != "ok")
    return done.returncode, {f["check"]: f for f in found if f["level"] != "ok"}


def test_a_healthy_machine_and_the_bundle(exo_home: Path, tmp_path: Path) -> None:
    status, found = doctor("--bundle", str(tmp_path / "b.tar.gz"), EXO_API_KEY="a-secret")
    assert status == 0, found
    assert found["cluster"]["level"] == "note" and "start `exo`" in found["cluster"]["mend"]
    with tarfile.open(tmp_path / "b.tar.gz") as bundle:
        names = sorted(bundle.getnames())
        texts = [bundle.extractfile(name).read() for name in names]  # type: ignore[union-attr]
    assert names == [f"exo-doctor/{n}.json" for n in ("findings", "packages", "topology")]
    assert not any(b"a-secret" in text for text in texts)


def test_kernels_that_do_not_run() -> None:
    status, found = doctor("--inference-engine", "mlx", EXO_CPU_ISA="no-such-set")
    assert status == 1
    assert "no-such-set" in found["kernels"]["text"] and "C++ compiler" in found["kernels"]["mend"]


def test_a_bridge_that_was_chosen() -> None:
    status, found = doctor("--interface", "docker0")
    assert status == 1 and "bridge" in found["interfaces"]["text"]


def test_few_open_files() -> None:
    _, found = doctor(before=("sh", "-c", 'ulimit -n 256; exec "$@"', "sh"))
    assert found["open files"]["mend"].startswith("ulimit -n ")


@pytest.mark.skipif(not can_unshare(*OWN_MOUNTS), reason="needs mounts of its own")
def test_a_full_disk(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=2m tmpfs {tmp_path}; exec "$@"'
    home = {"EXO_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    status, found = doctor(before=("unshare", *OWN_MOUNTS, "sh", "-c", mount, "sh"), **home)
    assert status == 1
    assert "0.0 GB free" in found["data folder"]["text"]
    assert "exo rm" in found["model cache"]["mend"]


def test_a_folder_that_cannot_be_written() -> None:
    status, found = doctor(EXO_HOME="/proc/exo")
    assert status == 1 and "EXO_HOME" in found["data folder"]["mend"]


def test_damaged_files(tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08").write_text("test")
    (blobs / ("a" * 64)).write_text("damaged")
    (blobs / "30d74d258442c7c65512eafab474568dd706c430").write_text("test")
    (blobs / ("b" * 40)).write_text("damaged")
    (blobs / f"{'c' * 64}.incomplete").write_text("on its way")
    status, found = doctor("--verify", HF_HUB_CACHE=str(tmp_path))
    assert status == 1
    assert "b" * 40 in found["files"]["text"] and "exo download org/name" in found["files"]["mend"]


class _Yesterday(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", "Sat, 21 Nov 2020 10:00:00 GMT")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def wrong_time() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Yesterday) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_clock_that_is_wrong(wrong_time: str) -> None:
    status, found = doctor(HF_ENDPOINT=wrong_time, HF_HUB_OFFLINE="0")
    assert status == 1
    assert "ahead" in found["clock"]["text"] and "NTP" in found["clock"]["mend"]


def test_a_hub_that_does_not_answer() -> None:
    _, found = doctor(HF_ENDPOINT=f"http://127.0.0.1:{free_port()}", HF_HUB_OFFLINE="0")
    assert found["hub"]["level"] == "note" and "HTTPS_PROXY" in found["hub"]["mend"]


# The cluster ------------------------------------------------------------------------------------


class _Peer(NodeServiceServicer):
    """Answers hellos and never connects back."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol

    async def Hello(self, request: pb.HelloRequest, context: object) -> pb.HelloReply:
        return pb.HelloReply(protocol=self._protocol, node_id="b", instance_id="1")

    async def Heartbeats(self, requests, context):  # type: ignore[no-untyped-def]
        async for beat in requests:
            yield pb.Heartbeat(counter=beat.counter, sees_you=False)


async def of_peer(tmp_path: Path, port: int, words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """What the doctor says of a node whose only peer is at a port, once the node knows it."""
    async with cluster(tmp_path) as c:
        a = c.add("a", "--discovery-module", "manual", "--peers", f"127.0.0.1:{port}")
        await until(a.answers, "a answers")

        async def knows() -> bool:
            nodes = (await a.get("/v1/topology"))["nodes"].values()
            return any(words in node["problem"] for node in nodes)

        await until(knows, words)
        return await asyncio.to_thread(doctor, port=a.api_port)


async def test_a_closed_port(tmp_path: Path) -> None:
    port = free_port()
    status, found = await of_peer(tmp_path, port, "cannot be reached")
    assert status == 1
    assert "firewall" in found[f"127.0.0.1:{port}"]["mend"]


@pytest.mark.parametrize(
    ("protocol", "words", "mend"),
    [
        (PROTOCOL, "cannot connect back", "this machine's firewall"),
        (1, "speaks protocol 1", "same version"),
    ],
)
async def test_a_peer_that_cannot_connect_back_or_is_of_another_version(
    protocol: int, words: str, mend: str, tmp_path: Path
) -> None:
    server = grpc.aio.server()
    add_NodeServiceServicer_to_server(_Peer(protocol), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    status, found = await of_peer(tmp_path, port, words)
    await server.stop(None)
    assert status == 1
    assert any(words in f["text"] and mend in f["mend"] for f in found.values()), found


async def test_two_nodes_with_one_name(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        a = c.add("a")
        c.nodes["first"] = a
        twin = c.add("a")  # the same --node-id, another process
        await until(a.answers, "a answers")
        await until(twin.answers, "its twin answers")

        async def known() -> bool:
            return bool((await a.get("/v1/topology"))["nodes"]["a"]["problem"])

        await until(known, "the twin is heard")
        status, found = await asyncio.to_thread(doctor, port=a.api_port)
        assert status == 1 and "--node-id" in found["this node"]["mend"]


async def test_another_cluster_is_heard(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        a = c.add("a")
        c.add("b", "--cluster", "another-one")
        await until(a.answers, "a answers")

        async def hears() -> bool:
            status = (await a.get("/v1/topology"))["status"]
            return bool(status["discovery"].get("other_cluster"))

        await until(hears, "b is heard")
        status, found = await asyncio.to_thread(doctor, port=a.api_port)
        assert status == 1 and "--cluster" in found["discovery"]["mend"]
