"""Machines as people have them: no network, no disk, a HOME that is read-only or not in ASCII, a
laptop that sleeps. Needs root, for mounts and networks of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import cluster, free_port, until
from hub_server import HubServer
from namespaces import can_unshare
from repositories import shaped

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not can_unshare("--net", "--mount"),
    reason="needs root, and mounts and networks of its own",
)

ASK = "run --prompt 'What is the capital of France?' --max-tokens 8 --temperature 0"
ANSWER = "The capital of France is Paris."
NETWORK = "ip link set lo up; sysctl -qw net.ipv6.conf.all.disable_ipv6=1; "


def exo(
    home: Path, command: str, before: str = "", network: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`exo COMMAND` as somebody with that HOME; `before` runs in mounts of its own, and without
    `network` there is none but loopback, without IPv6."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EXO_", "HF_", "XDG_"))}
    line = f"{sys.executable} -m exo.cli.main {command} --chatgpt-api-port {free_port()}"
    before = (NETWORK if not network else "") + before
    return subprocess.run(
        ["unshare", "-m", *([] if network else ["-n"]), "sh", "-c", f"{before} exec {line}"],
        env=kept | {"HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def home(tmp_path: Path, checkpoint: Path) -> Path:
    """With the default model in its place."""
    models = tmp_path / "höme 日本" / ".cache" / "exo" / "models"
    models.mkdir(parents=True)
    shutil.copytree(checkpoint, models / checkpoint.name, copy_function=os.link)
    return tmp_path / "höme 日本"


def test_without_a_network_in_any_home_and_locale(home: Path) -> None:
    for locale in ("C", "C.UTF-8"):
        done = exo(home, ASK, LC_ALL=locale, PYTHONUTF8="0")
        assert done.returncode == 0 and ANSWER in done.stdout, done.stderr
    assert list((home / ".cache" / "exo").glob("node_id"))


def test_a_home_that_is_read_only_reads(home: Path) -> None:
    read_only = f"mount --bind '{home}' '{home}'; mount -o remount,bind,ro '{home}';"
    done = exo(home, ASK, read_only)
    assert done.returncode == 0 and ANSWER in done.stdout, done.stderr
    assert "this node's id is not kept; set EXO_HOME" in done.stderr
    shutil.rmtree(home / ".cache" / "exo" / "models")
    done = exo(home, ASK, read_only)
    assert done.returncode == 1
    assert "cannot be written: Read-only file system; set EXO_HOME" in done.stderr


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    done = exo(tmp_path, ASK, f"mount -t tmpfs -o size=50m none '{tmp_path}';")
    assert done.returncode == 1
    assert "needs 0.3 GB of disk while it comes" in done.stderr and "EXO_HOME" in done.stderr


def test_no_network_and_no_model_says_so(tmp_path: Path) -> None:
    done = exo(tmp_path, "run org/name --prompt x")
    assert done.returncode == 1 and "check the network" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    done = exo(tmp_path, ASK)
    assert done.returncode == 1 and "check the network" in done.stderr, done.stderr


def test_two_users_on_one_machine(home: Path, tmp_path: Path) -> None:
    """The second one's node takes other ports, and joins the first one's cluster."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copytree(home / ".cache", other / ".cache", copy_function=os.link)
    log = tmp_path / "first.log"
    line = f"{sys.executable} -m exo.cli.main --interface lo --disable-tui"
    api = free_port()
    both = (
        f"HOME='{home}' {line} --chatgpt-api-port {api} >'{log}' 2>&1 & first=$!; "
        f"HOME='{other}' {line} --chatgpt-api-port {api} --wait-for-peers 1 >'{log}2' 2>&1 & "
        f"second=$!; for i in $(seq 200); do grep -q 'exo is ready' '{log}2' && break; sleep 0.1; "
        f"done; kill -INT $first $second; wait $first; wait $second;"
    )
    done = exo(home, "du", both)
    said = (tmp_path / "first.log2").read_text()
    assert "exo is ready" in said, (done.stderr, log.read_text(), said)


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, bytes]:
    return shaped("mlx-community/Qwen3-0.6B-4bit", tmp_path / "made").files


async def test_a_laptop_that_sleeps_in_the_middle_of_a_download(
    tmp_path: Path, tiny: dict[str, bytes]
) -> None:
    with HubServer() as server:
        server.put("org/tiny", tiny)
        server.rate = 1e6
        async with cluster(tmp_path) as c:
            node = c.add_with_cache("a", server.url)
            await c.together()
            body = {"model": "org/tiny", "wait": True}
            coming = asyncio.create_task(node.post("/v1/download", body, 60))
            await until(lambda: sum(server.sent.values()) > 300_000, "some of it is here")
            node.send(signal.SIGSTOP)
            await asyncio.sleep(3)  # asleep, not waiting: nothing can be asked of it
            node.send(signal.SIGCONT)
            server.rate = None
            assert (await coming)["nodes"] == {"a": "ready"}


async def test_a_laptop_that_sleeps_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """Alone it goes on where it was."""
    async with cluster(tmp_path) as c:
        # A token a step: what the dummy says repeats itself, and would be guessed.
        node = c.add("a", "--no-speculation", EXO_DUMMY_FAULTS="delay=0.02")
        await c.together()
        expected = await node.chat(max_tokens=100)
        coming = asyncio.create_task(node.chat(max_tokens=100))
        await until(lambda: node.tail(400).count("runs step") > 120, "it writes")
        node.send(signal.SIGSTOP)
        await asyncio.sleep(3)
        node.send(signal.SIGCONT)
        assert await coming == expected
