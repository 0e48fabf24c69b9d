"""One request's tokens while the head generates them."""

from __future__ import annotations

import asyncio
from functools import cached_property

import numpy as np
import numpy.typing as npt

from exo.errors import ExoError, Stalled
from exo.inference.batch import Slice
from exo.inference.constrained import MAX_FORCED
from exo.inference.sampling import SampledToken
from exo.networking.calls.messages import GenerationEvent, GenerationRequest
from exo.orchestration.serving.drafts.prompt_lookup import PromptLookup
from exo.orchestration.serving.prefixes import common

MAX_UNREAD = 4096

MAX_CACHE_MISSES = 3
"""One after the other, with no token between them."""


class Sequence:
    """`tokens` is the prompt and what was generated; the first `scheduled` of them have been sent
    through the ring, `in_flight` steps of them have not come back. `attempt` counts the times it
    began; the lower its `rank`, the earlier it came. `cached`: tokens of the prompt that others had
    computed. `moments`: after how many of its tokens members keep their state; None before that is
    decided.
    """

    def __init__(self, request: GenerationRequest, rank: int = 0) -> None:
        self.request = request
        self.rank = rank
        self.tokens: list[int] = [*request.prompt, *request.generated]
        self.scheduled = 0
        self.in_flight = 0
        self.attempt = 0
        self.cached = 0
        self.moments: tuple[int, ...] | None = None
        self.cache_misses = 0
        self.done = False
        self.failed = False
        self.awaits_guess = False
        """A small model is at work on what may come next."""
        self.guess: list[int] = []
        """What it thinks comes after `tokens`."""
        self._shared: dict[str, int] = {}
        self._pooled: npt.NDArray[np.float32] | None = None
        self._events: asyncio.Queue[GenerationEvent | ExoError] = asyncio.Queue()

    @property
    def id(self) -> str:
        return self.request.sequence_id

    @property
    def can_decode(self) -> bool:
        """A token sampled last is left to compute, with those that a constraint had follow it."""
        waits = self.in_flight or self.awaits_guess
        return self.is_decoding and not waits and self.left > 0

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed, or on its way."""
        if self.done or self.left <= 1:
            return not self.done
        return self.scheduled >= len(self.request.prompt) and self.left <= 1 + MAX_FORCED

    @property
    def can_prefill(self) -> bool:
        """More is left; chunks may follow each other without waiting for results."""
        return not self.done and not self.is_decoding

    @property
    def has_begun(self) -> bool:
        return self.scheduled > 0

    @property
    def left(self) -> int:
        """Tokens that no step has had yet."""
        return len(self.tokens) - self.scheduled

    @property
    def may_reuse(self) -> bool:
        """Pooling needs what is computed of every token."""
        return self.request.shortcuts and not self.request.sampling.pooling

    @property
    def may_draft(self) -> bool:
        return self.request.shortcuts and self.request.sampling.constraint is None

    @property
    def max_tokens_left(self) -> int:
        """To be generated."""
        return self.request.max_tokens - (len(self.tokens) - len(self.request.prompt))

    @cached_property
    def lookup(self) -> PromptLookup:
        return PromptLookup(self.tokens)

    def next_slice(
        self, length: int, takes_over: str = "", drafts: int = 0, *, moves: bool = False
    ) -> Slice:
        """The next `length` of its tokens, and `drafts` guesses after them."""
        start, end = self.scheduled, self.scheduled + length
        keeps = not drafts and end in (self.moments or ())
        asks = end == len(self.tokens) or self.request.sampling.pooling
        return Slice(
            self.id,
            start,
            length + drafts,
            self.request.sampling if asks else None,
            len(self.request.prompt),
            takes_over,
            drafts,
            moves,
            keeps,
        )

    def begin_again(self) -> None:
        """Forget what was computed; what is still in flight belongs to an earlier attempt."""
        self.scheduled = self.in_flight = 0
        self.awaits_guess, self.guess = False, []
        self._pooled = None
        self.attempt += 1

    def add(self, sampled: list[SampledToken]) -> list[GenerationEvent]:
        """Take the tokens of a step, all but the last of which are drafts that it has computed
        already. Ends the sequence on an end token or at its length. Whoever reads the events is to
        be told those returned."""
        if self.request.sampling.pooling:
            return self._pool(sampled[0])
        self.cache_misses = 0
        events: list[GenerationEvent] = []
        for number, each in enumerate(sampled):
            for token in (each, *(SampledToken(i, sequence_id=self.id) for i in each.forced)):
                events.append(self._add(token))
                if self.done:
                    return events
            if number < len(sampled) - 1:
                self.scheduled += 1
        return events

    def _add(self, token: SampledToken) -> GenerationEvent:
        generated = len(self.tokens) - len(self.request.prompt)
        cached = 0 if generated else self.cached
        if token.token_id in self.request.eos_token_ids:
            self.done = True
            return GenerationEvent(None, "stop", cached)
        self.tokens.append(token.token_id)
        self.done = generated + 1 >= self.request.max_tokens
        return GenerationEvent(token, "length" if self.done else "", cached)

    def _pool(self, sampled: SampledToken) -> list[GenerationEvent]:
        """Take the final states of another chunk of the prompt; with the last one all are here."""
        states = np.frombuffer(sampled.vector, "<f4")
        how = self.request.sampling.pooling
        if self._pooled is None or how == "last":
            self._pooled = states
        else:
            self._pooled = self._pooled + states
        if self.in_flight or self.left:
            return []
        self.done = True
        pooled = self._pooled / len(self.tokens) if how == "mean" else self._pooled
        return [GenerationEvent(SampledToken(0, vector=pooled.tobytes()), finish_reason="stop")]

    def shares_with(self, other: Sequence) -> int:
        """Tokens at the beginning of both prompts that are the same; at least one is left."""
        if other.id not in self._shared:
            limit = min(len(self.request.prompt) - 1, len(other.request.prompt))
            self._shared[other.id] = common(self.request.prompt, other.request.prompt, limit)
        return self._shared[other.id]

    def take_guess(self, guess: list[int]) -> None:
        """What may come after its tokens, if it still waits for that."""
        if self.awaits_guess:
            self.awaits_guess, self.guess = False, guess

    def fail(self) -> None:
        self.done = self.failed = True

    def tell(self, event: GenerationEvent | ExoError) -> None:
        """Wake whoever waits for the next event. Who does not read is given up: what is said to
        nobody takes memory, and time from others."""
        if self._events.qsize() >= MAX_UNREAD and not self.failed:
            self.fail()
            event = Stalled(f"{MAX_UNREAD} tokens of the answer were not read; it was given up")
        self._events.put_nowait(event)

    async def next_event(self) -> GenerationEvent:
        """Raises the error the sequence failed with."""
        event = await self._events.get()
        if isinstance(event, ExoError):
            raise event
        return event


def by_rank(sequence: Sequence) -> int:
    return sequence.rank
