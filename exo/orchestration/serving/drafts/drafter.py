"""Guesses by a smaller model of the same vocabulary, on the head of a ring (Leviathan, Kalman and
Matias 2023, https://arxiv.org/abs/2211.17192).

What is guessed is verified by the ring as any guess is: it changes no token. The small model draws
its tokens as the large one does, by the same seed at each position, so that they agree oftener than
chance where answers are sampled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from exo.errors import ExoError
from exo.inference.batch import ForwardBatch, Slice, StepOutput
from exo.inference.engine import InferenceEngine
from exo.orchestration.serving.drafts.chance import Chance
from exo.orchestration.serving.pace import Pace
from exo.shard import Shard
from exo.tasks import tell

logger = logging.getLogger(__name__)

MOST = 8
"""Guesses in a row: of more hardly any are right."""

FIRST = 2
"""The same until it is known what one takes."""

NEAR_TOKENS = 32
"""A sequence waits for guesses if the small model lacks no more of its tokens than these. What it
lacks of a prompt it reads meanwhile, while the sequence goes on without."""

CHUNK_TOKENS = 256
"""Of what it lacks in one step: the head's part of the ring's steps waits for that."""

PATIENCE_S = 2.0
"""Sequences go on without guesses that take longer."""

REST_S = 5.0
"""After a failure, of a KV cache that is full above all, nobody is guessed for for so long."""

FIRST_CHANCE = 0.6
_NEWS = 0.05
"""Of the chance that a guess is right, what the newest one makes up."""

_HOPE = 0.005
"""So much of the way back to what is believed at first the chance goes each time that guesses were
not worth it."""

WORTH = 1.05
"""So many times as fast it has to be expected to become."""


class Guessed:
    """What is guessed for one sequence. `tokens`: its prompt and answer so far."""

    def __init__(self, sequence_id: str, tokens: Sequence[int]) -> None:
        self.id = f"{sequence_id} draft"
        self.tokens = tokens
        self.fed: list[int] = []
        """Tokens that the small model's cache holds."""
        self.sure = 0
        """So many of these were compared with the sequence's."""
        self.is_fed = False
        """A step of it is on its way."""
        self.wanted: _Wanted | None = None

    def begin(self) -> int:
        """How many of the sequence's tokens the small model need not be fed; one is left."""
        tokens, fed = self.tokens, self.fed
        end = min(len(fed), len(tokens))
        while self.sure < end and fed[self.sure] == tokens[self.sure]:
            self.sure += 1
        self.sure = min(self.sure, len(tokens) - 1)
        del fed[self.sure :]
        return self.sure


class _Wanted(msgspec.Struct):
    """What a sequence asks for, and waits for."""

    part: Slice
    """How its tokens are drawn."""
    most: int
    take: Callable[[list[int]], None]
    tokens: int
    """That it had then."""
    found: list[int] = msgspec.field(default_factory=list)
    is_over: bool = False


@dataclass
class _Round:
    members: list[Guessed]
    count: int
    begun: float  # the event loop's clock
    steps: int = 0


