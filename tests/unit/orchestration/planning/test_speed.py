"""What nodes measure anew changes who serves, though nobody came or went."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from simulated_nodes import Net, SimNode
from virtual_time import VirtualTimeLoop

from exo.download.progress import unheard
from exo.topology.placement import PartitionRule


class Pair:
    """Two nodes alike on a virtual clock, who share a model; `a` has more memory and plans."""

    def __init__(self, rule: PartitionRule) -> None:
        self.loop = VirtualTimeLoop()
        self.net = Net(random.Random(1))
        self.rule = rule
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        for name, gb in (("a", 4), ("b", 3)):
            node = self.net.nodes[name] = SimNode(self.net, name, "1", gb, self.rule)
            node.start()
        await asyncio.sleep(6)
        await self.net.nodes["a"].ensure_plan("m", "", unheard)

    def ring_after(self, seconds: float) -> set[str]:
        self.loop.run_until_complete(asyncio.sleep(seconds))
        plans = [node.keeper.published.of("m") for node in self.net.nodes.values()]
        assert all(plan is not None and plan == plans[0] for plan in plans)
        return set(plans[0].node_ids) if plans[0] is not None else set()

    def die(self, name: str) -> None:
        self.loop.run_until_complete(self.net.kill(name))

    def resting(self, name: str) -> set[str]:
        """Who rests, for all that a node knows."""

        async def reasons() -> dict[str, str]:
            return self.net.nodes[name].keeper.resting.reasons()

        return set(self.loop.run_until_complete(reasons()))

    def stop(self) -> None:
        for node in self.net.nodes.values():
            self.loop.run_until_complete(node.stop())
        self.loop.close()


@pytest.fixture(params=[PartitionRule.AUTO, PartitionRule.MEMORY])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.stop()


def test_a_node_that_is_measured_to_be_slow_is_left_out_in_a_while(pair: Pair) -> None:
    assert pair.ring_after(1) == {"a", "b"}
    pair.net.nodes["b"].read_bytes_s = 1e7
    assert pair.ring_after(20) == {"a", "b"}
    expected = {"a"} if pair.rule is PartitionRule.AUTO else {"a", "b"}
    assert pair.ring_after(60) == expected


def test_one_that_becomes_slow_rests_and_is_used_again(pair: Pair) -> None:
    assert pair.ring_after(1) == {"a", "b"}
    pair.net.nodes["b"].slowdown = 10.0
    assert pair.ring_after(8) == {"a"}
    pair.net.nodes["b"].slowdown = 1.0
    assert pair.ring_after(10) == {"a"}
    assert pair.ring_after(35) == {"a", "b"}


def test_one_that_rests_serves_when_nobody_else_is_left(pair: Pair) -> None:
    pair.net.nodes["b"].slowdown = 10.0
    assert pair.ring_after(8) == {"a"}
    pair.die("a")
    assert pair.ring_after(8) == {"b"}
    assert pair.resting("b") == {"b"}


def test_who_is_slow_together_stays_together(pair: Pair) -> None:
    for node in pair.net.nodes.values():
        node.slowdown = 10.0
    assert pair.ring_after(20) == {"a", "b"}


def test_who_serves_alone_has_time_to_recover(pair: Pair) -> None:
    if pair.rule is PartitionRule.MEMORY:
        return  # nobody serves alone
    pair.net.nodes["b"].read_bytes_s = 1e7
    assert pair.ring_after(80) == {"a"}
    pair.net.nodes["b"].read_bytes_s = 1e9
    a = pair.net.nodes["a"]
    a.slowdown = 10.0
    assert pair.ring_after(6) == {"a"}
    a.slowdown = 1.0
    assert pair.ring_after(6) == {"a"}
    a.slowdown = 10.0
    assert pair.ring_after(16) == {"b"}


def test_memory_that_is_freed_holds_more_of_a_mixture(pair: Pair) -> None:
    nodes = pair.net.nodes.values()

    def share_after(seconds: float) -> float:
        pair.loop.run_until_complete(asyncio.sleep(seconds))
        plans = [node.keeper.published.of("mixture") for node in nodes]
        assert plans[0] is not None and plans[0] == plans[1]
        return plans[0].expert_share

    for node in nodes:
        node.experts, node.gb = 0.8, 0.4
    pair.loop.run_until_complete(pair.net.nodes["a"].ensure_plan("mixture", "", unheard))
    assert share_after(100) < 1
    for node in nodes:
        node.gb = 4
    assert share_after(100) == 1
