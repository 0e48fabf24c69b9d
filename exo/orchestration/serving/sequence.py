"""One request's tokens while the head generates them."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from exo.errors import ExoError
from exo.inference.constrained import MAX_FORCED
from exo.inference.engine import Slice
from exo.inference.sampling import SampledToken
from exo.networking.calls.messages import GenerationEvent, GenerationRequest

MAX_CACHE_MISSES = 3


class Sequence:
    """`tokens` is the prompt and what was generated; `scheduled` of them have been sent through the
    ring, `in_flight` steps of them have not come back. `attempt` counts the times it began."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[int] = list(request.prompt)
        self.scheduled = 0
        self.in_flight = 0
        self.attempt = 0
        self.cache_misses = 0
        self.done = False
        self._pooled: npt.NDArray[np.float32] | None = None
        self._events: asyncio.Queue[GenerationEvent | ExoError] = asyncio.Queue()

    @property
    def id(self) -> str:
        return self.request.sequence_id

    @property
    def can_decode(self) -> bool:
        """A token sampled last is left to compute, with those that a constraint had follow it."""
        return self.is_decoding and not self.in_flight and self._unscheduled > 0

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed, or on its way."""
        if self.done or self._unscheduled <= 1:
            return not self.done
        return self.scheduled >= len(self.request.prompt) and self._unscheduled <= 1 + MAX_FORCED

    @property
    def can_prefill(self) -> bool:
        """More is left; chunks may follow each other without waiting for results."""
        return not self.done and not self.is_decoding

    @property
    def _unscheduled(self) -> int:
        return len(self.tokens) - self.scheduled

    def next_slice(self, chunk: int) -> Slice:
        """The tokens of its next step. Prompts are cut at multiples of `chunk` whatever else
        runs, so a sequence's arithmetic does not depend on its company."""
        start = self.scheduled
        end = min(len(self.tokens), (start // chunk + 1) * chunk)
        asks = end == len(self.tokens) or self.request.sampling.pooling
        return Slice(
            self.id,
            start,
            end - start,
            self.request.sampling if asks else None,
            len(self.request.prompt),
        )

    def begin_again(self) -> None:
        """Forget what was computed; what is still in flight belongs to an earlier attempt."""
        self.scheduled = self.in_flight = 0
        self._pooled = None
        self.attempt += 1

    def add(self, sampled: SampledToken) -> list[GenerationEvent]:
        """Take a sampled token and those it forces; ends the sequence on an end token or at its
        length. Whoever reads the events is to be told those returned."""
        if self.request.sampling.pooling:
            return self._pool(sampled)
        events: list[GenerationEvent] = []
        for token in (sampled, *(SampledToken(i, sequence_id=self.id) for i in sampled.forced)):
            if token.token_id in self.request.eos_token_ids:
                self.done = True
                return [*events, GenerationEvent(finish_reason="stop")]
            self.tokens.append(token.token_id)
            if len(self.tokens) - len(self.request.prompt) >= self.request.max_tokens:
                self.done = True
                return [*events, GenerationEvent(token, finish_reason="length")]
            events.append(GenerationEvent(token))
        return events

    def _pool(self, sampled: SampledToken) -> list[GenerationEvent]:
        """Take the final states of another chunk of the prompt; with the last one all are here."""
        states = np.frombuffer(sampled.vector, "<f4")
        how = self.request.sampling.pooling
        if self._pooled is None or how == "last":
            self._pooled = states
        else:
            self._pooled = self._pooled + states
        if self.in_flight or self._unscheduled:
            return []
        self.done = True
        pooled = self._pooled / len(self.tokens) if how == "mean" else self._pooled
        return [GenerationEvent(SampledToken(0, vector=pooled.tobytes()), finish_reason="stop")]

    def tell(self, event: GenerationEvent | ExoError) -> None:
        """Wake whoever waits for the next event."""
        self._events.put_nowait(event)

    async def next_event(self) -> GenerationEvent:
        """Raises the error the sequence failed with."""
        event = await self._events.get()
        if isinstance(event, ExoError):
            raise event
        return event
