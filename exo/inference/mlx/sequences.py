"""The sequences of one live shard: mlx-lm's prompt cache of each, by itself or beside others'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exo.errors import CacheMiss
from exo.inference.batch import PAGE_TOKENS, CacheRoom, Slice
from exo.inference.engine import cache_miss
from exo.inference.mlx import caches as kv
from exo.inference.mlx.together import Company, Together

if TYPE_CHECKING:
    import mlx.core as mx

    from exo.inference.mlx.cut_model import CutModel


MOST_COPIED = 32 * 2**20
"""Bytes of full windows that are copied to be able to take a token back: of a small share of what
a step reads."""

REST_STEPS = 4
"""Steps that a sequence which was foreseen wrong takes one by one."""


@dataclass
class _Ahead:
    """The step after the last one that was asked for: its token, and what comes out of it."""

    token: mx.array
    output: mx.array
    before: list[Any] | None
    """Of caches of its own, what they were without it (`kv.before_one_more`)."""


@dataclass
class _Held:
    """Of one sequence; `caches` are None while they are beside others' in a company. `kept`: what
    cannot be cut back, after so many tokens. `ahead`: the last of its `length` tokens, while nobody
    has asked for it."""

    caches: list[Any] | None
    length: int = 0
    kept: dict[int, list[Any]] = field(default_factory=dict)
    ahead: _Ahead | None = None
    rests: int = 0

    @property
    def asked(self) -> int:
        """Tokens that somebody asked for."""
        return self.length - (self.ahead is not None)


class ShardSequences:
    """`together` is None where the model's class takes one sequence at a time; memory has room for
    `pages` pages of `page_bytes` each."""

    def __init__(
        self, model: CutModel, together: Together | None, pages: int, page_bytes: int
    ) -> None:
        self._model = model
        self._together = together
        self._pages = pages
        self._page_bytes = page_bytes
        self._state_bytes = 0  # of what cannot be cut back, as far as it has been seen
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def at_start(self, part: Slice) -> list[Any]:
        """The sequence's own caches, cut back to the slice's start.

        Raises:
            CacheMiss: they hold less, or cannot be cut back.
        """
        held = self._held.get(part.sequence_id)
        if part.start == 0:
            self.release([part.sequence_id])
            self._held[part.sequence_id] = _Held(self._model.new_caches())
        elif held is None or held.asked < part.start:
            raise cache_miss(part, held.asked if held else 0)
        else:
            self._cut_back(part, held)
        return self._own_caches(part.sequence_id)

    def advance(self, sequence_id: str, length: int) -> None:
        """The sequence has so many tokens now."""
        self._held[sequence_id].length = length

    def arrived(self, part: Slice, token_id: int) -> mx.array | None:
        """What comes out of the slice, where that was begun before it was asked for."""
        held = self._held.get(part.sequence_id)
        if held is None or held.ahead is None:
            return None
        is_next = part.length == part.logits == 1 and held.length == part.end
        if not is_next or held.ahead.token.item() != token_id:
            held.rests = REST_STEPS
            return None
        output = held.ahead.output
        held.ahead = None
        return output

    def moments_before(self, parts: Iterable[Slice]) -> dict[str, list[Any]] | None:
        """For a token more of each of these: what to keep of those that are alone. None where one
        could not be taken back, or was foreseen wrong lately."""
        found: dict[str, list[Any]] = {}
        rested = True
        for part in parts:
            held = self._held[part.sequence_id]
            if held.rests:
                held.rests -= 1
                rested = False
            elif held.caches is not None:
                before = kv.before_one_more(held.caches, MOST_COPIED)
                if before is None:
                    return None
                found[part.sequence_id] = before
            elif not self._company_can_take_back(part.sequence_id):
                return None
        return found if rested else None

    def _company_can_take_back(self, sequence_id: str) -> bool:
        assert self._together is not None
        [company] = self._together.companies_of([sequence_id])
        return kv.can_take_one_back(company.caches)

    def went_ahead(
        self, sequence_id: str, token: mx.array, output: mx.array, before: list[Any] | None
    ) -> None:
        """Its caches hold a token more than was asked for."""
        self._held[sequence_id].ahead = _Ahead(token, output, before)

    def companies(self, parts: Iterable[Slice]) -> list[Company]:
        """Who of a step decodes in one forward pass with whom. Whoever is in a company and has no
        part in the step leaves it."""
        if self._together is None:
            return []
        decoding: dict[str, _Held] = {}
        for part in parts:
            held = self._held.get(part.sequence_id)
            is_next = held is not None and held.length == part.start > 0
            if held is not None and is_next and part.length == part.logits == 1:
                decoding[part.sequence_id] = held
        for sequence_id in self._together.in_company_with(decoding):
            self._own_caches(sequence_id)
        lengths = {one: held.length for one, held in decoding.items()}
        own = {one: held.caches for one, held in decoding.items() if held.caches is not None}
        alone = self._together.arrange(lengths, own)
        for one, held in decoding.items():
            held.caches = alone.get(one)
        return self._together.companies_of(lengths)

    def remember(self, part: Slice) -> None:
        """Of a chunk of a prompt: how much of it cannot be cut back, and that where it is asked."""
        held = self._held[part.sequence_id]
        if held.caches is None or not (part.keeps or part.length > 1):
            return
        self._state_bytes = max(self._state_bytes, kv.state_bytes(held.caches))
        if part.keeps:
            held.kept[part.end] = kv.moment(held.caches)

    def take_over(self, part: Slice) -> None:
        """The slice's sequence begins as the one it takes over. Raises what `at_start` raises."""
        held = self._held.get(part.takes_over)
        if held is None or held.asked < part.start:
            raise cache_miss(part, held.asked if held else 0)
        own = self._own_caches(part.takes_over)
        if part.moves:
            # A copy would be written to at once, and for a moment a long chat be there twice.
            del self._held[part.takes_over]
            taken = held
        else:
            moment = {part.start: held.kept[part.start]} if part.start in held.kept else {}
            taken = _Held(kv.copied(own), held.length, moment, held.ahead)
        self._held[part.sequence_id] = taken
        self._cut_back(part, taken)
        taken.kept = {}  # what is kept of it is asked for anew

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Forget these, as far as they are here."""
        for sequence_id in sequence_ids:
            held = self._held.pop(sequence_id, None)
            if held is not None and held.caches is None:
                assert self._together is not None
                self._together.drop(sequence_id)

    def room(self) -> CacheRoom:
        """Pages that memory has room for, and that are taken."""
        state_pages = -(-self._state_bytes // self._page_bytes)
        taken = sum(
            -(-held.length // PAGE_TOKENS) + (1 + len(held.kept)) * state_pages
            for held in self._held.values()
        )
        return CacheRoom(self._pages, taken, is_paged=False, state_pages=state_pages)

    def _own_caches(self, sequence_id: str) -> list[Any]:
        """A sequence's caches, no longer beside others'."""
        held = self._held[sequence_id]
        if held.caches is None:
            assert self._together is not None
            held.caches = self._together.take(sequence_id)
        return held.caches

    def _cut_back(self, part: Slice, held: _Held) -> None:
        if (ahead := held.ahead) is not None:
            held.ahead = None
            if ahead.before is not None and part.start == held.length - 1:
                kv.return_to(self._own_caches(part.sequence_id), ahead.before, 1)
                held.length = part.start
        if held.length == part.start:
            return
        own = self._own_caches(part.sequence_id)
        held.kept = {length: kept for length, kept in held.kept.items() if length <= part.start}
        if (kept := held.kept.get(part.start)) is not None:
            kv.return_to(own, kept, held.length - part.start)
        elif not kv.truncate(own, held.length - part.start):
            raise CacheMiss(
                f"sequence {part.sequence_id}: a cache of {self._model.model_type} holds "
                f"{held.length} tokens and cannot be cut back to {part.start}"
            )
        held.length = part.start
