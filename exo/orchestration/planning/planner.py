"""Makes ring plans: where a model's layers go, loaded and proven before anyone uses them.

Every node has a planner; the one of the live node with the most memory is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from exo.download.progress import OnProgress, Progress
from exo.download.watch import watched
from exo.errors import (
    DiskFull,
    ExoError,
    ModelTooLarge,
    ModelUnsupported,
    PeerUnavailable,
)
from exo.models.description import ModelDescription
from exo.networking.calls.messages import DrainState, Prepared
from exo.orchestration.files.cluster_files import FileHolder
from exo.orchestration.planning.placer import Placer
from exo.shard import RingPlan
from exo.tasks import TaskOwner
from exo.topology.partitioning import Partition
from exo.topology.placement import PartitionRule

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a plan is made anew because a member was lost while it was being made."""


class Member(FileHolder, Protocol):
    """What is asked of a node for plans: of this one, or of a peer over gRPC."""

    async def ensure_plan(
        self,
        model_id: str,
        dead_hash: str,
        on_progress: OnProgress,
        *,
        make_room: bool = True,
        renew: bool = False,
    ) -> RingPlan: ...

    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None: ...

    async def warm_up(self, plan: RingPlan) -> None: ...

    async def publish(self, plan: RingPlan) -> None: ...

    async def retire(self, plan_hash: str, reason: str) -> None: ...

    async def idle_s(self, plan_hash: str) -> float | None: ...

    async def drain(self, *, undo: bool = False) -> DrainState: ...

    async def read_log(self, lines: int) -> list[str]: ...

    async def unload(self, plan_hash: str) -> bool: ...


class _Making:
    """One plan being made, and everybody who wants to know how far it is."""

    def __init__(self) -> None:
        self.listeners: list[OnProgress] = []
        self.task: asyncio.Task[RingPlan] | None = None
        self.make_room = False  # somebody waits for it: idle models may have to go
        self.reserved: dict[str, int] = {}  # bytes by node that its shards will take there
        self.full: dict[str, DiskFull] = {}  # nodes whose disk does not hold their shard
        self.plan_hash = ""

    def on_progress(self, progress: Progress) -> None:
        for listener in list(self.listeners):
            listener(progress)