class Drafter:
    """`shard` is the whole small model, loaded. `vocabulary_size`: larger ids are no tokens of the
    large one. `pace` tells what the ring's steps take. `on_guessed` is called when sequences that
    waited may go on."""

    def __init__(
        self,
        engine: InferenceEngine,
        shard: Shard,
        vocabulary_size: int,
        pace: Pace,
        on_guessed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._shard = shard
        self._vocabulary_size = vocabulary_size
        self._pace = pace
        self._on_guessed = on_guessed
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, Guessed] = {}
        self._waiting: list[Guessed] = []
        self._round: _Round | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._chance = Chance(FIRST_CHANCE, _NEWS, _HOPE)
        self._guess_s = 0.0  # a step of the small model, 0 where that is not known
        self._not_before = 0.0  # the event loop's clock
        self._closed = False

    def guess(
        self,
        sequence_id: str,
        tokens: Sequence[int],
        how: Slice,
        most: int,
        take: Callable[[list[int]], None],
    ) -> bool:
        """Whether guesses at what comes after `tokens` are on their way: `take` is called with
        them, or with none. `how` draws the large model's next token; at most `most` are of use.
        Nothing begins before `go_on`."""
        known = self._known.get(sequence_id)
        if known is None:
            known = self._known[sequence_id] = Guessed(sequence_id, tokens)
        is_late = self._round is not None and self._alarm is None  # it was given up
        rests = self._closed or is_late or self._loop.time() < self._not_before
        if rests or known.is_fed or known.wanted is not None:
            return False
        lacks = len(tokens) - known.begin()
        if lacks > NEAR_TOKENS:
            self._read(known)
            return False
        known.wanted = _Wanted(how, most, take, len(tokens))
        self._waiting.append(known)
        return True

    def worth(self, decoding: int) -> int:
        """How many guesses make the ring fastest, with so many sequences in a step; 0 where it is
        faster without."""
        if not self._guess_s:
            return FIRST
        step_s, row_s = self._pace.decode_cost()
        without = decoding / max(step_s + row_s * decoding, 1e-6)
        best, fastest = 0, WORTH * without
        chance = expected = 1.0
        for count in range(1, MOST + 1):
            chance *= self._chance.value
            expected += chance
            seconds = count * self._guess_s + step_s + row_s * decoding * (1 + count)
            if decoding * expected / seconds > fastest:
                best, fastest = count, decoding * expected / seconds
        if not best:
            self._chance.not_tried()
        return best

    def verified(self, right: int, drafted: int) -> None:
        """So many of the guesses of a sequence were right."""
        self._chance.verified(right, drafted)

    def go_on(self, count: int) -> None:
        """Begin what was asked for: `count` guesses for each."""
        if self._round is not None or not self._waiting:
            return
        self._round = _Round(self._waiting, count, self._loop.time())
        self._waiting = []
        self._alarm = self._loop.call_later(PATIENCE_S, self._give_up)
        self._step(self._round)

    def forget(self, sequence_id: str) -> None:
        known = self._known.pop(sequence_id, None)
        if known is None:
            return
        known.wanted = None
        if known in self._waiting:
            self._waiting.remove(known)
        if known.fed or known.is_fed:
            self._release(known)

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        for sequence_id in list(self._known):
            self.forget(sequence_id)

    def _release(self, known: Guessed) -> None:
        known.fed, known.sure = [], 0

        def released(outcome: ExoError | None) -> None:
            if outcome is not None:
                logger.warning("%s: release: %s", self._shard, outcome.message)

        try:
            self._engine.begin_release([known.id], released)
        except ExoError as error:  # the engine is closed, and with it all caches
            logger.debug("%s: release: %s", self._shard, error.message)

    def _forward(
        self,
        slices: tuple[Slice, ...],
        ids: list[int],
        on_done: Callable[[StepOutput | ExoError], None],
    ) -> None:
        batch = ForwardBatch(slices, np.array(ids, np.int32))
        try:
            self._engine.begin_forward(
                self._shard, batch, None, lambda outcome: tell(self._loop, on_done, outcome)
            )
        except ExoError as error:
            self._loop.call_soon(on_done, error)

    # What it lacks of a prompt ------------------------------------------------------------------

    def _read(self, known: Guessed) -> None:
        start = known.begin()
        ids = list(known.tokens[start : min(start + CHUNK_TOKENS, len(known.tokens) - 1)])
        known.is_fed = True

        def read(outcome: StepOutput | ExoError) -> None:
            known.is_fed = False
            if isinstance(outcome, ExoError):
                self._failed(outcome)
                known.fed, known.sure = [], 0
            elif known in self._known.values():
                known.fed += ids
                if len(known.tokens) - known.begin() > NEAR_TOKENS:
                    self._read(known)

        self._forward((Slice(known.id, start, len(ids)),), ids, read)

    # Rounds of guesses, for all that wait at once -----------------------------------------------

    def _step(self, current: _Round) -> None:
        """The next guess of each that goes on, or the end."""
        slices, ids, asked = [], [], []
        for known in current.members:
            wanted = known.wanted
            if wanted is None or wanted.is_over or len(known.tokens) != wanted.tokens:
                continue
            if len(wanted.found) >= min(current.count, wanted.most):
                continue
            start = len(known.fed) if wanted.found else known.begin()
            new = [*known.tokens, *wanted.found][start:]
            how = msgspec.structs.replace(
                wanted.part, sequence_id=known.id, start=start, length=len(new), drafts=0
            )
            slices.append(how)
            ids += new
            asked.append((known, wanted, new))
        if not asked or self._closed:
            self._end_round(current)
            return

        def on_done(outcome: StepOutput | ExoError) -> None:
            current.steps += 1
            tokens = {}
            if isinstance(outcome, ExoError):
                self._failed(outcome)
            else:
                tokens = {token.sequence_id: token.token_id for token in outcome.tokens}
            for known, wanted, new in asked:
                known.is_fed = False
                if known.id in tokens:
                    known.fed += new
                else:
                    known.fed, known.sure = [], 0
                guess = tokens.get(known.id, self._vocabulary_size)
                if guess < self._vocabulary_size:
                    wanted.found.append(guess)
                else:
                    wanted.is_over = True
            self._step(current)

        for known, _, _ in asked:
            known.is_fed = True
        self._forward(tuple(slices), ids, on_done)

    def _failed(self, error: ExoError) -> None:
        logger.warning("%s guesses nothing for a while: %s", self._shard, error.message)
        self._not_before = self._loop.time() + REST_S

    def _end_round(self, current: _Round) -> None:
        if current.steps:
            took = (self._loop.time() - current.begun) / current.steps
            self._guess_s += (0.2 if self._guess_s else 1.0) * (took - self._guess_s)
        self._round = None
        self._hand_out(current.members)
        self.go_on(current.count)

    def _give_up(self) -> None:
        """The engine has better things to do, or none: who waits goes on without."""
        if self._round is not None:
            logger.info("%s: guesses took longer than %.0f s", self._shard, PATIENCE_S)
            self._hand_out([*self._round.members, *self._waiting])
            self._waiting = []

    def _hand_out(self, members: list[Guessed]) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        handed = False
        for known in members:
            wanted, known.wanted = known.wanted, None
            if wanted is not None:
                wanted.take(wanted.found if len(known.tokens) == wanted.tokens else [])
                handed = True
        if handed and not self._closed:
            self._on_guessed()
