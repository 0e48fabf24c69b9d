"""A member's part in a ring: take a step, run it, send it on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from exo.errors import EngineFailed, ExoError, InvalidFrame, PeerUnavailable
from exo.inference.batch import CacheRoom, StepOutput
from exo.inference.engine import InferenceEngine
from exo.networking.calls.messages import StepFailure
from exo.networking.rings.frames import MemberRoom, Release, Rooms, Step, StepResult
from exo.networking.rings.stream import RingStream
from exo.orchestration.serving.busy_poll import BusyPoll
from exo.shard import RingPlan
from exo.tasks import TaskOwner, tell

logger = logging.getLogger(__name__)

Report = Callable[[StepFailure], Awaitable[None]]


class Rank:
    """This node's place in one plan: frames come in, in order; their outcome goes on.

    `deliver` takes what comes back to the head when this node is both tail and head; otherwise that
    travels over the link, whose other end is the head. `report` tells the head of failures.
    """

    def __init__(
        self,
        plan: RingPlan,
        node_id: str,
        engine: InferenceEngine,
        link: RingStream | None,
        deliver: Callable[[StepResult | Rooms], None],
        report: Report,
    ) -> None:
        self.plan = plan
        self.shard = plan.shard_of(node_id)
        self._node_id = node_id
        self._engine = engine
        self._link = link
        self._deliver = deliver
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._live: set[str] = set()
        self._closed = False
        self.is_linked = True
        """False once the link to the next member is broken: nothing can pass this place."""
        self._last_step = 0
        self._busy_poll = BusyPoll()
        self._tasks = TaskOwner(f"rank {self.shard}")

    @property
    def sent_bytes(self) -> int:
        """Over the link to the next member."""
        return 0 if self._link is None else self._link.sent_bytes

    def start(self) -> None:
        if self._link is not None:
            self._tasks.background(self._watch(self._link), "watch link")

    def accept(self, frame: Step | Release | Rooms) -> None:
        """Give a frame from the member before to the engine, which does them in order.

        Raises:
            InvalidFrame: it is out of order, or has or lacks hidden states against this place.
            EngineFailed: the engine is closed.
        """
        if self._closed:
            return  # all of this plan's sequences are released
        if isinstance(frame, Step):
            if frame.number <= self._last_step:
                raise InvalidFrame(
                    f"{self.shard} on {self._node_id}: step {frame.number} came after "
                    f"step {self._last_step}"
                )
            if (frame.hidden_states is None) != self.shard.is_first:
                raise InvalidFrame(
                    f"{self.shard} on {self._node_id}: step {frame.number} "
                    f"{'lacks' if frame.hidden_states is None else 'has'} hidden states"
                )
            self._last_step = frame.number
            self._busy_poll.end()
            for part in frame.batch.slices:
                if part.sequence_id not in self._live:
                    self._live.add(part.sequence_id)
                    logger.info("%s: sequence %s begins", self.shard, part.sequence_id)
            logger.debug(
                "%s runs step %d of %d tokens", self.shard, frame.number, len(frame.batch.token_ids)
            )
            self._engine.begin_forward(
                self.shard, frame.batch, frame.hidden_states, partial(self._on_output, frame)
            )
        elif isinstance(frame, Release):
            self._live.difference_update(frame.sequence_ids)
            on_released = partial(self._on_released, frame)
            self._engine.begin_release(frame.sequence_ids, on_released)
        else:
            self._engine.begin_room(self.shard, partial(self._on_room, frame))

    async def close(self) -> None:
        """Stop, cut the link, free the KV caches of this plan's sequences."""
        self._closed = True
        self._busy_poll.end()
        await self._tasks.close()
        if self._link is not None:
            self._link.cancel()
        await self._engine.release(self._live)
        self._live.clear()

    # On the engine's thread, which sends on what it computed by itself: to wake the event loop for
    # it would cost every token time.

    def _on_output(self, step: Step, outcome: StepOutput | ExoError) -> None:
        try:
            if isinstance(outcome, ExoError):
                raise outcome
            if self._link is None:
                tell(self._loop, self._on_result, StepResult(step.number, outcome.tokens))
                return
            if self.shard.is_last:
                self._link.send(StepResult(step.number, outcome.tokens))
            else:
                self._link.send(Step(step.number, step.batch, outcome.hidden_states))
            if step.number == self._last_step:  # no other waits for this engine already
                tell(self._loop, self._on_passed, step.number)
        except ExoError as error:
            tell(self._loop, self._on_failed, step.number, error)
        except Exception as error:
            # Whatever it is, the client hears of it and the next step runs.
            logger.exception("step %d of %s", step.number, self.shard)
            failed = EngineFailed(f"{type(error).__name__}: {error}")
            tell(self._loop, self._on_failed, step.number, failed)

    def _on_released(self, release: Release, outcome: ExoError | None) -> None:
        try:
            if outcome is not None:
                raise outcome
            if self._link is not None and not self.shard.is_last:
                self._link.send(release)
        except ExoError as error:
            # Nobody waits for a release; a cache that is left goes with the plan.
            logger.warning("%s on %s: release: %s", self.shard, self._node_id, error.message)

    def _on_room(self, asked: Rooms, outcome: CacheRoom | ExoError) -> None:
        try:
            if isinstance(outcome, ExoError):
                raise outcome
            rooms = Rooms((*asked.members, MemberRoom(self._node_id, outcome)))
            if self._link is None:
                tell(self._loop, self._on_result, rooms)
            else:
                self._link.send(rooms)
        except ExoError as error:
            # The head asks again; until then it goes by what it was told before.
            logger.warning("%s on %s: room: %s", self.shard, self._node_id, error.message)

    # On the event loop --------------------------------------------------------------------------

    def _on_result(self, result: StepResult | Rooms) -> None:
        if not self._closed:
            self._deliver(result)

    def _on_passed(self, step: int) -> None:
        if not self._closed and step == self._last_step:
            self._busy_poll.begin()

    def _on_failed(self, step: int, error: ExoError) -> None:
        if not self._closed:
            self._tasks.background(self._fail(step, error), f"report step {step}")

    async def _watch(self, link: RingStream) -> None:
        error = await link.closed()
        self.is_linked = False
        next_id = self.plan.next_after(self._node_id)
        broken = PeerUnavailable(
            f"the ring of {self.plan.model_id} broke between {self._node_id} and {next_id}: "
            f"{error.message}"
        )
        await self._fail(self._last_step, broken, ring_broken=True)

    async def _fail(self, step: int, error: ExoError, *, ring_broken: bool = False) -> None:
        logger.warning("%s on %s: step %d: %s", self.shard, self._node_id, step, error.message)
        failure = StepFailure(self.plan.hash, step, self._node_id, error, ring_broken)
        try:
            await self._report(failure)
        except ExoError as unreported:
            # The head is gone: membership ends this plan on every member.
            logger.warning("could not tell the head: %s", unreported.message)
