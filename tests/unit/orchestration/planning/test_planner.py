"""What a planner does with what nodes answer; nodes are objects that answer as told."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from exo.download.progress import Progress
from exo.errors import (
    DiskFull,
    EngineFailed,
    ExoError,
    ModelNotFound,
    ModelTooLarge,
    ModelUnsupported,
    PeerUnavailable,
)
from exo.models.description import ModelDescription
from exo.networking.calls.messages import Prepared
from exo.orchestration.planning.planner import Planner
from exo.shard import RingMember, RingPlan, Shard

GB = 10**9


def described(checkpoint: str = "files", **changes: Any) -> ModelDescription:
    fields = {"layer_bytes": (GB,) * 8, "first_bytes": 0, "last_bytes": 0, "context_length": 64}
    return ModelDescription("m", "llama", checkpoint, **(fields | changes))


class Told:
    """A member that answers `prepare` with a description or an error, and notes what it is told."""

    def __init__(self, answer: ModelDescription | ExoError, gb: float = 16) -> None:
        self.answer = answer
        self.memory = int(gb * GB)
        self.told: list[str] = []
        self.fail_load: list[ExoError] = []
        self.held: dict[str, int] = {}
        self.idle: dict[str, float] = {}  # by plan

    async def prepare(self, model_id: str, on_progress: Any) -> Prepared:
        on_progress(Progress("checking", model_id))
        if isinstance(self.answer, ExoError):
            raise self.answer
        return Prepared(replace(self.answer, model_id=model_id), self.memory, self.held)

    async def load_shard(self, plan: RingPlan, on_progress: Any) -> None:
        self.told.append("load")
        await asyncio.sleep(0)
        if self.fail_load:
            raise self.fail_load.pop(0)

    async def warm_up(self, plan: RingPlan) -> None:
        self.told.append("warm up")

    async def publish(self, plan: RingPlan) -> None:
        self.told.append("publish")

    async def retire(self, plan_hash: str, reason: str) -> None:
        self.told.append("retire")

    async def idle_s(self, plan_hash: str) -> float | None:
        return self.idle.get(plan_hash)

    async def unload(self, plan_hash: str) -> bool:
        self.told.append(f"unload {plan_hash}")
        return True


def planner(members: dict[str, Told], published: dict[str, RingPlan] | None = None) -> Planner:
    epochs = iter(range(1, 100))
    known = {} if published is None else published
    return Planner("a", lambda: dict(members), known.values, lambda: next(epochs))


async def ensure(members: dict[str, Told]) -> RingPlan:
    made = planner(members)
    try:
        return await made.ensure("m", lambda progress: None)
    finally:
        await made.close()


async def test_every_member_loads_the_head_is_warmed_up_and_only_then_it_is_published() -> None:
    members = {"a": Told(described(), 32), "b": Told(described(), 8)}
    plan = await ensure(members)
    assert plan.node_ids == ("a", "b")
    assert members["a"].told == ["load", "warm up", "publish"]
    assert members["b"].told == ["load", "publish"]


async def test_nodes_that_cannot_serve_it_are_left_out_with_the_reason() -> None:
    members = {
        "a": Told(described()),
        "b": Told(ModelNotFound("no files here")),
        "c": Told(described("other files"), 4),
    }
    plan = await ensure(members)
    assert plan.node_ids == ("a",)
    assert dict(plan.left_out) == {
        "b": "no files here",
        "c": "it holds other files under this model's name",
    }
    assert members["b"].told == ["publish"]


async def test_where_engines_need_more_or_less_the_most_is_planned_with() -> None:
    few = described()
    many = replace(few, layer_bytes=tuple(3 * size for size in few.layer_bytes))
    for answers in ((few, many), (many, few)):
        members = {n: Told(a, 8) for n, a in zip("ab", answers, strict=True)}
        with pytest.raises(ModelTooLarge, match="needs 24"):
            await ensure(members)


async def test_when_no_node_has_it_the_asked_nodes_own_reason_is_raised() -> None:
    members = {"b": Told(PeerUnavailable("gone")), "a": Told(ModelNotFound("nowhere"))}
    with pytest.raises(ModelNotFound, match="nowhere"):
        await ensure(members)


@pytest.mark.parametrize("failing", ["a", "b"])
async def test_a_load_that_fails_is_raised_as_it_is_and_the_plan_retired(failing: str) -> None:
    members = {"a": Told(described()), "b": Told(described())}
    members[failing].fail_load = [EngineFailed("damaged file")]
    with pytest.raises(EngineFailed, match="damaged file"):
        await ensure(members)
    assert all(member.told[-1] == "retire" for member in members.values())


async def test_two_failures_at_once_are_one_error() -> None:
    members = {"a": Told(described()), "b": Told(described())}
    for member in members.values():
        member.fail_load = [EngineFailed("damaged file")]
    with pytest.raises(EngineFailed, match="damaged file"):
        await ensure(members)


async def test_a_member_lost_while_loading_means_another_try() -> None:
    members = {"a": Told(described()), "b": Told(described())}
    members["b"].fail_load = [PeerUnavailable("gone for a moment")]
    plan = await ensure(members)
    assert plan.epoch == 2
    members["b"].fail_load = [PeerUnavailable("gone for good")] * 9
    with pytest.raises(PeerUnavailable, match="for good"):
        await ensure(members)


async def test_a_node_whose_disk_is_full_is_left_out() -> None:
    members = {"a": Told(described()), "b": Told(described(), 32)}
    members["b"].fail_load = [DiskFull("m needs 4 GB more of disk")]
    plan = await ensure(members)
    assert plan.node_ids == ("a",)
    assert dict(plan.left_out) == {"b": "m needs 4 GB more of disk"}
    for member in members.values():
        member.fail_load = [DiskFull("no room anywhere")]
    with pytest.raises(DiskFull, match="no room anywhere"):
        await ensure(members)
    members["a"].memory = members["b"].memory = 5 * GB
    members["b"].fail_load = [DiskFull("no room here")]
    with pytest.raises(ModelTooLarge, match="b is left out: no room here"):
        await ensure(members)


async def test_callers_at_the_same_time_share_one_making() -> None:
    members = {"a": Told(described())}
    made = planner(members)
    plans = await asyncio.gather(*(made.ensure("m", lambda p: None) for _ in range(5)))
    assert len({plan.hash for plan in plans}) == 1
    assert members["a"].told.count("load") == 1
    await made.close()


async def test_a_model_too_large_or_not_to_be_cut_is_refused() -> None:
    small = {"a": Told(described(), 4), "b": Told(described(), 4)}
    with pytest.raises(ModelTooLarge, match="short"):
        await ensure(small)
    missing = {"a": Told(described(), 4), "b": Told(ModelNotFound("no files here"))}
    with pytest.raises(ModelTooLarge, match="b is left out: no files here"):
        await ensure(missing)
    uncuttable = described(cuts=frozenset(), uncuttable="layers share a KV cache")
    fits_one = {"a": Told(uncuttable, 16), "b": Told(uncuttable, 4)}
    assert (await ensure(fits_one)).node_ids == ("a",)
    fits_none = {"a": Told(uncuttable, 6), "b": Told(uncuttable, 6)}
    with pytest.raises(ModelUnsupported, match=r"llama.*layers share a KV cache"):
        await ensure(fits_none)


async def test_a_renewed_plan_with_the_same_placement_is_the_old_one() -> None:
    members = {"a": Told(described()), "b": Told(described())}
    published: dict[str, RingPlan] = {}
    made = planner(members, published)
    published["m"] = await made.ensure("m", lambda p: None)
    assert await made.ensure("m", lambda p: None, renew=True) is published["m"]
    members["c"] = Told(described())
    renewed = await made.ensure("m", lambda p: None, renew=True)
    assert set(renewed.node_ids) == {"a", "b", "c"}
    assert all(member.told[-1] == "publish" for member in members.values())
    await made.close()


def served(model: str, gb: int, idle_s: float | None, members: dict[str, Told]) -> RingPlan:
    """A plan of another model that takes `gb` on "a"; None: something runs on it."""
    plan = RingPlan(model, 1, "a", "files", (RingMember("a", Shard(model, 0, 8, 8)),))
    members["a"].held[model] = gb * GB
    members["a"].memory -= gb * GB
    if idle_s is not None:
        members["a"].idle[plan.hash] = idle_s
    return plan


@pytest.mark.parametrize(
    ("gb", "goes"),
    [(20, []), (16, ["old"]), (12, ["old", "lately"]), (10, None)],
    ids=lambda value: str(value),
)
async def test_as_few_idle_models_are_unloaded_as_make_room_the_longest_idle_first(
    gb: int, goes: list[str] | None
) -> None:
    """The model takes 8 GB, of which 90 % may be used; three others hold 4, 4 and 2."""
    members = {"a": Told(described(), gb)}
    plans = {
        name: served(name, size, idle_s, members)
        for name, size, idle_s in (("busy", 2, None), ("lately", 4, 5.0), ("old", 4, 60.0))
    }
    made = planner(members, plans)
    unload = members["a"].unload

    async def unloaded(plan_hash: str) -> bool:
        (name,) = [n for n, plan in plans.items() if plan.hash == plan_hash]
        members["a"].memory += members["a"].held.pop(name)
        return await unload(plan_hash)

    members["a"].unload = unloaded  # type: ignore[method-assign]
    with pytest.raises(ModelTooLarge) if goes != [] else contextlib.nullcontext():
        await made.ensure("m", lambda p: None)
    if goes is None:
        with pytest.raises(ModelTooLarge):
            await made.ensure("m", lambda p: None, make_room=True)
    else:
        await made.ensure("m", lambda p: None, make_room=True)
    told = [what for what in members["a"].told if what.startswith("unload")]
    assert told == [f"unload {plans[name].hash}" for name in goes or []]
    await made.close()


async def test_what_is_left_of_models_that_nobody_serves_is_free_memory() -> None:
    """8 GB of 12, of which 10 are held; once by a plan that serves."""
    members = {"a": Told(described(), 12)}
    plan = served("other", 10, None, members)
    for published, fits in (({"other": plan}, False), ({}, True)):
        made = planner(members, published)
        with contextlib.nullcontext() if fits else pytest.raises(ModelTooLarge):
            assert (await made.ensure("m", lambda p: None)).node_ids == ("a",)
        await made.close()


async def test_two_models_asked_for_at_once_are_not_given_the_same_memory() -> None:
    """8 GB each, of 12: the second is refused while the first is being loaded."""
    members = {"a": Told(described(), 12)}
    made = planner(members)
    loading, go_on = asyncio.Event(), asyncio.Event()

    async def load_shard(plan: RingPlan, on_progress: Any) -> None:
        loading.set()
        await go_on.wait()

    members["a"].load_shard = load_shard  # type: ignore[method-assign]
    first = asyncio.ensure_future(made.ensure("m", lambda p: None))
    await loading.wait()
    with pytest.raises(ModelTooLarge):
        await made.ensure("other", lambda p: None)
    go_on.set()
    assert (await first).node_ids == ("a",)
    await made.close()


async def test_who_waits_for_a_model_gets_the_memory_of_one_that_is_just_being_loaded() -> None:
    """8 GB each, of 12: a model loads without anybody waiting for it, then one is asked for."""
    members = {"a": Told(described(), 12)}
    published: dict[str, RingPlan] = {}
    made = planner(members, published)
    loading, go_on = asyncio.Event(), asyncio.Event()

    async def load_shard(plan: RingPlan, on_progress: Any) -> None:
        loading.set()
        await go_on.wait()

    async def publish(plan: RingPlan) -> None:
        published[plan.model_id] = plan
        members["a"].idle[plan.hash] = 0.0
        members["a"].held[plan.model_id], members["a"].memory = 8 * GB, 4 * GB

    async def unload(plan_hash: str) -> bool:
        [gone] = [name for name, plan in published.items() if plan.hash == plan_hash]
        del published[gone]
        members["a"].held, members["a"].memory = {}, 12 * GB
        return True

    for call in (load_shard, publish, unload):
        setattr(members["a"], call.__name__, call)
    background = asyncio.ensure_future(made.ensure("m", lambda p: None))
    await loading.wait()
    said: list[str] = []
    waiting = asyncio.ensure_future(
        made.ensure("other", lambda p: said.append(p.phase), make_room=True)
    )
    while "waiting" not in said:
        await asyncio.sleep(0)
    go_on.set()
    assert (await background).model_id == "m"
    assert (await asyncio.wait_for(waiting, 5)).node_ids == ("a",)
    assert list(published) == ["other"]
    await made.close()


async def test_two_that_begin_again_do_not_wait_for_each_other() -> None:
    """The same loss ends the loading of both, and then each would fit without the other."""
    members = {"a": Told(described(), 30)}
    made = planner(members)
    loading = 0
    both, go_on = asyncio.Event(), asyncio.Event()

    async def load_shard(plan: RingPlan, on_progress: Any) -> None:
        nonlocal loading
        loading += 1
        if loading == 2:
            both.set()
        await go_on.wait()
        raise PeerUnavailable("b is gone")

    members["a"].load_shard = load_shard  # type: ignore[method-assign]
    asked = [
        asyncio.ensure_future(made.ensure(name, lambda p: None, make_room=True))
        for name in ("m", "other")
    ]
    await both.wait()
    members["a"].memory, members["a"].held = 4 * GB, {"m": 8 * GB, "other": 8 * GB}
    go_on.set()
    async with asyncio.timeout(5):
        found = await asyncio.gather(*asked, return_exceptions=True)
    # What either leaves is free for the other, whose loading fails again.
    assert {type(error) for error in found} == {ModelTooLarge, PeerUnavailable}
    await made.close()


async def test_who_is_lost_again_and_again_gets_layers_only_if_nothing_fits_without() -> None:
    why = {"b": "it was lost again and again"}
    members = {"a": Told(described(), 32), "b": Told(described(), 32), "c": Told(described(), 32)}
    epochs = iter(range(1, 100))
    made = Planner("a", lambda: dict(members), dict, lambda: next(epochs), resting=lambda: why)
    plan = await made.ensure("m", lambda progress: None)
    assert plan.node_ids == ("a", "c") and dict(plan.left_out) == why
    members["a"].memory = members["c"].memory = members["b"].memory = int(3.5 * GB)
    plan = await made.ensure("m", lambda progress: None)
    assert set(plan.node_ids) == {"a", "b", "c"} and not plan.left_out
    await made.close()


async def test_a_mixture_that_fits_nowhere_whole_leaves_experts_on_disk() -> None:
    mixture = described(expert_bytes=(int(0.8 * GB),) * 8)
    members = {"a": Told(mixture, 3.4), "b": Told(mixture, 3.4)}
    plan = await ensure(members)
    assert plan.node_ids == ("a", "b")
    # 6.1 GB can be used: 1.6 for what all tokens go through, and 0.7 of the experts' 6.4.
    assert {member.shard.expert_share for member in plan.members} == {0.625}
    heard: list[Progress] = []
    made = planner(members)
    await made.ensure("m", heard.append)
    await made.close()
    assert "62% of its experts fit into memory" in next(one.warning for one in heard if one.warning)
    members["b"].answer = described()  # an engine that holds all of them or none
    members["a"].memory = 4 * GB
    plan = await ensure(members)
    assert plan.node_ids == ("a",) and plan.members[0].shard.expert_share == 0.25
    assert "all or not at all" in dict(plan.left_out)["b"]
    members["a"].memory = 20 * GB
    plan = await ensure(members)
    assert {member.shard.expert_share for member in plan.members} == {1}


async def test_where_memory_is_freed_more_experts_are_held_and_never_fewer() -> None:
    node = Told(described(expert_bytes=(int(0.8 * GB),) * 8), 4)
    published: dict[str, RingPlan] = {}
    made = planner({"a": node}, published)

    async def renewed(gb: float) -> float:
        node.memory = int(gb * GB)
        plan = published["m"] = await made.ensure("m", lambda progress: None, renew=True)
        return plan.expert_share

    assert [await renewed(gb) for gb in (4, 6, 5, 3, 20, 4)] == [0.25, 0.5, 0.5, 0.5, 1, 1]
    await made.close()


async def test_a_mixture_of_which_not_even_one_layer_fits_at_a_time_is_refused() -> None:
    members = {"a": Told(described(expert_bytes=(int(0.8 * GB),) * 8), 2)}
    with pytest.raises(ModelTooLarge, match="needs 8"):
        await ensure(members)


async def test_idle_models_go_before_experts_do() -> None:
    other = RingPlan("other", 1, "a", "files", (RingMember("a", Shard("other", 0, 8, 8)),))
    node = Told(described(expert_bytes=(int(0.8 * GB),) * 8), 4)
    node.held, node.idle = {"other": 6 * GB}, {other.hash: 5.0}
    made = planner({"a": node}, {"other": other})

    async def unload(plan_hash: str) -> bool:
        node.memory, node.held = 10 * GB, {}
        return True

    node.unload = unload  # type: ignore[method-assign]
    plan = await made.ensure("m", lambda progress: None, make_room=True)
    assert plan.members[0].shard.expert_share == 1
    await made.close()
