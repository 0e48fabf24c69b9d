"""A LAN of this process's own: network namespaces on a bridge, one for each host, gone at its end.

Linux only. No root is needed where the system lets users make namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from far_link import FarLink, without_offload

_INSIDE = "EXO_INSIDE_LAN"
GATEWAY = "10.77.0.1"


def go_inside() -> None:
    """Start this script again in namespaces of its own, whose root it is.

    Raises:
        SystemExit: the system does not let it.
    """
    if os.environ.get(_INSIDE):
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")  # names of namespaces: nobody else's
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "lan", "type", "bridge")
        _run("ip", "address", "add", f"{GATEWAY}/24", "dev", "lan")
        _run("ip", "link", "set", "lan", "up")
        return
    for flags in (["--user", "--map-root-user"], []):
        unshare = ["unshare", *flags, "--net", "--mount"]
        if (
            shutil.which("unshare")
            and subprocess.run([*unshare, "true"], check=False).returncode == 0
        ):
            os.environ[_INSIDE] = "1"
            os.execvp("unshare", [*unshare, "--", sys.executable, *sys.argv])
    raise SystemExit("network namespaces are needed: Linux, and users who may make them, or root")


class Host:
    """One machine on the LAN, `10.77.0.<number>`. `prefix` before a command runs it there."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self._cable = f"to-{name}"
        _run("ip", "netns", "add", name)
        _run(
            "ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", name
        )
        _run("ip", "link", "set", self._cable, "master", "lan", "up")
        self._ip("address", "add", f"{self.address}/24", "broadcast", "+", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip("link", "set", device, "up")
        deadline = time.monotonic() + 10
        while "state UP" not in self._ip("link", "show", "eth0"):
            if time.monotonic() > deadline:
                raise SystemExit(f"the link of {name} does not come up")
            time.sleep(0.01)

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def unplug(self) -> None:
        """Nothing comes or goes, and nobody is told."""
        _run("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        _run("ip", "link", "set", self._cable, "up")

    def lose_what_goes_to(self, address: str) -> None:
        """One way: what this host sends to another one is lost; what that one sends arrives."""
        self._ip("route", "add", "blackhole", f"{address}/32")

    def reach_again(self, address: str) -> None:
        self._ip("route", "delete", "blackhole", f"{address}/32")

    def reset_connections(self) -> None:
        """RST on every TCP connection of this host with others."""
        _run(*self.prefix, "ss", "-K", "-t", "dst", "10.77.0.0/24")

    def stall(self, local_port: int, remote_port: int) -> None:
        """Nothing more arrives of what one connection of this host sends; others go on."""
        self._flow("add", local_port, remote_port)

    def go_on(self, local_port: int, remote_port: int) -> None:
        self._flow("delete", local_port, remote_port)

    def _flow(self, what: str, local_port: int, remote_port: int) -> None:
        ports = ["sport", str(local_port), "dport", str(remote_port)]
        self._ip("rule", what, "pref", "1", "ipproto", "tcp", *ports, "blackhole")

    def limit(self, rate: str) -> None:
        """What it is sent comes at this rate at most, like "1mbit"."""
        burst = ["burst", "32kbit", "latency", "2s"]
        _run("tc", "qdisc", "replace", "dev", self._cable, "root", "tbf", "rate", rate, *burst)

    def move_far(self, delay_s: float) -> None:
        """What it sends and is sent takes so long, each way."""
        near, far = f"near-{self.name}", f"far-{self.name}"
        _run("ip", "link", "set", self._cable, "nomaster")
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        _run("ip", "link", "set", near, "master", "lan", "up")
        _run("ip", "link", "set", far, "up")
        _run(*self.prefix, sys.executable, str(Path(__file__).parent / "far_link.py"), "eth0")
        for device in (near, far, self._cable, "lan"):
            without_offload(device)
        FarLink(self._cable, far, delay_s).start()

    def _ip(self, *arguments: str) -> str:
        return _run("ip", "-n", self.name, *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
