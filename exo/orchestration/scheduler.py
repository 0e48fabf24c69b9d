"""The head's scheduler: decides every step of a plan, hands out what comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import numpy as np

from exo.errors import CacheMiss, EngineFailed, ExoError, Overloaded, PlanMismatch, StepTimeout
from exo.inference.engine import ForwardBatch
from exo.networking.messages import (
    GenerationEvent,
    GenerationRequest,
    Release,
    Step,
    StepFailure,
    StepResult,
)
from exo.orchestration.sequence import MAX_CACHE_MISSES, Sequence
from exo.shard import RingPlan
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

PREFILL_CHUNK = 256
"""Tokens of a prompt in one step. Larger fills a device better; smaller lets running answers go on
sooner and keeps hidden states on the wire small."""

MAX_RUNNING = 16
"""Sequences with a KV cache at once."""

MAX_WAITING = 256
"""Sequences that may wait for one of those places."""


class Scheduler:
    """Each step holds one token of every decoding sequence and at most one chunk of one prompt.

    `submit` gives a frame to the head's own rank. `on_broken` is called once when the ring can
    serve no longer.
    """

    def __init__(
        self,
        plan: RingPlan,
        submit: Callable[[Step | Release], None],
        on_broken: Callable[[RingPlan, ExoError], None],
        step_timeout_s: float,
    ) -> None:
        self.plan = plan
        self._submit = submit
        self._on_broken = on_broken
        self._step_timeout_s = step_timeout_s
        self._running: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._step = 0
        self._outcome: asyncio.Future[StepResult] | None = None
        self._ended: ExoError | None = None
        self._tasks = TaskOwner(f"scheduler {plan.hash}")

    def start(self) -> None:
        self._tasks.background(self._supervise(), "steps")

    @property
    def sequence_count(self) -> int:
        return len(self._running) + len(self._waiting)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """The tokens of a sequence as they come; closing the iterator cancels it.

        Raises:
            PlanMismatch: this plan takes no new sequences.
            Overloaded: too many are waiting.
            ExoError: whatever failed the sequence.
        """
        if self._ended is not None:
            raise PlanMismatch(
                f"plan {self.plan.hash} of {self.plan.model_id} ended: {self._ended.message}"
            )
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests are waiting for {self.plan.model_id} already")
        sequence = Sequence(request)
        self._waiting[sequence.id] = sequence
        self._idle.clear()
        self._wake.set()
        try:
            while True:
                event = await sequence.next_event()
                yield event
                if event.finish_reason:
                    return
        finally:
            self._drop(sequence)

    def on_result(self, result: StepResult) -> None:
        """The tail's answer. One for a step nobody waits for is too late and ignored."""
        if self._outcome is not None and result.number == self._step and not self._outcome.done():
            self._outcome.set_result(result)

    def on_failure(self, failure: StepFailure) -> None:
        """A member failed a step, or lost its link."""
        if failure.ring_broken:
            self.end(failure.error)
            self._on_broken(self.plan, failure.error)
        elif self._outcome is not None and failure.step == self._step and not self._outcome.done():
            self._outcome.set_exception(failure.error)

    def end(self, error: ExoError) -> None:
        """Fail everything and take nothing new."""
        self.refuse_new(error)
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_exception(error)
        for sequence in [*self._running.values(), *self._waiting.values()]:
            sequence.fail(error)

    def refuse_new(self, reason: ExoError) -> None:
        self._ended = self._ended or reason

    async def drained(self) -> None:
        """Wait until no sequence is left."""
        await self._idle.wait()

    async def close(self) -> None:
        await self._tasks.close()

    async def _supervise(self) -> None:
        """A scheduler that dies must not leave its clients waiting."""
        try:
            await self._run_steps()
        except Exception as error:
            logger.exception("scheduler of %s", self.plan.model_id)
            failed = EngineFailed(f"the scheduler failed: {type(error).__name__}: {error}")
            self.end(failed)
            self._on_broken(self.plan, failed)

    async def _run_steps(self) -> None:
        while True:
            await self._wake.wait()
            self._admit()
            step = self._next_step()
            if step is None:
                self._wake.clear()
                continue
            try:
                result = await self._through_the_ring(step)
            except ExoError as error:
                self._fail_step(step, error)
            else:
                self._take(step, result)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < MAX_RUNNING:
            sequence_id = next(iter(self._waiting))
            self._running[sequence_id] = self._waiting.pop(sequence_id)

    def _next_step(self) -> Step | None:
        active = [sequence for sequence in self._running.values() if not sequence.done]
        chosen = [sequence for sequence in active if sequence.is_decoding]
        prefilling = next((sequence for sequence in active if not sequence.is_decoding), None)
        if prefilling is not None:
            chosen.append(prefilling)
        if not chosen:
            return None
        slices = tuple(sequence.next_slice(PREFILL_CHUNK) for sequence in chosen)
        token_ids = [
            token
            for sequence, part in zip(chosen, slices, strict=True)
            for token in sequence.tokens[part.start : part.end]
        ]
        self._step += 1
        return Step(self._step, ForwardBatch(slices, np.array(token_ids, np.int32)))

    async def _through_the_ring(self, step: Step) -> StepResult:
        self._outcome = asyncio.get_running_loop().create_future()
        try:
            self._submit(step)
            async with asyncio.timeout(self._step_timeout_s):
                return await self._outcome
        except TimeoutError as error:
            raise StepTimeout(
                f"step {step.number} of {self.plan.model_id} did not come back from the ring in "
                f"{self._step_timeout_s:.0f} s"
            ) from error
        finally:
            self._outcome = None

    def _take(self, step: Step, result: StepResult) -> None:
        tokens = {token.sequence_id: token for token in result.tokens}
        for part in step.batch.slices:
            sequence = self._running.get(part.sequence_id)
            if sequence is None or sequence.done:
                continue
            sequence.computed = part.end
            if part.sampling is not None:
                if part.sequence_id in tokens:
                    sequence.add(tokens[part.sequence_id])
                else:
                    sequence.fail(PlanMismatch(f"the tail sampled nothing for {part.sequence_id}"))

    def _fail_step(self, step: Step, error: ExoError) -> None:
        """A cache miss is answered by prefilling again; anything else ends the step's sequences.

        The engine that failed has dropped their caches; the others drop them at the release."""
        hit = [s for p in step.batch.slices if (s := self._running.get(p.sequence_id)) is not None]
        for sequence in hit:
            sequence.computed = 0
            sequence.cache_misses += 1
            if not isinstance(error, CacheMiss) or sequence.cache_misses > MAX_CACHE_MISSES:
                sequence.fail(error)

    def _drop(self, sequence: Sequence) -> None:
        sequence.done = True
        started = self._running.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        if started is not None:
            self._submit(Release((sequence.id,)))
        if not self._running and not self._waiting:
            self._idle.set()
        self._wake.set()
