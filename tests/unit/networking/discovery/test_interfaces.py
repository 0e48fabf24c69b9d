"""Which interfaces lead to other machines, on machines with many."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from exo.networking.discovery import interfaces
from exo.networking.discovery.interfaces import lan_interfaces, named_interfaces

# name: (address, netmask, broadcast)
ADDRESSES = {
    "lo": ("127.0.0.1", "255.0.0.0", None),
    "eth0": ("10.1.2.3", "255.255.240.0", "10.1.15.255"),
    "wlan0": ("192.168.7.9", "255.255.255.0", None),
    "thunderbolt0": ("169.254.10.1", "255.255.0.0", "169.254.255.255"),
    "docker0": ("172.17.0.1", "255.255.0.0", "172.17.255.255"),
    "br-12ab": ("172.18.0.1", "255.255.0.0", "172.18.255.255"),
    "virbr0": ("192.168.122.1", "255.255.255.0", "192.168.122.255"),
    "tun0": ("10.8.0.2", "255.255.255.0", None),
    "eth1": ("8.8.4.4", "255.255.255.0", "8.8.4.255"),
    "eth2": ("10.9.9.9", "255.255.255.0", "10.9.9.255"),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        name: [SimpleNamespace(family=socket.AF_INET, address=a, netmask=m, broadcast=b)]
        for name, (a, m, b) in ADDRESSES.items()
    }
    stats = {name: SimpleNamespace(isup=name != "eth2") for name in ADDRESSES}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(interfaces.platform, "system", lambda: "Linux")


def test_private_networks_of_real_interfaces_are_chosen_best_kind_first() -> None:
    found = [(i.name, i.kind) for i in lan_interfaces()]
    assert found == [
        ("thunderbolt0", "thunderbolt"),
        ("eth0", "ethernet"),
        ("wlan0", "wifi"),
        ("lo", "loopback"),
    ]


def test_all_count_where_the_system_cannot_say_which_are_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses() -> None:
        raise OSError(38, "Function not implemented (originated from ioctl(SIOCETHTOOL))")

    monkeypatch.setattr(psutil, "net_if_stats", refuses)
    names = {i.name for i in interfaces.all_interfaces()}
    assert names == set(ADDRESSES)


def test_where_none_is_up_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    down = {name: SimpleNamespace(isup=False) for name in ADDRESSES}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: down)
    assert not interfaces.all_interfaces()


def test_the_broadcast_address_is_that_of_the_network_whatever_its_mask() -> None:
    broadcasts = {i.name: i.broadcast for i in lan_interfaces()}
    assert broadcasts["eth0"] == "10.1.15.255"
    assert broadcasts["wlan0"] == "192.168.7.255"
    assert broadcasts["lo"] == "127.255.255.255"


def test_a_virtual_interface_is_used_when_it_is_named_by_name_or_address() -> None:
    assert [i.name for i in named_interfaces(["docker0"])] == ["docker0"]
    assert [i.name for i in named_interfaces(["10.8.0.2"])] == ["tun0"]
