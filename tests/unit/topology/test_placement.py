"""Which nodes serve: predicted times, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo.errors import ModelTooLarge
from exo.topology.partitioning import ModelSizes, Partition
from exo.topology.placement import (
    HOP_S,
    LAYER_S,
    STEP_S,
    TOLERANCE,
    NodePace,
    PartitionRule,
    place,
    predicted_step_s,
)

MB, GB = 10**6, 10**9
SMALL = ModelSizes((3 * MB,) * 30, 30 * MB, 30 * MB, kv_reserve=MB)
LARGE = ModelSizes((100 * MB,) * 30, 100 * MB, 100 * MB)


def paces(
    rates: dict[str, float], round_trip_s: float = 0.0015, slow: tuple[str, ...] = ()
) -> dict[str, NodePace]:
    return {
        node: NodePace(
            rate, {other: 0.05 if {node, other} & {*slow} else round_trip_s for other in rates}
        )
        for node, rate in rates.items()
    }


def nodes_of(partition: Partition) -> list[str]:
    return sorted(member.node_id for member in partition.members)


def test_the_prediction_is_reading_and_sending() -> None:
    rates = {"a": 20e9, "b": 10e9}
    both = place(PartitionRule.MEMORY, "m", {"a": GB, "b": GB}, SMALL, paces(rates))
    weights = 15 * 2 * MB
    expected = (
        2 * STEP_S
        + 30 * LAYER_S
        + weights / 20e9
        + (weights + 30 * MB) / 10e9
        + 2 * (HOP_S + 0.00025)
    )
    assert predicted_step_s(both.members, SMALL, paces(rates)) == pytest.approx(expected)


def test_experts_that_a_token_is_not_routed_to_take_no_time() -> None:
    rates = {"a": 20e9, "b": 20e9}
    memory = dict.fromkeys(rates, 8 * GB)
    mixture = replace(LARGE, unread=(95 * MB,) * 30)
    assert len(place(PartitionRule.AUTO, "m", memory, LARGE, paces(rates, 0.01)).members) == 2
    # The same hops are half of what a token takes.
    alone = place(PartitionRule.AUTO, "m", memory, mixture, paces(rates, 0.01))
    assert len(alone.members) == 1
    expected = STEP_S + 30 * LAYER_S + (30 * 5 * MB + 100 * MB) / 20e9
    assert alone.predicted_step_s == pytest.approx(expected)


def test_a_toy_is_not_carried_by_twenty_three() -> None:
    rates = {f"n{i:02}": 20e9 for i in range(23)}
    memory = dict.fromkeys(rates, 4 * GB)
    chosen = place(PartitionRule.AUTO, "m", memory, SMALL, paces(rates))
    assert len(chosen.members) == 1 and len(chosen.left_out) == 22
    assert "answers are faster without it" in dict(chosen.left_out)["n22"]
    everybody = place(PartitionRule.MEMORY, "m", memory, SMALL, paces(rates))
    assert len(everybody.members) == 23
    assert everybody.predicted_step_s > 3 * chosen.predicted_step_s


def test_two_good_machines_share_what_takes_long_to_read() -> None:
    rates = {"a": 20e9, "b": 20e9, "far": 20e9}
    memory = dict.fromkeys(rates, 8 * GB)
    chosen = place(PartitionRule.AUTO, "m", memory, LARGE, paces(rates, slow=("far",)))
    assert nodes_of(chosen) == ["a", "b"]
    assert [m.shard.layer_count for m in chosen.members] == [15, 15]
    fastest = place(PartitionRule.SPEED, "m", memory, LARGE, paces(rates))
    assert len(fastest.members) == 1


def test_what_does_not_fit_the_fastest_goes_to_more() -> None:
    rates = {"quick": 200e9, "slow": 10e9, "slower": 5e9}
    memory = {"quick": 2 * GB, "slow": 8 * GB, "slower": 8 * GB}
    chosen = place(PartitionRule.AUTO, "m", memory, LARGE, paces(rates))
    assert nodes_of(chosen) == ["quick", "slow"]
    layers = {m.node_id: m.shard.layer_count for m in chosen.members}
    assert layers["quick"] >= 16  # as many as its memory takes
    with pytest.raises(ModelTooLarge, match="short"):
        place(PartitionRule.AUTO, "m", dict.fromkeys(rates, GB // 10), LARGE, paces(rates))


def test_what_serves_stays_while_it_is_not_much_slower() -> None:
    memory = dict.fromkeys("ab", 8 * GB)

    def with_hops(seconds: float, serving: tuple[str, ...]) -> list[str]:
        found = paces({"a": 20e9, "b": 20e9}, round_trip_s=seconds)
        return nodes_of(place(PartitionRule.AUTO, "m", memory, LARGE, found, serving))

    assert with_hops(0.0005, ("a",)) == ["a", "b"]  # more memory for nothing
    assert with_hops(0.1, ()) == ["a"]
    assert with_hops(0.1, ("a", "b")) == ["a", "b"]  # 1.7 times, and here already
    assert with_hops(0.3, ("a", "b")) == ["a"]


def test_without_rates_every_node_has_layers() -> None:
    found = paces({"a": 20e9, "b": 0.0})
    chosen = place(PartitionRule.AUTO, "m", dict.fromkeys("ab", GB), SMALL, found)
    assert nodes_of(chosen) == ["a", "b"]


@settings(max_examples=200, deadline=None)
@given(
    rates=st.lists(st.floats(1e9, 1e12), min_size=1, max_size=8),
    memory=st.lists(st.integers(GB // 2, 8 * GB), min_size=8, max_size=8),
    round_trip_s=st.floats(0, 0.2),
)
def test_auto_is_never_much_slower_than_the_fastest(
    rates: list[float], memory: list[int], round_trip_s: float
) -> None:
    found = paces({f"n{i}": rate for i, rate in enumerate(rates)}, round_trip_s)
    free = {node: memory[i] for i, node in enumerate(found)}
    try:
        auto = place(PartitionRule.AUTO, "m", free, LARGE, found)
    except ModelTooLarge:
        return
    speed = place(PartitionRule.SPEED, "m", free, LARGE, found)
    assert auto.predicted_step_s <= TOLERANCE * speed.predicted_step_s * 1.000001
    assert {*nodes_of(auto), *dict(auto.left_out)} == set(free)


def test_forty_eight_nodes_of_which_each_holds_a_little() -> None:
    rates = {f"n{i:02}": 20e9 + i for i in range(48)}
    free = dict.fromkeys(rates, GB // 4)
    assert len(place(PartitionRule.AUTO, "m", free, LARGE, paces(rates)).members) > 12
