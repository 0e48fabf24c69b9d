"""Makes ring plans: where a model's layers go, loaded and proven before anyone uses them.

Every node has a planner; the one of the live node with the most memory is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from exo.download.progress import OnProgress, Progress
from exo.errors import (
    ExoError,
    ModelTooLarge,
    ModelUnsupported,
    PeerUnavailable,
    PlanMismatch,
)
from exo.models.description import ModelDescription
from exo.networking.messages import Prepared
from exo.shard import RingPlan
from exo.tasks import TaskOwner
from exo.topology.partitioning import ModelSizes, RingMemoryWeightedPartitioningStrategy

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a plan is made anew because a member was lost while it was being made."""


class Member(Protocol):
    """What the planner asks of a node: itself, or a peer over gRPC."""

    async def prepare(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> Prepared: ...

    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None: ...

    async def warm_up(self, plan: RingPlan) -> None: ...

    async def publish(self, plan: RingPlan) -> None: ...

    async def retire(self, plan_hash: str, reason: str) -> None: ...


class _Making:
    """One plan being made, and everybody who wants to know how far it is."""

    def __init__(self) -> None:
        self.listeners: list[OnProgress] = []
        self.task: asyncio.Task[RingPlan] | None = None

    def on_progress(self, progress: Progress) -> None:
        for listener in list(self.listeners):
            listener(progress)


class Planner:
    """`members` gives every live node by id, `current` the published plan of a model, `next_epoch`
    an epoch larger than any the cluster has seen."""

    def __init__(
        self,
        node_id: str,
        members: Callable[[], dict[str, Member]],
        current: Callable[[str], RingPlan | None],
        next_epoch: Callable[[], int],
    ) -> None:
        self._node_id = node_id
        self._members = members
        self._current = current
        self._next_epoch = next_epoch
        self._strategy = RingMemoryWeightedPartitioningStrategy()
        self._making: dict[str, _Making] = {}
        self._tasks = TaskOwner("planner")

    async def ensure(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> RingPlan:
        """The published plan of the model, made first if there is none or if `renew` asks for one
        that fits the nodes there are now. Callers at the same time share one making.

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
        making.listeners.append(on_progress)
        try:
            # The plan is made to its end even if this caller goes away: others may wait for it.
            return await asyncio.shield(making.task)
        finally:
            making.listeners.remove(on_progress)

    async def close(self) -> None:
        await self._tasks.close()

    async def _make_until_it_holds(self, model_id: str, making: _Making) -> RingPlan:
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await self._make(model_id, making.on_progress)
                except PeerUnavailable as error:
                    if attempt == ATTEMPTS:
                        raise
                    logger.warning("plan of %s: %s; trying again", model_id, error.message)
                    await asyncio.sleep(0.3)
            raise AssertionError("the loop returns or raises")
        finally:
            del self._making[model_id]

    async def _make(self, model_id: str, on_progress: OnProgress) -> RingPlan:
        members = self._members()
        prepared, left_out = await self._prepare(model_id, members, on_progress)
        description, memory = _one_checkpoint(prepared, left_out)
        plan = self._place(description, memory, left_out)
        old = self._current(model_id)
        if old is not None and old.same_placement(plan):
            return old
        logger.info("plan %s of %s: %s", plan.hash, model_id, plan.members)
        ring = {node_id: members[node_id] for node_id in plan.node_ids}
        try:
            await _all(member.load_shard(plan, on_progress) for member in ring.values())
            on_progress(Progress("warming", model_id, node_id=plan.head_id))
            await ring[plan.head_id].warm_up(plan)
        except ExoError as error:
            await self._tell(ring, "retire", plan.hash, f"it never served: {error.message}")
            raise
        # To who is there now: a node that came while the plan was made must know of it too.
        await self._tell(members | self._members(), "publish", plan)
        on_progress(Progress("ready", model_id))
        return plan

    async def _prepare(
        self, model_id: str, members: dict[str, Member], on_progress: OnProgress
    ) -> tuple[dict[str, Prepared], dict[str, str]]:
        """What each node says of the model, and why others cannot serve it."""
        answers = await asyncio.gather(
            *(member.prepare(model_id, on_progress) for member in members.values()),
            return_exceptions=True,
        )
        prepared: dict[str, Prepared] = {}
        errors: dict[str, ExoError] = {}
        for node_id, answer in zip(members, answers, strict=True):
            if isinstance(answer, Prepared):
                prepared[node_id] = answer
            elif isinstance(answer, ExoError):
                errors[node_id] = answer
            else:
                raise answer
        if not prepared:
            # This node's own reason says most.
            raise errors.get(self._node_id) or next(iter(errors.values()))
        return prepared, {node_id: error.message for node_id, error in errors.items()}

    def _place(
        self, found: ModelDescription, memory: dict[str, int], left_out: dict[str, str]
    ) -> RingPlan:
        sizes = ModelSizes(found.layer_bytes, found.first_bytes, found.last_bytes, found.cuts)
        try:
            partition = self._strategy.partition(found.model_id, memory, sizes)
        except ModelTooLarge as error:
            if found.cuts is None:
                raise
            raise ModelUnsupported(
                f"{found.model_id} ({found.model_type}) cannot be split over nodes as it would "
                f"have to be: {found.uncuttable}; {error.message}"
            ) from error
        return RingPlan(
            found.model_id,
            self._next_epoch(),
            self._node_id,
            found.checkpoint,
            partition.members,
            tuple(sorted((left_out | dict(partition.left_out)).items())),
        )

    async def _tell(self, members: dict[str, Member], what: str, *args: object) -> None:
        """Call `what` on every member; one that cannot be told learns when it says hello again."""
        answers = await asyncio.gather(
            *(getattr(member, what)(*args) for member in members.values()), return_exceptions=True
        )
        for node_id, answer in zip(members, answers, strict=True):
            if isinstance(answer, ExoError):
                logger.warning("%s on %s: %s", what, node_id, answer.message)
            elif isinstance(answer, BaseException):
                raise answer


def _one_checkpoint(
    prepared: dict[str, Prepared], left_out: dict[str, str]
) -> tuple[ModelDescription, dict[str, int]]:
    """The files most memory holds; nodes with others of the same name are left out."""
    weight: dict[str, int] = defaultdict(int)
    for found in prepared.values():
        weight[found.description.checkpoint] += found.memory_bytes
    chosen = max(sorted(weight), key=lambda checkpoint: weight[checkpoint])
    memory = {}
    description = None
    for node_id, found in prepared.items():
        if found.description.checkpoint == chosen:
            memory[node_id] = found.memory_bytes
            description = found.description
        else:
            left_out[node_id] = "it holds other files under this model's name"
    if description is None:
        raise PlanMismatch("no node holds the chosen checkpoint")
    return description, memory


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
