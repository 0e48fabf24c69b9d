"""The head's scheduler: decides every step of a plan, hands out what comes back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import defaultdict, deque
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
    Stalled,
    StepTimeout,
)
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.sampling import SampledToken
from exo.networking.calls.messages import GenerationEvent, GenerationRequest, StepFailure
from exo.networking.calls.serving_report import CacheUse
from exo.networking.rings.frames import MemberRoom, Release, Rooms, Step, StepResult
from exo.orchestration.config import ServingRules
from exo.orchestration.serving.batching import Batcher
from exo.orchestration.serving.drafts.drafter import Drafter
from exo.orchestration.serving.kv_memory import KEPT_S, KVMemory
from exo.orchestration.serving.pace import Pace
from exo.orchestration.serving.sequence import MAX_CACHE_MISSES, Sequence, by_rank
from exo.orchestration.serving.waiting import WaitingLine, full
from exo.shard import RingPlan

logger = logging.getLogger(__name__)

ROOM_S = 1.0
"""The members are asked so often how much room their caches have, while steps go around."""


class _Flight(msgspec.Struct, frozen=True):
    """A step on its way through the ring, with the attempt of each sequence it is part of."""

    step: Step
    attempts: dict[str, int]
    deadline: float  # of the event loop's clock
    decoded: int
    """Tokens of sequences that decode."""
    prefilled: int
    """Tokens of prompts."""
    attended: float
    """Earlier tokens that those of prompts attend to, in all."""


class Load(msgspec.Struct, frozen=True):
    """Sequences that a scheduler holds now, and the steps it has had done, with the time between
    their leaving and their coming back."""

    running: int
    waiting: int
    steps: int
    step_seconds: float
    tokens: int
    """Generated."""
    preempted: int
    """Times that a sequence gave its pages to older ones, to begin again later."""
    reused_tokens: int
    """Tokens of prompts that were computed before."""
    drafted_tokens: int
    """Tokens that were guessed."""
    accepted_tokens: int
    """Of them those that were right."""
    cache: CacheUse


class Scheduler:
    """As many steps are in flight as the ring has members. Each holds what comes next of its share
    of the decoding sequences, and a chunk of prompts.

    Sequences run while the ring's KV cache has room for them. When it has none left the youngest
    gives its pages back and begins again later: what it has said stays said.

    `submit` gives a frame to the head's own rank. `on_broken` is called once when the ring can
    serve no longer.
    """

    def __init__(
        self,
        plan: RingPlan,
        submit: Callable[[Step | Release | Rooms], None],
        on_broken: Callable[[RingPlan, ExoError], None],
        rules: ServingRules,
    ) -> None:
        self.plan = plan
        self._submit = submit
        self._on_broken = on_broken
        self._rules = rules
        self._depth = len(plan.members)
        in_part = any(member.shard.expert_share < 1 for member in plan.members)
        self._pace = Pace(self._depth, routed_share=plan.routed_share, reads_experts=in_part)
        self._memory = KVMemory(lambda gone: submit(Release(gone)))
        self._line = WaitingLine(rules.max_requests)
        self._batcher = Batcher(
            plan, self._line, self._memory, self._pace, self._end_of, speculates=rules.speculates
        )
        self._drafter: Drafter | None = None
        self._rooms: tuple[MemberRoom, ...] = ()
        self._asked_for_rooms = -math.inf
        self._ranks = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_since = time.monotonic()
        self._step = 0
        self._in_flight: dict[int, _Flight] = {}
        self._outcomes: deque[StepResult | StepFailure] = deque()
        self._untold: list[tuple[Sequence, GenerationEvent | ExoError]] = []
        self._ended: ExoError | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._done = 0
        self._done_seconds = 0.0
        self._tokens = self._drafted = self._accepted = 0

    @property
    def load(self) -> Load:
        return Load(
            len(self._batcher.running),
            len(self._line),
            self._done,
            self._done_seconds,
            self._tokens,
            self._batcher.preempted,
            self._batcher.reused,
            self._drafted,
            self._accepted,
            self._memory.use(self._batcher.running),
        )

    def draft_with(self, make: Callable[[Pace, Callable[[], None]], Drafter]) -> None:
        """Have a small model guess what comes next. It is given the ring's pace, and what it is to
        call when sequences that waited for it can go on."""
        if self._drafter is None:
            self._drafter = make(self._pace, self._go_on)

    @property
    def rooms(self) -> tuple[MemberRoom, ...]:
        """What each member's cache may hold and held, when it was asked last."""
        return self._rooms

    @property
    def sequence_count(self) -> int:
        return len(self._batcher.running) + len(self._line)

    @property
    def idle_s(self) -> float | None:
        """Seconds since the last sequence ended; None while there is one."""
        return None if self.sequence_count else time.monotonic() - self._idle_since

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """The tokens of a sequence as they come; closing the iterator cancels it.

        Raises:
            PlanMismatch: this plan takes no new sequences.
            Overloaded: too many are waiting.
            PromptTooLong: not even alone would it find room in the KV cache.
            Stalled: it took longer than its time, or nobody read what came.
            ExoError: whatever failed the sequence.
        """
        if self._ended is not None:
            raise PlanMismatch(
                f"plan {self.plan.hash} of {self.plan.model_id} ended: {self._ended.message}"
            )
        self._batcher.check_length(len(request.prompt))
        sequence = Sequence(request, next(self._ranks))
        if displaced := self._line.add(sequence, len(self._batcher.running)):
            displaced.fail()
            displaced.tell(full(self._rules.max_requests))
        self._idle.clear()
        timer = None
        if request.timeout_s > 0:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(request.timeout_s, self._expire, sequence)
        try:
            self._go_on()
            while True:
                event = await sequence.next_event()
                yield event
                if event.finish_reason:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            self._drop(sequence)

    def _expire(self, sequence: Sequence) -> None:
        if not sequence.done:
            sequence.fail()
            late = f"the answer had not ended after {sequence.request.timeout_s:g} s"
            sequence.tell(Stalled(f"{late}, the limit of --request-timeout"))

    def on_result(self, result: StepResult | Rooms) -> None:
        """The tail's answer. One for a step nobody waits for is too late and ignored."""
        if isinstance(result, Rooms):
            self._rooms = result.members
            self._memory.learn([member.room for member in result.members])
        else:
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
        for sequence in [*self._batcher.running.values(), *self._line]:
            self._fail_sequence(sequence, error)
        self._tell()

    def refuse_new(self, reason: ExoError) -> None:
        self._ended = self._ended or reason

    async def drained(self) -> None:
        """Wait until no sequence is left."""
        await self._idle.wait()

    def close(self) -> None:
        for timer in (self._alarm, self._sweep):
            if timer is not None:
                timer.cancel()
        if self._drafter is not None:
            self._drafter.close()

    def _go_on(self) -> None:
        """Something has changed: take what came back and send what can be sent. At once, not in a
        task of its own, whose wake-up would cost every token time."""
        try:
            self._guess_for(self._settle())
            self._ask_for_rooms()
            self._batcher.admit()
            while len(self._in_flight) < self._depth and self._send_step():
                pass
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
                    f"the ring in {self._rules.step_timeout_s:.0f} s"
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

    def _settle(self) -> list[Sequence]:
        """Give what came back to its sequences. Those that got tokens and have not ended."""
        grown: list[Sequence] = []
        while self._outcomes:
            outcome = self._outcomes.popleft()
            number = outcome.number if isinstance(outcome, StepResult) else outcome.step
            flight = self._in_flight.pop(number, None)
            if flight is None:
                continue
            if isinstance(outcome, StepResult):
                begun = flight.deadline - self._rules.step_timeout_s
                took = asyncio.get_running_loop().time() - begun
                self._done += 1
                self._done_seconds += took
                self._pace.took(took, flight.decoded, flight.prefilled, flight.attended)
                grown += self._take(flight, outcome)
            else:
                self._fail(flight, outcome.error)
        return grown

    def _guess_for(self, grown: list[Sequence]) -> None:
        """Have the small model guess for those who just got tokens, and for whom nothing is found
        in what came before."""
        drafter = self._drafter
        if drafter is None or not grown:
            return
        decoding = sum(sequence.is_decoding for sequence in self._batcher.running.values())
        count = drafter.worth(math.ceil(max(decoding, 1) / self._depth))
        for sequence in grown if count else ():
            most = sequence.max_tokens_left - 1
            if most < 1 or sequence.left != 1 or not self._batcher.may_draft(sequence):
                continue
            if not self._batcher.looked_up(sequence, decoding):
                how = Slice("", 0, 1, sequence.request.sampling, len(sequence.request.prompt))
                sequence.awaits_guess = drafter.guess(
                    sequence.id, sequence.tokens, how, most, sequence.take_guess
                )
        drafter.go_on(count)

    def _ask_for_rooms(self) -> None:
        """Memory is not asked for while nothing runs: idle stays idle."""
        now = asyncio.get_running_loop().time()
        if self.sequence_count and now - self._asked_for_rooms >= ROOM_S:
            self._asked_for_rooms = now
            self._submit(Rooms())

    def _send_step(self) -> bool:
        """Whether there is something to do before what is in flight comes back."""
        waits = self._drafter is not None and any(
            sequence.awaits_guess for sequence in self._batcher.running.values()
        )
        idle = not self._in_flight and not waits
        decoding, prompts = self._batcher.next_parts(nothing_else_runs=idle)
        parts = decoding + prompts
        if not parts:
            return False
        token_ids = [token for part in parts for token in part.token_ids]
        slices = tuple(part.slice for part in parts)
        self._step += 1
        step = Step(self._step, ForwardBatch(slices, np.array(token_ids, np.int32)))
        self._in_flight[step.number] = _Flight(
            step,
            {part.sequence.id: part.sequence.attempt for part in parts},
            asyncio.get_running_loop().time() + self._rules.step_timeout_s,
            sum(part.slice.length for part in decoding),
            sum(part.slice.length for part in prompts),
            sum(one.length * (one.start + one.length / 2) for one in (p.slice for p in prompts)),
        )
        self._submit(step)
        self._batcher.sent(parts)
        return True

    def _sequences_of(self, flight: _Flight) -> dict[str, Sequence]:
        """Those that still run the attempt the step was part of."""
        running = ((sid, self._batcher.running.get(sid)) for sid in flight.attempts)
        return {
            sid: sequence
            for sid, sequence in running
            if sequence is not None
            and not sequence.done
            and sequence.attempt == flight.attempts[sid]
        }

    def _take(self, flight: _Flight, result: StepResult) -> list[Sequence]:
        grown = []
        tokens: dict[str, list[SampledToken]] = defaultdict(list)
        for token in result.tokens:
            tokens[token.sequence_id].append(token)
        sequences = self._sequences_of(flight)
        for part in flight.step.batch.slices:
            sequence = sequences.get(part.sequence_id)
            if sequence is None:
                continue
            sequence.in_flight -= 1
            if part.sampling is None:
                read = GenerationEvent(cached_tokens=sequence.cached, prompt_done=part.end)
                self._untold.append((sequence, read))
                continue
            sampled = tokens.get(part.sequence_id)
            if not sampled or len(sampled) > part.drafts + 1:
                wrong = f"the tail sampled {len(sampled or ())} tokens for {part.sequence_id}"
                self._fail_sequence(sequence, PlanMismatch(wrong))
            elif sampled[0].refusal:
                self._fail_sequence(sequence, InvalidRequest(sampled[0].refusal))
            else:
                guess, sequence.guess = sequence.guess, []
                if part.drafts:
                    self._drafted += part.drafts
                    self._accepted += len(sampled) - 1
                    made = self._drafter if guess and self._drafter else sequence.lookup
                    made.verified(len(sampled) - 1, part.drafts)
                events = sequence.add(sampled)
                self._tokens += len(events)
                self._untold += ((sequence, event) for event in events)
                if not sequence.done:
                    grown.append(sequence)
        return grown

    def _fail(self, flight: _Flight, error: ExoError) -> None:
        """A cache miss is answered by prefilling again, a cache that is full by making way;
        anything else ends the step's sequences.

        The engine that failed has dropped their caches; the others drop them at the release, or
        when the sequence begins again at 0."""
        slices = flight.step.batch.slices
        if isinstance(error, CacheMiss):
            for part in slices:
                if part.takes_over:
                    cut = part.start < self._memory.holds(part.takes_over)
                    cannot = cut and not self._memory.ledger.is_paged
                    self._memory.distrust(part.takes_over, cannot_cut=cannot)
        for part in slices:
            self._memory.distrust(part.sequence_id)
        sequences = sorted(self._sequences_of(flight).values(), key=by_rank)
        if isinstance(error, Overloaded):
            # A member has less room than it said: another plan, whose time is over, has some yet.
            self._memory.ledger.shrink()
            for younger in sequences[1:]:
                self._batcher.preempt(younger)
            del sequences[1:]
        for sequence in sequences:
            sequence.begin_again()
            sequence.cache_misses += 1
            retried = isinstance(error, CacheMiss | Overloaded)
            if not retried or sequence.cache_misses > MAX_CACHE_MISSES:
                self._fail_sequence(sequence, error)

    def _end_of(self, sequence: Sequence, end: GenerationEvent | ExoError) -> None:
        self._untold.append((sequence, end))

    def _fail_sequence(self, sequence: Sequence, error: ExoError) -> None:
        sequence.fail()
        self._end_of(sequence, error)

    def _drop(self, sequence: Sequence) -> None:
        """Nobody waits for it any longer. What it has computed is kept for who begins alike."""
        sequence.done = True
        self._line.remove(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence.id)
        if self._batcher.running.pop(sequence.id, None) is not None:
            if sequence.failed or not sequence.may_reuse:
                self._memory.drop(sequence.id)
            else:
                self._memory.keep(sequence.id)
                self._set_sweep()
        if not self.sequence_count:
            self._idle.set()
            self._idle_since = time.monotonic()
        self._go_on()

    def _set_sweep(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_S, self._on_sweep)

    def _on_sweep(self) -> None:
        self._sweep = None
        again_in = self._memory.drop_old()
        if again_in is not None:
            self._sweep = asyncio.get_running_loop().call_later(again_in, self._on_sweep)
