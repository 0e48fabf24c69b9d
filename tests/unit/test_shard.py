from dataclasses import replace
from itertools import pairwise

import pytest

from exo.errors import InvalidFrame, PlanMismatch
from exo.networking.calls.messages import plan_from_pb, plan_to_pb
from exo.shard import RingMember, RingPlan, Shard


def plan(*bounds: int, epoch: int = 1, n_layers: int = 8) -> RingPlan:
    members = tuple(
        RingMember(f"n{i}", Shard("m", a, b, n_layers)) for i, (a, b) in enumerate(pairwise(bounds))
    )
    return RingPlan("m", epoch, "n0", "files", members)


@pytest.mark.parametrize(("start", "end"), [(3, 3), (4, 3), (-1, 2), (0, 9)])
def test_a_shard_outside_its_model_is_refused(start: int, end: int) -> None:
    with pytest.raises(InvalidFrame, match="expected 0 <= start"):
        Shard("m", start, end, 8)


@pytest.mark.parametrize("bounds", [(0, 3), (1, 8), (0, 3, 7)])
def test_a_plan_that_does_not_cover_every_layer_is_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(PlanMismatch):
        plan(*bounds)


def test_a_plan_with_a_gap_or_an_overlap_is_refused() -> None:
    for second in (Shard("m", 4, 8, 8), Shard("m", 2, 8, 8)):
        with pytest.raises(PlanMismatch, match="exactly once"):
            members = (RingMember("a", Shard("m", 0, 3, 8)), RingMember("b", second))
            RingPlan("m", 1, "a", "files", members)


def test_a_plan_that_names_a_node_twice_is_refused() -> None:
    members = (RingMember("a", Shard("m", 0, 3, 8)), RingMember("a", Shard("m", 3, 8, 8)))
    with pytest.raises(PlanMismatch, match="twice"):
        RingPlan("m", 1, "a", "files", members)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_plan_that_routes_tokens_to_no_share_of_experts_is_refused(share: float) -> None:
    message = plan_to_pb(replace(plan(0, 3, 8), routed_share=0.25))
    assert plan_from_pb(message).routed_share == 0.25
    message.routed_share = share
    with pytest.raises(PlanMismatch, match="expected more than 0"):
        plan_from_pb(message)


def test_the_hash_tells_plans_apart_and_survives_the_wire() -> None:
    first = plan(0, 3, 8)
    assert first.hash == plan(0, 3, 8).hash
    assert len({first.hash, plan(0, 4, 8).hash, plan(0, 3, 8, epoch=2).hash}) == 3
    assert plan_from_pb(plan_to_pb(first)) == first


def test_a_plan_that_lies_about_its_hash_is_refused() -> None:
    message = plan_to_pb(plan(0, 3, 8))
    message.members[0].shard.end_layer = 4
    message.members[1].shard.start_layer = 4
    with pytest.raises(PlanMismatch, match="its content gives"):
        plan_from_pb(message)


def test_the_tail_is_followed_by_the_head() -> None:
    ring = plan(0, 3, 5, 8)
    assert [ring.next_after(node) for node in ring.node_ids] == ["n1", "n2", "n0"]
