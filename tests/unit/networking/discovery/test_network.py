"""A node's interfaces as they come, go and fail, on a machine of our own making."""

from __future__ import annotations

import asyncio
import logging
from ipaddress import IPv4Network

import pytest

from exo.errors import InvalidRequest
from exo.networking.discovery import network
from exo.networking.discovery.interfaces import Interface
from exo.networking.discovery.network import Network


def wifi(address: str) -> Interface:
    net = IPv4Network(f"{address}/24", strict=False)
    return Interface("wlan0", address, net, str(net.broadcast_address), "wifi")


HOME, OFFICE = wifi("192.168.1.5"), wifi("10.1.2.3")


async def test_what_changes_is_used_and_what_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = [[], [HOME], [HOME], [HOME], [OFFICE]]
    monkeypatch.setattr(network, "lan_interfaces", lambda: looks.pop(0) if len(looks) > 1 else [])
    followed = Network(interval_s=0.001)
    assert followed.addresses == ["127.0.0.1"]
    assert followed.interface_of("192.168.1.9") == ("other", 4)
    used: list[list[Interface]] = []
    done = asyncio.Event()

    async def use(interfaces: list[Interface]) -> None:
        used.append(interfaces)
        if len(used) < 3:
            raise OSError("not yet")
        if len(used) == 3:
            assert followed.addresses == ["127.0.0.1", "192.168.1.5"]
            assert followed.interface_of("192.168.1.9") == ("wlan0", 3)
            done.set()

    with caplog.at_level(logging.INFO):
        task = asyncio.create_task(followed.follow(use))
        await asyncio.wait_for(done.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert used[:3] == [[HOME]] * 3
    said = [record.message for record in caplog.records]
    assert said.count("a network cannot be used yet: not yet") == 1
    assert said.count("the network of wlan0, 192.168.1.5, is there") == 1


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"nothing0: no such interface; there are: .*lo"):
        Network(["nothing0"])
