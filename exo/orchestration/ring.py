"""A member's part in a ring: take a step, run it, send it on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from exo.errors import EngineFailed, ExoError, InvalidFrame, PeerUnavailable
from exo.inference.engine import InferenceEngine, StepOutput
from exo.networking.messages import Frame, Release, Step, StepFailure, StepResult
from exo.networking.ring_stream import RingStream
from exo.shard import RingPlan
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

_Begun = tuple[Step | Release, "asyncio.Future[Any]"]

Report = Callable[[StepFailure], Awaitable[None]]


class Rank:
    """This node's place in one plan: frames come in, in order; their outcome goes on.

    `deliver` takes a result when this node is both tail and head; otherwise results travel over
    the link, whose other end is the head. `report` tells the head of failures.
    """

    def __init__(
        self,
        plan: RingPlan,
        node_id: str,
        engine: InferenceEngine,
        link: RingStream | None,
        deliver: Callable[[StepResult], None],
        report: Report,
    ) -> None:
        self.plan = plan
        self.shard = plan.shard_of(node_id)
        self._node_id = node_id
        self._engine = engine
        self._link = link
        self._deliver = deliver
        self._report = report
        self._begun: asyncio.Queue[_Begun] = asyncio.Queue()
        self._live: set[str] = set()
        self._closed = False
        self._last_step = 0
        self._tasks = TaskOwner(f"rank {self.shard}")

    def start(self) -> None:
        self._tasks.background(self._serve(), "serve")
        if self._link is not None:
            self._tasks.background(self._watch(self._link), "watch link")

    def accept(self, frame: Step | Release) -> None:
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
            self._live.update(part.sequence_id for part in frame.batch.slices)
            self._begin_step(frame)
        else:
            self._live.difference_update(frame.sequence_ids)
            on_done = None if self.shard.is_last else partial(self._send, frame)
            released = self._engine.begin_release(frame.sequence_ids, on_done)
            self._begun.put_nowait((frame, released))

    def _begin_step(self, step: Step) -> None:
        logger.debug(
            "%s runs step %d of %d tokens", self.shard, step.number, len(step.batch.token_ids)
        )
        on_done = None if self._link is None else partial(self._send_on, step)
        output = self._engine.begin_forward(self.shard, step.batch, step.hidden_states, on_done)
        self._begun.put_nowait((step, output))

    async def close(self) -> None:
        """Stop, cut the link, free the KV caches of this plan's sequences."""
        self._closed = True
        await self._tasks.close()
        if self._link is not None:
            self._link.cancel()
        while not self._begun.empty():
            _forget(self._begun.get_nowait()[1])
        await self._engine.release(self._live)
        self._live.clear()

    async def _serve(self) -> None:
        """Send on what the engine has done."""
        while True:
            frame, outcome = await self._begun.get()
            if isinstance(frame, Step):
                await self._finish_step(frame, outcome)
            else:
                await self._finish_release(frame, outcome)

    async def _finish_step(self, step: Step, outcome: asyncio.Future[Any]) -> None:
        try:
            output: StepOutput = await outcome
            if self._link is None:
                self._deliver(StepResult(step.number, output.tokens))
        except ExoError as error:
            # A broken link is reported once, by its watcher.
            await self._fail(step.number, error)
        except Exception as error:
            # Whatever it is, the client hears of it and the next step runs.
            logger.exception("step %d of %s", step.number, self.shard)
            await self._fail(step.number, EngineFailed(f"{type(error).__name__}: {error}"))

    async def _finish_release(self, release: Release, outcome: asyncio.Future[Any]) -> None:
        try:
            await outcome
        except ExoError as error:
            # Nobody waits for a release; a cache that is left goes with the plan.
            logger.warning("%s on %s: release: %s", self.shard, self._node_id, error.message)

    def _send_on(self, step: Step, output: StepOutput) -> None:
        """What the engine's thread does next: no wake-up of the loop lies in a token's way."""
        if self.shard.is_last:
            self._send(StepResult(step.number, output.tokens))
        else:
            self._send(Step(step.number, step.batch, output.hidden_states))

    def _send(self, frame: Frame) -> None:
        assert self._link is not None
        self._link.send(frame)

    async def _watch(self, link: RingStream) -> None:
        error = await link.closed()
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


def _forget(outcome: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more."""
    if not outcome.cancel() and not outcome.cancelled():
        outcome.exception()
