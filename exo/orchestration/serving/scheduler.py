"""The head's scheduler: decides every step of a plan, hands out what comes back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

import msgspec
import numpy as np

from exo.errors import (
    CacheMiss,
    EngineFailed,
    ExoError,
    InvalidRequest,
    Overloaded,
    PlanMismatch,
    StepTimeout,
)
from exo.inference.engine import ForwardBatch
from exo.networking.calls.messages import GenerationEvent, GenerationRequest, StepFailure
from exo.networking.rings.frames import Release, Step, StepResult
from exo.orchestration.serving.sequence import MAX_CACHE_MISSES, Sequence
from exo.shard import RingPlan

logger = logging.getLogger(__name__)

PREFILL_CHUNK = 256
"""Tokens of a prompt in one step. Larger fills a device better; smaller lets running answers go on
sooner and keeps hidden states on the wire small."""

RING_PREFILL_CHUNK = 32
"""The same where the plan has several members, who work on different chunks at once: a prompt of n
chunks keeps m members busy n / (n + m - 1) of the time."""

MAX_RUNNING = 16
"""Sequences with a KV cache at once."""

MAX_WAITING = 256
"""Sequences that may wait for one of those places."""


class _Flight(msgspec.Struct, frozen=True):
    """A step on its way through the ring, with the attempt of each sequence it is part of."""

    step: Step
    attempts: dict[str, int]
    deadline: float  # of the event loop's clock


class Load(msgspec.Struct, frozen=True):
    """Sequences that a scheduler holds now, and the steps it has had done, with the time between
    their leaving and their coming back."""

    running: int
    waiting: int
    steps: int
    step_seconds: float


class Scheduler:
    """As many steps are in flight as the ring has members. Each holds one token of its share of the
    decoding sequences, and at most one chunk of one prompt.

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
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_since = time.monotonic()
        self._step = 0
        self._in_flight: dict[int, _Flight] = {}
        self._outcomes: deque[StepResult | StepFailure] = deque()
        self._untold: list[tuple[Sequence, GenerationEvent | ExoError]] = []
        self._depth = len(plan.members)
        self._chunk = PREFILL_CHUNK if self._depth == 1 else RING_PREFILL_CHUNK
        self._ended: ExoError | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._done = 0
        self._done_seconds = 0.0

    @property
    def load(self) -> Load:
        return Load(len(self._running), len(self._waiting), self._done, self._done_seconds)

    @property
    def sequence_count(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def idle_s(self) -> float | None:
        """Seconds since the last sequence ended; None while there is one."""
        return None if self.sequence_count else time.monotonic() - self._idle_since

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
        try:
            self._go_on()
            while True:
                event = await sequence.next_event()
                yield event
                if event.finish_reason:
                    return
        finally:
            self._drop(sequence)

    def on_result(self, result: StepResult) -> None:
        """The tail's answer. One for a step nobody waits for is too late and ignored."""
        self._outcomes.append(result)
        self._go_on()

    def on_failure(self, failure: StepFailure) -> None:
        """A member failed a step, or lost its link."""
        if failure.ring_broken:
            self.end(failure.error)
            self._on_broken(self.plan, failure.error)
        else:
            self._outcomes.append(failure)
            self._go_on()

    def end(self, error: ExoError) -> None:
        """Fail everything and take nothing new."""
        self.refuse_new(error)
        self._in_flight.clear()
        for sequence in [*self._running.values(), *self._waiting.values()]:
            self._fail_sequence(sequence, error)
        self._tell()

    def refuse_new(self, reason: ExoError) -> None:
        self._ended = self._ended or reason

    async def drained(self) -> None:
        """Wait until no sequence is left."""
        await self._idle.wait()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _go_on(self) -> None:
        """Something has changed: take what came back and send what can be sent. At once, not in a
        task of its own, whose wake-up would cost every token time."""
        try:
            self._settle()
            self._admit()
            while len(self._in_flight) < self._depth and (step := self._next_step()):
                self._submit(step)
            self._set_alarm()
            self._tell()
        except Exception as error:
            # A scheduler that fails must not leave its clients waiting.
            logger.exception("scheduler of %s", self.plan.model_id)
            failed = EngineFailed(f"the scheduler failed: {type(error).__name__}: {error}")
            self.end(failed)
            self._on_broken(self.plan, failed)

    def _tell(self) -> None:
        """Hand out what came of steps: after the next one has gone, which does not need it."""
        for sequence, event in self._untold:
            sequence.tell(event)
        self._untold.clear()

    def _fail_late(self) -> None:
        """End the steps whose time is over."""
        now = asyncio.get_running_loop().time()
        for flight in [f for f in self._in_flight.values() if f.deadline <= now]:
            del self._in_flight[flight.step.number]
            self._fail(
                flight,
                StepTimeout(
                    f"step {flight.step.number} of {self.plan.model_id} did not come back from "
                    f"the ring in {self._step_timeout_s:.0f} s"
                ),
            )

    def _set_alarm(self) -> None:
        """Be woken at the first deadline. One alarm serves the steps that follow as well, as they
        all end later: to set one for each would cost every token time."""
        if self._alarm is None and self._in_flight:
            deadline = min(flight.deadline for flight in self._in_flight.values())
            self._alarm = asyncio.get_running_loop().call_at(deadline, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._fail_late()
        self._go_on()

    def _settle(self) -> None:
        """Give what came back to its sequences."""
        while self._outcomes:
            outcome = self._outcomes.popleft()
            number = outcome.number if isinstance(outcome, StepResult) else outcome.step
            flight = self._in_flight.pop(number, None)
            if flight is None:
                continue
            if isinstance(outcome, StepResult):
                begun = flight.deadline - self._step_timeout_s
                self._done += 1
                self._done_seconds += asyncio.get_running_loop().time() - begun
                self._take(flight, outcome)
            else:
                self._fail(flight, outcome.error)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < MAX_RUNNING:
            sequence_id = next(iter(self._waiting))
            self._running[sequence_id] = self._waiting.pop(sequence_id)

    def _next_step(self) -> Step | None:
        chosen = self._next_decoding()
        prefilling = next((s for s in self._running.values() if s.can_prefill), None)
        if prefilling is not None:
            chosen.append(prefilling)
        if not chosen:
            return None
        slices = tuple(sequence.next_slice(self._chunk) for sequence in chosen)
        token_ids: list[int] = []
        for sequence, part in zip(chosen, slices, strict=True):
            token_ids += sequence.tokens[part.start : part.end]
            sequence.scheduled = part.end
            sequence.in_flight += 1
        self._step += 1
        step = Step(self._step, ForwardBatch(slices, np.array(token_ids, np.int32)))
        deadline = asyncio.get_running_loop().time() + self._step_timeout_s
        attempts = {sequence.id: sequence.attempt for sequence in chosen}
        self._in_flight[step.number] = _Flight(step, attempts, deadline)
        return step

    def _next_decoding(self) -> list[Sequence]:
        """Those to decode in the next step: of all that decode a share for each member of the ring,
        so that every one has some to work on."""
        ready = [sequence for sequence in self._running.values() if sequence.can_decode]
        decoding = sum(sequence.is_decoding for sequence in self._running.values())
        return ready[: math.ceil(decoding / self._depth)]

    def _sequences_of(self, flight: _Flight) -> dict[str, Sequence]:
        """Those that still run the attempt the step was part of."""
        running = ((sid, self._running.get(sid)) for sid in flight.attempts)
        return {
            sid: sequence
            for sid, sequence in running
            if sequence is not None
            and not sequence.done
            and sequence.attempt == flight.attempts[sid]
        }

    def _take(self, flight: _Flight, result: StepResult) -> None:
        tokens = {token.sequence_id: token for token in result.tokens}
        sequences = self._sequences_of(flight)
        for part in flight.step.batch.slices:
            sequence = sequences.get(part.sequence_id)
            if sequence is None:
                continue
            sequence.in_flight -= 1
            if part.sampling is None:
                continue
            token = tokens.get(part.sequence_id)
            if token is None:
                missing = f"the tail sampled nothing for {part.sequence_id}"
                self._fail_sequence(sequence, PlanMismatch(missing))
            elif token.refusal:
                self._fail_sequence(sequence, InvalidRequest(token.refusal))
            else:
                self._untold += ((sequence, event) for event in sequence.add(token))

    def _fail(self, flight: _Flight, error: ExoError) -> None:
        """A cache miss is answered by prefilling again; anything else ends the step's sequences.

        The engine that failed has dropped their caches; the others drop them at the release, or
        when the sequence begins again at 0."""
        for sequence in self._sequences_of(flight).values():
            sequence.begin_again()
            sequence.cache_misses += 1
            if not isinstance(error, CacheMiss) or sequence.cache_misses > MAX_CACHE_MISSES:
                self._fail_sequence(sequence, error)

    def _fail_sequence(self, sequence: Sequence, error: ExoError) -> None:
        sequence.done = True
        self._untold.append((sequence, error))

    def _drop(self, sequence: Sequence) -> None:
        sequence.done = True
        started = self._running.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        if started is not None:
            self._submit(Release((sequence.id,)))
        if not self._running and not self._waiting:
            self._idle.set()
            self._idle_since = time.monotonic()
        self._go_on()
