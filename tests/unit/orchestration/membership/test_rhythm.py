"""A crowd: what each node says in it, and how soon all know of one that fell silent."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from simulated_nodes import Net, SimNode
from virtual_time import VirtualTimeLoop

from exo.orchestration.membership.rhythm import NEWS_S, PROBES_S, News, rest_s


def on_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


async def crowd(count: int) -> Net:
    """Nodes that have all found each other."""
    net = Net(random.Random(1))
    for i in range(count):
        name = f"n{i:02}"
        net.nodes[name] = SimNode(net, name, str(i), 1)
        net.nodes[name].start()
    async with asyncio.timeout(20):
        while not all(len(node.membership.alive) == count - 1 for node in net.nodes.values()):
            await asyncio.sleep(0.1)
    return net


async def stopped(net: Net) -> None:
    for node in net.nodes.values():
        await node.stop()


@pytest.mark.parametrize("count", [3, 12, 48])
def test_what_a_node_says_does_not_grow_with_the_cluster(count: int) -> None:
    async def measured() -> None:
        net = await crowd(count)
        await asyncio.sleep(30.0)
        net.beats.clear()
        await asyncio.sleep(100.0)
        assert all(0 < beats / 100 < 2 * PROBES_S for beats in net.beats.values()), net.beats
        await stopped(net)

    on_virtual_time(measured())


@pytest.mark.parametrize("count", [3, 12, 48])
def test_all_know_of_a_silent_node_within_5_s(count: int) -> None:
    async def measured() -> None:
        net = await crowd(count)
        await asyncio.sleep(30.0)
        # News: all have just beaten with all.
        for node in net.nodes.values():
            node.membership._beat_all()
        await asyncio.sleep(1.0)
        silent = net.nodes["n01"]
        for other in net.nodes:  # it keeps its connections and does not answer, as if frozen
            net.cut.update({(other, "n01"), ("n01", other)})
        await asyncio.sleep(5.0)
        rest = [node for node in net.nodes.values() if node is not silent]
        assert [node.name for node in rest if "n01" in node.membership.alive] == []
        assert all(len(node.membership.alive) == count - 2 for node in rest), "a false alarm"
        await stopped(net)

    on_virtual_time(measured())


def test_a_broken_link_is_no_death() -> None:
    """Who cannot reach a node has the others ask it; to them it is as alive as before."""

    async def measured() -> None:
        net = await crowd(12)
        net.cut.update({("n00", "n01"), ("n01", "n00")})
        await asyncio.sleep(30.0)
        assert "n01" not in net.nodes["n00"].membership.alive
        for name in set(net.nodes) - {"n00", "n01"}:
            assert "n01" in net.nodes[name].membership.alive
        await stopped(net)

    on_virtual_time(measured())


def test_the_others_take_turns_at_a_node() -> None:
    everyone = [f"n{i}" for i in range(23)]
    turns = sorted(rest_s(own, "n7", everyone, now=1e9) for own in everyone if own != "n7")
    spaces = [b - a for a, b in itertools.pairwise([*turns, turns[0] + 22 / PROBES_S])]
    assert max(spaces) == pytest.approx(1 / PROBES_S, abs=1e-3)
    assert rest_s("a", "b", ["b"], 5.0) <= 1 / PROBES_S


def test_urgent_news_is_told_at_once_and_other_news_now_and_then() -> None:
    state = {"urgent": 0, "usual": 0, "now": 0.0}
    news = News(lambda: state["urgent"], lambda: state["usual"], lambda: state["now"])
    assert not news.is_there(16)
    state["urgent"] = 1
    assert news.is_there(16) and not news.is_there(16)
    state["usual"] = 1
    assert not news.is_there(16)
    state["now"] += 16 / NEWS_S
    assert news.is_there(16) and not news.is_there(16)
