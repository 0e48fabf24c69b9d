"""Two hosts on a LAN, as network namespaces of our own; exo gets no flag about the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# One /20: a /24 would part them. Called by process: tests run side by side, and the names of
# namespaces are the machine's.
HOSTS = {f"exo-{os.getpid()}-a": "10.77.3.1", f"exo-{os.getpid()}-b": "10.77.9.2"}

pytestmark = pytest.mark.skipif(
    shutil.which("ip") is None or os.geteuid() != 0, reason="needs root and iproute2"
)


def ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def lan() -> Iterator[None]:
    """Two namespaces joined by a veth pair, each with loopback and a bridge nobody is on."""
    a, b = HOSTS
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for host, address in HOSTS.items():
            ip("-n", host, "address", "add", f"{address}/20", "broadcast", "+", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "add", "docker0", "type", "bridge")
            ip("-n", host, "address", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", host, "link", "set", "docker0", "up")
        for host in HOSTS:
            # A link takes a moment to come up.
            wait(lambda host=host: "state UP" in ip("-n", host, "link", "show", "eth0"), "a link")
    except subprocess.CalledProcessError as error:
        _remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield
    _remove()


def _remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def start(host: str, folder: Path) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "exo.cli.main", "--disable-tui"]
    command += ["--inference-engine", "dummy", "--node-id", host, "--memory", "1GB"]
    command += ["--partition", "memory"]
    environment = os.environ | {"EXO_HOME": str(folder / host), "DEBUG": "1"}
    with (folder / f"{host}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def topology(host: str) -> dict[str, Any]:
    """What the node in the namespace says, asked from inside it."""
    url = "http://127.0.0.1:52415/v1/topology"
    code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=2).read().decode())"
    command = ["ip", "netns", "exec", host, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"nodes": {}}


def wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def state(host: str, peer: str) -> str:
    return str(topology(host)["nodes"].get(peer, {}).get("state", ""))


def whereabouts(host: str, peer: str) -> str:
    return str(topology(host)["nodes"].get(peer, {}).get("address", ""))


def stop(nodes: list[subprocess.Popen[bytes]]) -> None:
    for node in nodes:
        node.terminate()
    for node in nodes:
        assert node.wait(5) == 130


def test_two_hosts_find_each_other_and_notice_a_pulled_cable(lan: None, tmp_path: Path) -> None:
    a, b = HOSTS
    nodes = [start(host, tmp_path) for host in HOSTS]
    try:
        wait(lambda: state(a, b) == state(b, a) == "alive", "they find each other")
        seen = topology(a)
        assert seen["nodes"][b]["address"].startswith(HOSTS[b])
        assert [link["interface"] for link in seen["links"]] == ["eth0"]
        ip("-n", b, "link", "set", "eth0", "down")
        wait(lambda: state(a, b) != "alive", "the cable is pulled")
        ip("-n", b, "link", "set", "eth0", "up")
        wait(lambda: state(a, b) == state(b, a) == "alive", "it is plugged in again")
    finally:
        stop(nodes)


def test_a_network_that_comes_after_exo_and_another_one_later(lan: None, tmp_path: Path) -> None:
    """A machine whose exo starts before its Wi-Fi, and that is carried to another one."""
    a, b = HOSTS
    ip("-n", b, "address", "flush", "dev", "eth0")
    nodes = [start(host, tmp_path) for host in HOSTS]
    try:
        wait(lambda: state(b, b) == "self" and state(a, a) == "self", "both run, each alone")
        for address in (HOSTS[b], "10.77.12.7"):
            ip("-n", b, "address", "flush", "dev", "eth0")
            ip("-n", b, "address", "add", f"{address}/20", "broadcast", "+", "dev", "eth0")
            wait(lambda: state(a, b) == state(b, a) == "alive", f"it is found at {address}")
            wait(lambda at=address: whereabouts(a, b).startswith(at), f"it is reached at {address}")
    finally:
        stop(nodes)
