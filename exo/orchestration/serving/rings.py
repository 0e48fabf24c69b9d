"""The rings this node is a member of: its ranks, the schedulers of those it heads, its shards."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

from exo.download.progress import OnProgress, Progress
from exo.errors import ExoError, InvalidFrame, PeerUnavailable, PlanMismatch
from exo.inference.engine import InferenceEngine
from exo.models.description import ModelDescription
from exo.networking.calls.messages import GenerationEvent, GenerationRequest, StepFailure
from exo.networking.calls.peer_handle import PeerHandle
from exo.networking.rings.frames import Frame, Rooms, StepResult
from exo.networking.rings.hidden_states import Wire
from exo.orchestration.config import ServingRules
from exo.orchestration.serving.drafts.drafter import Drafter
from exo.orchestration.serving.rank import Rank
from exo.orchestration.serving.scheduler import Load, Scheduler
from exo.shard import RingPlan, Shard
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

WATCHED_RING, WATCHED_AFTER = 8, 2
"""Members of a ring so long all watch each other; of a longer one each watches those after it, who
are asked by all once one of them is silent."""


class Rings:
    """`handle_of` gives the connection to a node, `alive` the ids of live peers. `on_over` is
    called when a plan this node heads can serve no longer. `wire`: how hidden states are sent."""

    def __init__(
        self,
        node_id: str,
        engine: InferenceEngine,
        rules: ServingRules,
        handle_of: Callable[[str], PeerHandle],
        alive: Callable[[], list[str]],
        on_over: Callable[[RingPlan], None],
        wire: Wire = Wire.EXACT,
    ) -> None:
        self._node_id = node_id
        self._engine = engine
        self._rules = rules
        self._handle_of = handle_of
        self._alive = alive
        self._on_over = on_over
        self._wire = wire
        self._ranks: dict[str, Rank] = {}
        self._schedulers: dict[str, Scheduler] = {}
        self._shards: set[Shard] = set()
        self._standby: set[Shard] = set()
        self._descriptions: dict[str, ModelDescription] = {}  # of models with shards here
        self._paths: dict[str, Path] = {}  # of their files
        self._load_lock = asyncio.Lock()
        self._tasks = TaskOwner(f"rings of {node_id}")

    @property
    def plans(self) -> list[RingPlan]:
        """Every plan this node has a place in, serving or not yet or no longer."""
        return [rank.plan for rank in self._ranks.values()]

    @property
    def holding(self) -> frozenset[str]:
        """Hashes of the plans in which this node's place works."""
        return frozenset(h for h, rank in self._ranks.items() if rank.is_linked)

    @property
    def watched(self) -> frozenset[str]:
        """Members whose death must be known at once: all of a ring of some nodes, of a long one
        those that follow this node, and so each by a few."""
        found: set[str] = set()
        for rank in self._ranks.values():
            others = rank.plan.others_after(self._node_id)
            found.update(others if len(others) <= WATCHED_RING else others[:WATCHED_AFTER])
        return frozenset(found)

    def is_busy(self, plan_hash: str) -> bool:
        """Whether sequences run on a plan that this node heads."""
        scheduler = self._schedulers.get(plan_hash)
        return scheduler is not None and scheduler.sequence_count > 0

    @property
    def shards(self) -> frozenset[Shard]:
        """Shards in the engine's memory."""
        return frozenset(self._shards)

    @property
    def is_loading(self) -> bool:
        """Whether a shard is being loaded or given back: what else is to be waits for it."""
        return self._load_lock.locked()

    @property
    def standby(self) -> frozenset[Shard]:
        """Layers in the engine's memory that no plan needs now, one a shard."""
        return frozenset(self._standby)

    @property
    def sequence_count(self) -> int:
        """Sequences of the plans this node heads."""
        return sum(scheduler.sequence_count for scheduler in self._schedulers.values())

    @property
    def schedulers(self) -> list[Scheduler]:
        """Of the plans this node heads."""
        return list(self._schedulers.values())

    def description_of(self, model_id: str) -> ModelDescription:
        """Of a model with a shard here."""
        return self._descriptions[model_id]

    def held_bytes(self) -> dict[str, int]:
        """By model the memory that its shards here take."""
        by_model: dict[str, set[Shard]] = defaultdict(set)
        for shard in self._shards | self._standby:
            by_model[shard.model_id].add(shard)
        return {name: self._descriptions[name].bytes_of(s) for name, s in by_model.items()}

    def loads(self) -> dict[str, list[Load]]:
        """By model what the schedulers of its plans hold and have done."""
        by_model: dict[str, list[Load]] = defaultdict(list)
        for scheduler in self._schedulers.values():
            by_model[scheduler.plan.model_id].append(scheduler.load)
        return by_model

    def sent_bytes(self) -> dict[str, int]:
        """By node what was sent to it over the rings that are open."""
        by_node: dict[str, int] = defaultdict(int)
        for rank in self._ranks.values():
            if len(rank.plan.members) > 1:
                by_node[rank.plan.next_after(self._node_id)] += rank.sent_bytes
        return by_node

    async def join(
        self, plan: RingPlan, description: ModelDescription, path: Path, on_progress: OnProgress
    ) -> None:
        """Load this node's shard of a plan, unless it is in memory, and take its place.

        Raises:
            EngineFailed: the shard could not be loaded.
            PeerUnavailable: the next member cannot be reached.
        """
        async with self._load_lock:
            shard = plan.shard_of(self._node_id)
            self._descriptions[plan.model_id], self._paths[plan.model_id] = description, path
            if shard not in self._shards:
                await self._load(shard, path, on_progress)
                self._shards.add(shard)
            if plan.hash not in self._ranks:
                await self._take_place(plan)

    async def load_small(self, small: Shard, path: Path, on_progress: OnProgress) -> None:
        """Load a whole model that guesses, and has no place in a plan. Raises EngineFailed."""
        async with self._load_lock:
            await self._load(small, path, on_progress)

    async def stand_by(self, layer: Shard) -> None:
        """Have a layer of a model with a place here in memory, too.

        Raises:
            EngineFailed: it could not be read.
        """
        async with self._load_lock:
            if any(plan.model_id == layer.model_id for plan in self.plans):
                await self._engine.stand_by(layer, self._paths[layer.model_id])
                self._standby.add(layer)

    async def give_back(self, layer: Shard) -> None:
        """Its memory is needed, or it is not any more."""
        async with self._load_lock:
            if layer in self._standby:
                self._standby.discard(layer)
                await self._engine.unload(layer)

    async def _load(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        loop = asyncio.get_running_loop()
        read = 0

        def report(done: int, total: int) -> None:
            nonlocal read
            read = total
            progress = Progress("loading", str(shard), done, total, self._node_id)
            loop.call_soon_threadsafe(on_progress, progress)

        logger.info("loading %s", shard)
        await self._engine.load(shard, path, report)
        logger.info("%s is loaded, of which %d bytes were read", shard, read)

    async def _take_place(self, plan: RingPlan) -> None:
        link = None
        if len(plan.members) > 1:
            next_id = plan.next_after(self._node_id)
            link = await self._handle_of(next_id).open_ring(plan.hash, self._wire)
        rank = Rank(plan, self._node_id, self._engine, link, self._deliver(plan), self._report)
        self._ranks[plan.hash] = rank
        rank.start()
        if plan.head_id == self._node_id:
            scheduler = Scheduler(plan, rank.accept, self._broken, self._rules)
            self._schedulers[plan.hash] = scheduler

    def draft_with(self, plan_hash: str, small: Shard, vocabulary_size: int) -> None:
        """Have a small model, which is loaded, guess for a plan this node heads."""
        if (scheduler := self._schedulers.get(plan_hash)) is not None:
            make = partial(Drafter, self._engine, small, vocabulary_size)
            scheduler.draft_with(make)

    def generate(
        self, plan_hash: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        """One sequence on a plan this node heads.

        Raises:
            PlanMismatch: it heads no such plan.
        """
        scheduler = self._schedulers.get(plan_hash)
        if scheduler is None:
            raise PlanMismatch(
                f"node {self._node_id} heads no plan {plan_hash}; it heads {[*self._schedulers]}"
            )
        return scheduler.generate(request)

    def on_frame(self, plan_hash: str, frame: Frame) -> None:
        """A frame from the member before in a ring.

        Raises:
            PlanMismatch: this node has no place in that plan.
            InvalidFrame: the frame does not belong at this place.
        """
        rank = self._ranks.get(plan_hash)
        if rank is None:
            raise PlanMismatch(
                f"a frame is of plan {plan_hash}; node {self._node_id} holds {[*self._ranks]}"
            )
        heads = plan_hash in self._schedulers
        if isinstance(frame, StepResult | Rooms) and heads:
            self._schedulers[plan_hash].on_result(frame)
        elif not isinstance(frame, StepResult):
            if heads:
                raise InvalidFrame(f"the head of {plan_hash} was sent a step by its tail")
            rank.accept(frame)
        else:
            raise InvalidFrame(f"node {self._node_id} was sent a result but is not the head")

    def on_failure(self, failure: StepFailure) -> None:
        """A member tells the head that a step failed; nobody waits for one of an ended plan."""
        scheduler = self._schedulers.get(failure.plan_hash)
        if scheduler is not None:
            scheduler.on_failure(failure)

    def lose(self, node_id: str, error: ExoError) -> None:
        """End every plan the node was a member of; their sequences fail with the reason."""
        for rank in list(self._ranks.values()):
            plan = rank.plan
            if node_id in plan.node_ids:
                gone = f"node {node_id} of the ring of {plan.model_id} is gone: {error.message}"
                self.end(plan.hash, PeerUnavailable(gone))

    def end(self, plan_hash: str, error: ExoError) -> None:
        """The plan can serve no longer. Its head fails its sequences and tells its members."""
        scheduler = self._schedulers.get(plan_hash)
        if scheduler is not None:
            scheduler.end(error)
            self._broken(scheduler.plan, error)
        else:
            self._tasks.background(self.drop(plan_hash), f"drop {plan_hash}")

    async def retire(self, plan_hash: str, reason: str) -> None:
        """Take no new sequences; the head ends the plan everywhere once its last one has ended."""
        scheduler = self._schedulers.get(plan_hash)
        if scheduler is None:
            await self.drop(plan_hash)
            return
        scheduler.refuse_new(PlanMismatch(reason))
        self._tasks.background(self._end_when_drained(scheduler), f"drain {plan_hash}")

    def idle_s(self, plan_hash: str) -> float | None:
        """Seconds since a sequence ran on a plan this node heads; None while one does."""
        scheduler = self._schedulers.get(plan_hash)
        return scheduler.idle_s if scheduler is not None else None

    async def unload(self, plan_hash: str, forget: Callable[[str], None]) -> bool:
        """End a plan that this node heads, on which nothing runs, and give back its memory on every
        member; False if something does run on it. `forget` is given the model before anything is
        awaited: one that is wanted and has no plan gets another."""
        scheduler = self._schedulers.get(plan_hash)
        if scheduler is None or scheduler.idle_s is None:
            return False
        plan, reason = scheduler.plan, "unloaded: its memory was needed for another model"
        scheduler.refuse_new(PlanMismatch(f"{plan.model_id} was {reason}"))
        forget(plan.model_id)
        self._on_over(plan)
        await self._end_everywhere(plan, reason, unload_model=plan.model_id)
        await self.unload_unused(plan.model_id)
        return True

    async def drop(self, plan_hash: str) -> None:
        """Give up the place in a plan and the KV caches of its sequences; the shard stays."""
        scheduler = self._schedulers.pop(plan_hash, None)
        rank = self._ranks.pop(plan_hash, None)
        if scheduler is not None:
            scheduler.close()
        if rank is not None:
            await rank.close()

    async def unload_unused(self, model_id: str) -> None:
        """Give back the model's shards that no plan uses."""
        async with self._load_lock:
            used = {rank.shard for rank in self._ranks.values()}
            for shard in self._shards - used:
                if shard.model_id == model_id:
                    self._shards.discard(shard)
                    await self._engine.unload(shard)
            if not any(shard.model_id == model_id for shard in used):
                for layer in [one for one in self._standby if one.model_id == model_id]:
                    self._standby.discard(layer)
                    await self._engine.unload(layer)

    async def unload_what_no_plan_has(self, wanted: str) -> None:
        """Give back all of other models than the wanted one that have no place here: their ring
        broke and was never made whole, or this node was not told that they were unloaded."""
        having = {plan.model_id for plan in self.plans} | {wanted}
        for model_id in {shard.model_id for shard in self._shards | self._standby} - having:
            logger.info("%s is unloaded: no plan has it, and %s needs memory", model_id, wanted)
            await self.unload_unused(model_id)

    async def close(self) -> None:
        leaving = PeerUnavailable(f"node {self._node_id} is shutting down")
        for scheduler in self._schedulers.values():
            scheduler.end(leaving)
        await self._tasks.close()
        for plan_hash in list(self._ranks):
            await self.drop(plan_hash)

    def _deliver(self, plan: RingPlan) -> Callable[[StepResult | Rooms], None]:
        return lambda result: self._schedulers[plan.hash].on_result(result)

    async def _report(self, failure: StepFailure) -> None:
        rank = self._ranks.get(failure.plan_hash)
        if rank is None:
            return
        if rank.plan.head_id == self._node_id:
            self.on_failure(failure)
        else:
            await self._handle_of(rank.plan.head_id).report_failure(failure)

    def _broken(self, plan: RingPlan, error: ExoError) -> None:
        self._on_over(plan)
        self._tasks.background(self._end_everywhere(plan, error.message), f"end {plan.hash}")

    async def _end_when_drained(self, scheduler: Scheduler) -> None:
        await scheduler.drained()
        await self._end_everywhere(scheduler.plan, "its last sequence has ended")
        await self.unload_unused(scheduler.plan.model_id)

    async def _end_everywhere(self, plan: RingPlan, reason: str, unload_model: str = "") -> None:
        """The head tells everybody that a plan is over."""
        await self.drop(plan.hash)
        for node_id in self._alive():
            try:
                await self._handle_of(node_id).retire(plan.hash, reason, unload_model)
            except ExoError as error:
                logger.info("could not retire %s on %s: %s", plan.hash, node_id, error.message)
