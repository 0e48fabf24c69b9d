"""How soon a silent member of a ring is missed, and what a false alarm changes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from simulated_nodes import Net, SimNode
from virtual_time import VirtualTimeLoop

from exo.orchestration.config import NodeConfig
from exo.orchestration.membership.patience import BRIEF_S, FORGIVEN_S, LEAST_S, Patience

MOST_S = NodeConfig("a", "1", Path("/nowhere")).heartbeat_timeout_s


def after(beats: int, round_trip_s: float) -> Patience:
    patience = Patience(MOST_S)
    for _ in range(beats):
        patience.answered(round_trip_s)
    return patience


def test_who_always_answers_quickly_is_missed_sooner() -> None:
    assert after(0, 0.0).seconds(0.0) == MOST_S, "nothing is known of it yet"
    assert after(30, 0.005).seconds(0.0) == LEAST_S
    assert LEAST_S < after(100, 0.1).seconds(0.0) < MOST_S
    assert after(100, 0.4).seconds(0.0) == MOST_S, "it is far away"


def test_one_late_answer_is_remembered_for_a_while() -> None:
    patience = after(100, 0.005)
    patience.answered(0.3)
    assert patience.seconds(0.0) == MOST_S
    for _ in range(10):
        patience.answered(0.005)
    assert patience.seconds(0.0) > 2 * LEAST_S
    for _ in range(30):
        patience.answered(0.005)
    assert patience.seconds(0.0) == LEAST_S


@pytest.mark.parametrize(("away_s", "expected"), [(BRIEF_S / 2, MOST_S), (3.0, LEAST_S)])
def test_a_false_alarm_makes_patient(away_s: float, expected: float) -> None:
    patience = after(100, 0.005)
    patience.gave_up(100.0)
    patience.is_back(100.0 + away_s)
    assert patience.seconds(101.0 + away_s) == expected
    assert patience.seconds(101.0 + away_s + FORGIVEN_S) == LEAST_S


@pytest.mark.parametrize("silence_s", [0.4, 1.2, 3.0])
def test_a_member_of_a_ring_that_falls_silent(silence_s: float) -> None:
    """It is given up after most of a second; less than half of one is borne, and who was given up
    in error is given more time."""

    async def measured() -> None:
        loop = asyncio.get_running_loop()
        for name in "ab":
            net.nodes[name] = SimNode(net, name, name, 2)
            net.nodes[name].start()
        node = net.nodes["a"]
        membership = node.membership

        async def together() -> None:
            async with asyncio.timeout(10.0):
                while not all(each.membership.alive for each in net.nodes.values()):
                    await asyncio.sleep(0.05)
            await asyncio.sleep(5.0)
            plan = await node.ensure_plan("m", "", lambda progress: None)
            assert sorted(plan.node_ids) == ["a", "b"]
            await asyncio.sleep(40.0)

        async def silent(seconds: float) -> float:
            """How long until it was given up; infinite if it was not."""
            began = loop.time()
            net.frozen.add("b")
            given_up = float("inf")
            while loop.time() - began < seconds:
                await asyncio.sleep(0.01)
                if not membership.alive:
                    given_up = min(given_up, loop.time() - began)
            net.frozen.clear()
            return given_up

        await together()
        first = await silent(silence_s)
        if silence_s < LEAST_S:
            assert first == float("inf")
        else:
            assert first < 0.5 + LEAST_S + 0.1
        await together()
        again = await silent(silence_s)
        if silence_s == 1.2:
            assert again == float("inf"), "it was not dead the first time"

    async def stopped() -> None:
        for each in net.nodes.values():
            await each.stop()

    loop, net = VirtualTimeLoop(), Net(random.Random(1))
    try:
        loop.run_until_complete(measured())
    finally:
        loop.run_until_complete(stopped())
        loop.close()
