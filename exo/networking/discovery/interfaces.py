"""This machine's network interfaces: which lead to other nodes, and which is the best."""

from __future__ import annotations

import ipaddress
import logging
import platform
import re
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from exo.errors import InvalidRequest

logger = logging.getLogger(__name__)

KINDS = ("loopback", "thunderbolt", "ethernet", "wifi", "other")
"""Best first: a peer reachable over several is used over the first of these."""

# Bridges and tunnels of containers and virtual machines: whoever answers there is this machine,
# or something no node runs on.
_VIRTUAL = re.compile(
    r"(docker|br-|veth|virbr|vmnet|vboxnet|podman|cni|flannel|cali|lxc|lxd|kube|tun|tap|utun|"
    r"awdl|llw|anpi|ap\d|zt|bridge1\d\d)"
)


@dataclass(frozen=True)
class Interface:
    """One IPv4 address of an interface. `broadcast` is the network's own, whatever its mask."""

    name: str
    address: str
    network: ipaddress.IPv4Network
    broadcast: str
    kind: str

    @property
    def rank(self) -> int:
        """0 is the best kind."""
        return KINDS.index(self.kind)

    def reaches(self, host: str) -> bool:
        return _parsed(host) in self.network


@lru_cache(maxsize=256)
def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host)


def lan_interfaces() -> list[Interface]:
    """Interfaces with private addresses that other machines may be on; loopback last."""
    found = [
        i
        for i in all_interfaces()
        if not _VIRTUAL.match(i.name) and ipaddress.ip_address(i.address).is_private
    ]
    return sorted(found, key=lambda i: (i.kind == "loopback", i.rank, i.name))


def named_interfaces(names: Iterable[str]) -> list[Interface]:
    """The interfaces the user chose, virtual ones too.

    Raises:
        InvalidRequest: there is none of that name with an IPv4 address.
    """
    chosen = []
    for name in names:
        matching = find_interfaces([name])
        if not matching:
            known = ", ".join(sorted({i.name for i in all_interfaces()})) or "none"
            raise InvalidRequest(f"--interface {name}: no such interface; there are: {known}")
        chosen += matching
    return chosen


def find_interfaces(names: Iterable[str]) -> list[Interface]:
    """Those of the names, or addresses, that are there."""
    names = set(names)
    return [i for i in all_interfaces() if {i.name, i.address} & names]


def all_interfaces() -> list[Interface]:
    """Every IPv4 address of every interface that is up."""
    known = psutil.net_if_addrs()
    up = _up(known)
    found = []
    kinds = _mac_ports(frozenset(up)) if platform.system() == "Darwin" else None
    for name, addresses in known.items():
        for entry in addresses:
            if entry.family != socket.AF_INET or name not in up or not entry.netmask:
                continue
            network = ipaddress.IPv4Network(f"{entry.address}/{entry.netmask}", strict=False)
            # Loopback has no broadcast address of its own; Linux delivers to the network's.
            broadcast = entry.broadcast or str(network.broadcast_address)
            found.append(Interface(name, entry.address, network, broadcast, _kind(name, kinds)))
    return found


def _up(known: Iterable[str]) -> set[str]:
    """The interfaces that are up; all that are known where the system cannot say (sandboxes and
    emulators that have not all of Linux's calls)."""
    try:
        return {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    except OSError as error:
        logger.debug("which interfaces are up is not known: %s", error)
        return set(known)


def _kind(name: str, mac_ports: dict[str, str] | None) -> str:
    if name.startswith("lo"):
        return "loopback"
    if mac_ports is not None:
        return mac_ports.get(name, "other")
    if name.startswith("thunderbolt"):
        return "thunderbolt"
    if name.startswith("wl") or Path(f"/sys/class/net/{name}/wireless").exists():
        return "wifi"
    return "ethernet" if name.startswith(("en", "eth")) else "other"


@lru_cache(maxsize=1)
def _mac_ports(_up: frozenset[str]) -> dict[str, str]:
    """Device → kind, by the names macOS gives its hardware ports; asked for again when other
    interfaces are up."""
    try:
        listed = subprocess.run(
            ["networksetup", "-listallhardwareports"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    kinds = {}
    for port, device in re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", listed):
        lowered = port.lower()
        kinds[device] = (
            "thunderbolt"
            if "thunderbolt" in lowered
            else "wifi"
            if "wi-fi" in lowered
            else "ethernet"
            if "ethernet" in lowered or "lan" in lowered
            else "other"
        )
    return kinds
