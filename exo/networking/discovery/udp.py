"""Nodes find each other by UDP broadcast: each announces itself on every chosen interface."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import platform
import socket
from collections import Counter
from dataclasses import dataclass, replace

from exo import json_text
from exo.networking.discovery.base import Discovery, DiscoveryListener, Route
from exo.networking.discovery.interfaces import Interface
from exo.networking.trust.cluster_key import NO_KEY, ONLY_IT_HAS_ONE, OTHER_KEY, ClusterKey
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

VERSION = 1
MAX_DATAGRAM = 1024
ANNOUNCE_INTERVAL_S = 1.0
"""How often a node says it is there. Shorter finds peers sooner and talks more: about 200 bytes an
interface each time."""

MOST_KNOWN = 256
"""Datagrams that are remembered with what they mean."""

CROWD, SELDOM = 8, 3
"""Where more nodes than so many are heard each says it is there less often, so that all together
say it as often; up to so many times, as routes are forgotten. (Who is new says so at once, and who
hears it connects.)"""


@dataclass(frozen=True)
class Announcement:
    """One datagram: JSON, versioned by its first key. `signature` is by the cluster's key, where it
    has one, of the same without it."""

    cluster: str
    node_id: str
    instance_id: str
    port: int
    leaving: bool = False
    signature: str = ""

    def encode(self) -> bytes:
        said = {
            "exo": VERSION,
            "cluster": self.cluster,
            "node_id": self.node_id,
            "instance_id": self.instance_id,
            "port": self.port,
            "leaving": self.leaving,
        }
        return json.dumps(said | ({"signature": self.signature} if self.signature else {})).encode()

    def signed(self, key: ClusterKey) -> Announcement:
        return replace(self, signature=key.signature(replace(self, signature="").encode()))

    @classmethod
    def decode(cls, datagram: bytes) -> Announcement:
        """Raises ValueError with one word on what is wrong."""
        if len(datagram) > MAX_DATAGRAM:
            raise ValueError("oversized")
        try:
            data = json_text.parsed(datagram)
        except ValueError as error:
            raise ValueError("malformed") from error
        if not isinstance(data, dict) or "exo" not in data:
            raise ValueError("foreign")
        if data["exo"] != VERSION:
            raise ValueError("version")
        texts = [data.get(key) for key in ("cluster", "node_id", "instance_id")]
        port = data.get("port")
        if not all(isinstance(t, str) and 0 < len(t) <= 128 and t.isprintable() for t in texts):
            raise ValueError("malformed")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise ValueError("malformed")
        cluster, node_id, instance_id = map(str, texts)
        signature = data.get("signature", "")
        if not isinstance(signature, str):
            raise ValueError("malformed")
        return cls(cluster, node_id, instance_id, port, data.get("leaving") is True, signature)


class UDPDiscovery(Discovery):
    """Malformed, oversized and foreign datagrams are counted and otherwise ignored. With a `key`
    only nodes are heard that have it too, and without one those that have none. (What somebody has
    recorded and sends again says at most that a node is there which is gone.)"""

    def __init__(
        self,
        node_id: str,
        instance_id: str,
        cluster: str,
        interfaces: list[Interface],
        broadcast_port: int,
        interval_s: float = ANNOUNCE_INTERVAL_S,
        key: ClusterKey | None = None,
    ) -> None:
        self._node_id = node_id
        self._instance_id = instance_id
        self._cluster = cluster
        self._interfaces = interfaces
        self._broadcast_port = broadcast_port
        self._interval_s = interval_s
        self._key = key
        self._counters: Counter[str] = Counter()
        self._tasks = TaskOwner("discovery")
        self._senders: dict[Interface, socket.socket] = {}
        self._receivers: dict[str, asyncio.DatagramTransport] = {}  # by what they are bound to
        self._listener: DiscoveryListener | None = None
        self._failing: set[Interface] = set()
        self._known: dict[tuple[bytes, str], tuple[Announcement, Route]] = {}  # by (datagram, host)
        self._others: set[str] = set()  # instances heard since the last announcement
        self._port = 0

    async def start(self, listener: DiscoveryListener, port: int) -> None:
        self._port, self._listener = port, listener
        await self.use(self._interfaces)
        self._tasks.forever(self._announce_forever, "announce")

    async def use(self, interfaces: list[Interface]) -> None:
        assert self._listener is not None, "started first"
        self._interfaces = interfaces
        self._known.clear()
        for gone in self._senders.keys() - interfaces:
            self._senders.pop(gone).close()
            self._failing.discard(gone)
        hosts = self._listen_hosts()
        for host in self._receivers.keys() - hosts:
            self._receivers.pop(host).close()
        failed: list[OSError] = []
        for host in sorted(hosts - self._receivers.keys()):
            try:
                self._receivers[host] = await self._receive_on(host, self._listener)
            except OSError as error:
                failed.append(error)
        for interface in interfaces:
            if interface not in self._senders:
                try:
                    self._senders[interface] = _socket(interface.address, 0)
                except OSError as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    async def _receive_on(
        self, host: str, listener: DiscoveryListener
    ) -> asyncio.DatagramTransport:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Receiver(self, listener), sock=_socket(host, self._broadcast_port)
        )
        return transport

    async def stop(self) -> None:
        await self._tasks.close()
        self._announce(leaving=True)
        for transport in self._receivers.values():
            transport.close()
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def status(self) -> dict[str, int]:
        return dict(self._counters)

    def _listen_hosts(self) -> set[str]:
        """Bound to a broadcast address a socket hears that network and nothing else; only Linux
        can do that."""
        if platform.system() == "Linux":
            return {i.broadcast for i in self._interfaces}
        return {""}

    async def _announce_forever(self) -> None:
        while True:
            self._announce(leaving=False)
            await asyncio.sleep(self.pause_s())

    def pause_s(self) -> float:
        """Until the next announcement, by how many were heard since this was asked last."""
        crowd = len(self._others) / CROWD
        self._others.clear()
        return self._interval_s * min(max(crowd, 1.0), SELDOM)

    def _announce(self, *, leaving: bool) -> None:
        said = Announcement(self._cluster, self._node_id, self._instance_id, self._port, leaving)
        datagram = (said.signed(self._key) if self._key else said).encode()
        for interface, sender in self._senders.items():
            try:
                sender.sendto(datagram, (interface.broadcast, self._broadcast_port))
                self._failing.discard(interface)
            except OSError as error:
                # An unplugged cable; it may come back. Said once, counted always.
                self._counters["send_failed"] += 1
                # macOS has no broadcast on its loopback; nodes there meet on another interface.
                level = logging.INFO if interface.kind == "loopback" else logging.WARNING
                if interface not in self._failing:
                    logger.log(level, "cannot announce on %s: %s", interface.name, error)
                self._failing.add(interface)

    def received(self, listener: DiscoveryListener, datagram: bytes, host: str) -> None:
        known = self._known.get((datagram, host))  # each node says the same each time, all day
        if known is None:
            known = self._understood(listener, datagram, host)
            if known is None:
                return
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[datagram, host] = known
        announcement, route = known
        self._counters["heard"] += 1
        if announcement.leaving:
            listener.left(announcement.node_id, announcement.instance_id)
        else:
            self._others.add(announcement.instance_id)
            listener.heard(announcement.node_id, announcement.instance_id, route)

    def _understood(
        self, listener: DiscoveryListener, datagram: bytes, host: str
    ) -> tuple[Announcement, Route] | None:
        """Who says so, and how to reach it; None where it is none of this node's peers."""
        try:
            announcement = Announcement.decode(datagram)
        except ValueError as error:
            self._counters[str(error)] += 1
            return None
        if announcement.cluster != self._cluster:
            self._counters["other_cluster"] += 1
            return None
        if announcement.instance_id == self._instance_id:
            return None
        interface = next((i for i in self._interfaces if i.reaches(host)), None)
        if interface is None:
            self._counters["other_network"] += 1
            return None
        route = Route(host, announcement.port, interface.name, interface.rank)
        if why := self._distrusted(announcement):
            self._counters["other_key"] += 1
            listener.distrusted(announcement.node_id, route, why)
            return None
        return announcement, route

    def _distrusted(self, announcement: Announcement) -> str:
        """Why it is none of this node's cluster; empty if it is."""
        if self._key is None:
            return ONLY_IT_HAS_ONE if announcement.signature else ""
        if not announcement.signature:
            return NO_KEY
        own = announcement.signed(self._key).signature
        is_ours = hmac.compare_digest(own.encode(), announcement.signature.encode())
        return "" if is_ours else OTHER_KEY


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, discovery: UDPDiscovery, listener: DiscoveryListener) -> None:
        self._discovery = discovery
        self._listener = listener

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._discovery.received(self._listener, data, addr[0])


def _socket(host: str, port: int) -> socket.socket:
    """A non-blocking UDP socket that may broadcast and share its port with other nodes here."""
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.setblocking(False)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError, AttributeError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found