class Planner:
    """`members` gives every live node by id, `published` the plans that serve, `next_epoch` an
    epoch larger than any the cluster has seen, `draining` the nodes that get no layers, `resting`
    those that get some only if nothing fits without them, or is slower, and why."""

    def __init__(
        self,
        node_id: str,
        members: Callable[[], Mapping[str, Member]],
        published: Callable[[], Iterable[RingPlan]],
        next_epoch: Callable[[], int],
        rule: PartitionRule = PartitionRule.MEMORY,
        draining: Callable[[], frozenset[str]] = frozenset,
        resting: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._node_id = node_id
        self._draining = draining
        self._members = members
        self._published = published
        self._next_epoch = next_epoch
        self._placer = Placer(rule, resting, self._serving)
        self._making: dict[str, _Making] = {}
        self._tasks = TaskOwner("planner")

    async def ensure(
        self,
        model_id: str,
        on_progress: OnProgress,
        *,
        renew: bool = False,
        make_room: bool = False,
    ) -> RingPlan:
        """The published plan of the model, made first if there is none or if `renew` asks for one
        that fits the nodes there are now. Callers at the same time share one making. `make_room`:
        models on which nothing runs are unloaded where memory is short, the least recently used
        first.

        Raises:
            ModelNotFound, ModelUnsupported, ModelTooLarge: no node can serve it.
            PeerUnavailable: members kept failing.
        """
        while renew and (earlier := self._making.get(model_id)) is not None:
            # It began before what makes a new plan necessary.
            assert earlier.task is not None
            await asyncio.wait([earlier.task])
        making = self._making.get(model_id)
        if making is None:
            plan = self._current(model_id)
            if plan is not None and not renew:
                return plan
            making = self._making[model_id] = _Making()
            making.task = self._tasks.background(
                self._make_until_it_holds(model_id, making), model_id
            )
        assert making.task is not None
        making.make_room |= make_room
        making.listeners.append(on_progress)
        try:
            # The plan is made to its end even if this caller goes away: others may wait for it.
            return await asyncio.shield(making.task)
        finally:
            making.listeners.remove(on_progress)

    async def preview(self, model_id: str) -> Partition:
        """Where a plan made now would put the layers, with what it would leave out; nothing is
        loaded.

        Raises:
            ExoError: what `ensure` raises of a placement.
        """
        prepared, left_out = await self._prepare(model_id, self._members(), _Making())
        _, partition = self._placer.partition_as_fits(prepared, left_out)
        return replace(partition, left_out=(*left_out.items(), *partition.left_out))

    @property
    def making(self) -> frozenset[str]:
        """Hashes of the plans that are being made."""
        return frozenset(making.plan_hash for making in self._making.values()) - {""}

    async def close(self) -> None:
        await self._tasks.close()

    async def _make_until_it_holds(self, model_id: str, making: _Making) -> RingPlan:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await self._make(model_id, making)
                except PeerUnavailable as error:
                    if attempt == ATTEMPTS:
                        raise
                    logger.warning("plan of %s: %s; trying again", model_id, error.message)
                    await asyncio.sleep(0.3)
            raise AssertionError("the loop returns or raises")
        finally:
            del self._making[model_id]

    def _serving(self, model_id: str) -> tuple[str, ...]:
        """The nodes that serve the model now."""
        plan = self._current(model_id)
        return plan.node_ids if plan is not None else ()

    def _current(self, model_id: str) -> RingPlan | None:
        return next((plan for plan in self._published() if plan.model_id == model_id), None)

    async def _make(self, model_id: str, making: _Making) -> RingPlan:
        members, on_progress = self._members(), making.on_progress
        making.plan_hash = ""  # of an attempt before: who may wait for others is not waited for
        plan, prepared = await self._placed(model_id, members, making)
        old = self._current(model_id)
        if (
            old is not None
            and old.same_files_and_nodes(plan)
            and plan.expert_share <= old.expert_share
        ):
            # Its cut was right for the memory that was free then, and to move layers has a price.
            return old
        making.plan_hash = plan.hash
        logger.info("plan %s of %s: %s", plan.hash, model_id, plan.members)
        ring = {node_id: members[node_id] for node_id in plan.node_ids}
        if plan.expert_share < 1:
            slower = (
                f"{plan.expert_share:.0%} of its experts fit into memory, others are read from "
                "disk: slower"
            )
            logger.warning("%s: %s", model_id, slower)
            on_progress(Progress("loading", model_id, warning=slower))
        try:
            await self._load(plan, prepared, ring, making)
            warming = Progress("warming", model_id, node_id=plan.head_id)
            on_progress(warming)
            await watched(lambda moves: ring[plan.head_id].warm_up(plan), on_progress, warming)
        except ExoError as error:
            await self._tell(ring, "retire", plan.hash, f"it never served: {error.message}")
            if isinstance(error, DiskFull) and making.full.keys() < members.keys():
                logger.warning("plan of %s: %s; planning without it", model_id, error.message)
                return await self._make(model_id, making)
            raise
        # To who is there now: a node that came while the plan was made must know of it too.
        await self._tell({**members, **self._members()}, "publish", plan)
        on_progress(Progress("ready", model_id))
        return plan

    async def _placed(
        self, model_id: str, members: Mapping[str, Member], making: _Making
    ) -> tuple[RingPlan, dict[str, Prepared]]:
        """A plan, and what its nodes said. Where memory is short for somebody who waits, room is
        made first, and again if something else took it."""
        for attempt in range(1, ATTEMPTS + 1):
            prepared, left_out = await self._prepare(model_id, members, making)
            try:
                return self._plan(*self._placer.partition(prepared, left_out), left_out), prepared
            except (ModelTooLarge, ModelUnsupported) as error:
                others = [plan for plan in self._published() if plan.model_id != model_id]
                may_try = making.make_room and attempt < ATTEMPTS
                if not may_try or not (
                    await self._make_room(others, prepared, members)
                    or await self._others_serve(making, prepared)
                ):
                    if (placed := self._placer.partition_in_part(prepared, left_out)) is not None:
                        return self._plan(*placed, left_out), prepared
                    reasons = (f"; {node} is left out: {why}" for node, why in left_out.items())
                    raise type(error)(error.message + "".join(reasons)) from error
        raise AssertionError("the loop returns or raises")

    async def _others_serve(self, making: _Making, prepared: dict[str, Prepared]) -> bool:
        """Wait for what is being loaded into memory that would do: once it serves, and nothing runs
        on it, it can go. False if it would not do."""
        loading = {
            model_id: other
            for model_id, other in self._making.items()
            if other is not making and other.plan_hash
        }
        enlarged = dict(prepared)
        for model_id, other in loading.items():
            for node_id, found in enlarged.items():
                more = found.held_bytes.get(model_id, 0) + other.reserved.get(node_id, 0)
                enlarged[node_id] = replace(found, memory_bytes=found.memory_bytes + more)
        tasks = [other.task for other in loading.values() if other.task is not None]
        if not tasks or not self._placer.fits(enlarged):
            return False
        making.on_progress(Progress("waiting", f"for {', '.join(loading)} to be loaded"))
        await asyncio.wait(tasks)
        return True

    async def _load(
        self,
        plan: RingPlan,
        prepared: dict[str, Prepared],
        ring: dict[str, Member],
        making: _Making,
    ) -> None:
        """Every member its shard, whose memory no other plan is given meanwhile."""

        async def load(node_id: str, member: Member) -> None:
            try:
                await member.load_shard(plan, making.on_progress)
            except DiskFull as error:
                making.full[node_id] = error
                raise
            del making.reserved[node_id]  # from now on the node counts it itself

        for node_id in ring:
            shards = (plan.shard_of(node_id),)
            making.reserved[node_id] = prepared[node_id].description.bytes_of(shards)
        try:
            await _all(load(node_id, member) for node_id, member in ring.items())
        finally:
            making.reserved.clear()

    def _free(self, node_id: str, found: Prepared) -> Prepared:
        """Without what shards of other models that are being loaded will take, and with what is
        left there of models that nobody serves: a ring that broke, an unloading not heard of."""
        taken = sum(making.reserved.get(node_id, 0) for making in self._making.values())
        needed = {plan.model_id for plan in self._published()} | self._making.keys()
        left = sum(size for name, size in found.held_bytes.items() if name not in needed)
        return replace(found, memory_bytes=max(0, found.memory_bytes + left - taken))

    async def _prepare(
        self, model_id: str, members: Mapping[str, Member], making: _Making
    ) -> tuple[dict[str, Prepared], dict[str, str]]:
        """What each node says of the model, and why others cannot serve it."""
        leaving = self._draining() & members.keys()
        asked = {n: m for n, m in members.items() if n not in making.full and n not in leaving}
        answers = await asyncio.gather(
            *(member.prepare(model_id, making.on_progress) for member in asked.values()),
            return_exceptions=True,
        )
        prepared: dict[str, Prepared] = {}
        errors: dict[str, ExoError] = {
            **making.full,
            **{node_id: PeerUnavailable(f"node {node_id} is being drained") for node_id in leaving},
        }
        for node_id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Prepared):
                prepared[node_id] = self._free(node_id, answer)
            elif isinstance(answer, ExoError):
                errors[node_id] = answer
            else:
                raise answer
        if not prepared:
            # This node's own reason says most.
            raise errors.get(self._node_id) or next(iter(errors.values()))
        return prepared, {node_id: error.message for node_id, error in errors.items()}

    async def _make_room(
        self, plans: list[RingPlan], prepared: dict[str, Prepared], members: Mapping[str, Member]
    ) -> bool:
        """Unload as few idle plans as make a placement fit; False if none would, or if one that had
        to go is in use again."""
        enlarged, gone = dict(prepared), []
        for plan in await _longest_idle_first(plans, members):
            gone.append(plan)
            for node_id, found in enlarged.items():
                more = found.held_bytes.get(plan.model_id, 0)
                enlarged[node_id] = replace(found, memory_bytes=found.memory_bytes + more)
            if not self._placer.fits(enlarged):
                continue
            logger.info("unloading %s to make room", ", ".join(p.model_id for p in gone))
            return all([await members[plan.head_id].unload(plan.hash) for plan in gone])
        return False

    def _plan(
        self, found: ModelDescription, partition: Partition, left_out: dict[str, str]
    ) -> RingPlan:
        return RingPlan(
            found.model_id,
            self._next_epoch(),
            self._node_id,
            found.checkpoint,
            partition.members,
            tuple(sorted((left_out | dict(partition.left_out)).items())),
            partition.predicted_step_s,
            found.routed_share,
        )

    async def _tell(self, members: Mapping[str, Member], what: str, *args: object) -> None:
        """Call `what` on every member; one that cannot be told learns when it says hello again."""
        answers = await asyncio.gather(
            *(getattr(member, what)(*args) for member in members.values()), return_exceptions=True
        )
        for node_id, answer in zip(members, answers, strict=True):
            if isinstance(answer, ExoError):
                logger.warning("%s on %s: %s", what, node_id, answer.message)
            elif isinstance(answer, BaseException):
                raise answer


async def _longest_idle_first(
    plans: Iterable[RingPlan], members: Mapping[str, Member]
) -> list[RingPlan]:
    """Those on which nothing runs."""
    idle = []
    for plan in plans:
        if plan.head_id in members:
            idle_s = await members[plan.head_id].idle_s(plan.hash)
            if idle_s is not None:
                idle.append((idle_s, plan))
    return [plan for _, plan in sorted(idle, key=lambda one: -one[0])]


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all at once; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except BaseExceptionGroup as failures:
        # Not `except*`: what is raised there comes out wrapped in a group again.
        raise _first(failures) from failures


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first ExoError in a group, else its first exception."""
    known = failures.subgroup(ExoError)
    leaf: BaseException = known or failures
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf
