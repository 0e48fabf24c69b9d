import asyncio
import json
import socket

import pytest
from cluster import free_port
from hypothesis import given
from hypothesis import strategies as st

from exo.errors import InvalidRequest
from exo.networking.discovery.base import DiscoveryListener, Route
from exo.networking.discovery.interfaces import all_interfaces, lan_interfaces, named_interfaces
from exo.networking.discovery.udp import Announcement, UDPDiscovery
from exo.networking.trust.cluster_key import ClusterKey

GOOD = Announcement("c", "node", "instance", 5000)


class Heard(DiscoveryListener):
    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.gone: list[str] = []
        self.strangers: dict[str, str] = {}
        self.changed = asyncio.Event()

    def heard(self, node_id: str, instance_id: str, route: Route) -> None:
        self.routes[node_id] = route
        self.changed.set()

    def left(self, node_id: str, instance_id: str) -> None:
        self.gone.append(node_id)
        self.changed.set()

    def distrusted(self, node_id: str, route: Route, why: str) -> None:
        self.strangers[node_id] = why

    async def until(self, condition) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def loopback_discovery(
    name: str, port: int, cluster: str = "c", key: ClusterKey | None = None
) -> UDPDiscovery:
    return UDPDiscovery(name, f"{name}-1", cluster, named_interfaces(["lo"]), port, 0.05, key)


KEYS = {secret: ClusterKey(secret) for secret in ("one secret", "another")}


def test_an_announcement_survives_the_wire() -> None:
    assert Announcement.decode(GOOD.encode()) == GOOD
    signed = GOOD.signed(KEYS["another"])
    assert Announcement.decode(signed.encode()) == signed != GOOD


@given(st.binary(max_size=2000))
def test_noise_is_refused_with_a_word(noise: bytes) -> None:
    with pytest.raises(ValueError):
        Announcement.decode(noise)


@given(
    st.dictionaries(
        st.sampled_from(
            ["exo", "cluster", "node_id", "instance_id", "port", "leaving", "signature"]
        ),
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.integers())),
    )
)
def test_a_datagram_that_looks_like_ours_is_right_or_refused(data: dict[str, object]) -> None:
    try:
        found = Announcement.decode(json.dumps(data).encode())
    except ValueError as error:
        assert str(error) in ("malformed", "foreign", "version", "oversized")
    else:
        assert 0 < found.port < 65536


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"exo": 2}, "version"),
        ({"port": 0}, "malformed"),
        ({"port": True}, "malformed"),
        ({"node_id": "x" * 200}, "malformed"),
        ({"cluster": ""}, "malformed"),
        ({"node_id": "\x1b[2J"}, "malformed"),
        ({"signature": 5}, "malformed"),
    ],
)
def test_wrong_fields_are_refused(change: dict[str, object], word: str) -> None:
    data = json.loads(GOOD.encode()) | change
    with pytest.raises(ValueError, match=word):
        Announcement.decode(json.dumps(data).encode())


async def test_two_nodes_on_one_machine_hear_each_other_and_the_goodbye() -> None:
    port = free_port()
    a, b = loopback_discovery("a", port), loopback_discovery("b", port)
    heard_a, heard_b = Heard(), Heard()
    await a.start(heard_a, 1111)
    await b.start(heard_b, 2222)
    await heard_a.until(lambda: "b" in heard_a.routes)
    await heard_b.until(lambda: "a" in heard_b.routes)
    assert heard_a.routes["b"] == Route("127.0.0.1", 2222, "lo", 0)
    assert "a" not in heard_a.routes
    await b.stop()
    await heard_a.until(lambda: heard_a.gone == ["b"])
    await a.stop()


@pytest.mark.parametrize(
    ("own", "others", "why"),
    [
        ("one secret", "one secret", ""),
        ("one secret", "another", "has another cluster key than this node"),
        ("one secret", "", "has no cluster key, and this node has one"),
        ("", "another", "has a cluster key, and this node has none"),
        ("", "", ""),
    ],
)
def test_only_who_has_the_same_key_is_heard(own: str, others: str, why: str) -> None:
    discovery, heard = loopback_discovery("a", 1, key=KEYS.get(own)), Heard()
    said = GOOD.signed(KEYS[others]) if others else GOOD
    for _ in range(2):
        discovery.received(heard, said.encode(), "127.0.0.1")
    assert list(heard.routes) == ([] if why else ["node"])
    assert heard.strangers == ({"node": why} if why else {})
    assert discovery.status() == {"other_key" if why else "heard": 2}


@pytest.mark.parametrize("change", [{"port": 5001}, {"leaving": True}, {"node_id": "b"}])
def test_what_was_changed_on_its_way_is_not_believed(change: dict[str, object]) -> None:
    key = KEYS["one secret"]
    discovery, heard = loopback_discovery("a", 1, key=key), Heard()
    data = json.loads(GOOD.signed(key).encode()) | change
    discovery.received(heard, json.dumps(data).encode(), "127.0.0.1")
    assert not heard.routes and not heard.gone and heard.strangers


def test_in_a_crowd_each_says_less_often_that_it_is_there() -> None:
    discovery = loopback_discovery("a", 1)
    heard = Heard()

    def pause_s(nodes: int) -> float:
        for i in range(nodes):
            for _ in range(2):
                found = Announcement("c", f"n{i}", f"n{i}-1", 2000 + i)
                discovery.received(heard, found.encode(), "127.0.0.1")
        return discovery.pause_s()

    assert pause_s(0) == pause_s(7) == 0.05
    assert pause_s(16) == pytest.approx(0.1)
    assert pause_s(200) == pytest.approx(0.15)
    assert pause_s(0) == 0.05
    assert len(heard.routes) == 200


async def test_other_clusters_noise_and_giants_are_counted_and_ignored() -> None:
    port = free_port()
    a, other = loopback_discovery("a", port), loopback_discovery("b", port, cluster="elsewhere")
    heard = Heard()
    await a.start(heard, 1111)
    await other.start(Heard(), 2222)
    interface = named_interfaces(["lo"])[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.bind(("127.0.0.1", 0))
        for datagram in (b"\xff" * 10, b"x" * 4000, b"[]", b"[" * 900):
            sender.sendto(datagram, (interface.broadcast, port))
    wanted = {"malformed": 2, "oversized": 1, "foreign": 1}
    async with asyncio.timeout(5):
        while not (wanted.items() <= a.status().items() and a.status().get("other_cluster", 0) > 0):
            await asyncio.sleep(0.01)
    assert heard.routes == {}
    await a.stop()
    await other.stop()


def test_interfaces_have_their_own_networks() -> None:
    loopback = named_interfaces(["lo"])[0]
    assert loopback.kind == "loopback" and loopback.rank == 0
    assert loopback.broadcast == "127.255.255.255"
    assert loopback.reaches("127.0.0.9") and not loopback.reaches("10.0.0.1")
    assert set(lan_interfaces()) <= set(all_interfaces())
    with pytest.raises(InvalidRequest, match=r"there are: .*lo"):
        named_interfaces(["nothing0"])
