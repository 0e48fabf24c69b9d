"""Who holds what of the ring's KV cache, what is kept of those who have ended, what goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from exo.inference.batch import PAGE_TOKENS, CacheRoom
from exo.networking.calls.serving_report import CacheUse
from exo.orchestration.serving.ledger import Ledger, pages_for
from exo.orchestration.serving.prefixes import MIN_SHARED, Prefixes

KEPT_S = 3600.0
"""What nobody has come back to for so long is given back to the system."""

KEPT_SHARE = 0.25
"""Of all pages, those of sequences that have ended: memory that is asked for by others who use the
machine as well."""


class KVMemory:
    """The caches of sequences that run, and of those that have ended and whose beginnings may be
    asked for again: a chat's next turn, another answer, the same system prompt. Least recently used
    goes first when pages are needed.

    `release` is given sequences that the engines are to forget, before the step in which their
    pages are used by others.
    """

    def __init__(self, release: Callable[[tuple[str, ...]], None]) -> None:
        self.ledger = Ledger()
        self._release = release
        self._prefixes = Prefixes()
        self._kept: dict[str, float] = {}  # when it was last used, oldest first
        self._sources: set[str] = set()  # of what is now put together into a step
        self._whole_only = False

    def learn(self, rooms: Sequence[CacheRoom]) -> None:
        self.ledger.learn(rooms)

    def use(self, running: Iterable[str]) -> CacheUse:
        ledger = self.ledger
        kept = ledger.used - ledger.held_by(running)
        return CacheUse(ledger.capacity or 0, ledger.used, kept, ledger.shared)

    def can_ever_hold(self, tokens: int) -> bool:
        told = self.ledger.told
        return told is None or pages_for(tokens) + self.ledger.state_pages <= told

    def fits(self, sequence_id: str, tokens: Sequence[int], running: Sequence[str]) -> bool:
        """Whether these tokens, and a page more for everyone who runs, would find room beside those
        who run: what is kept counts as free."""
        ledger = self.ledger
        wanted = pages_for(len(tokens) + 1) + len(running) + ledger.state_pages
        if ledger.capacity is None:
            return False  # the members are being asked
        if ledger.has(wanted):
            return True
        source, shared = self.source_of(sequence_id, tokens)
        if ledger.is_paged and source in running:
            wanted -= shared // PAGE_TOKENS
        return ledger.held_by(running) + wanted <= ledger.capacity

    def source_of(self, sequence_id: str, tokens: Sequence[int]) -> tuple[str, int]:
        """Whose beginning a new sequence is to take over, and how many tokens of it; ("", 0)."""
        whole_only = self._whole_only or self.keeps_moments
        return self._prefixes.longest(tokens, not_of=sequence_id, whole_only=whole_only)

    @property
    def keeps_moments(self) -> bool:
        """Whether a sequence can go on from moments alone that members were asked to keep."""
        return self.ledger.state_pages > 0

    def shared_pages(self, sequence_id: str, tokens: Sequence[int]) -> int:
        """Whole pages that `tokens` begin with, and some other sequence too."""
        return self._prefixes.longest(tokens, not_of=sequence_id)[1] // PAGE_TOKENS

    def holds(self, sequence_id: str) -> int:
        """Tokens of it that others may take over."""
        return self._prefixes.holds(sequence_id)

    def reserve(
        self, sequence_id: str, start: int, length: int, source: str = "", *, keeps: bool = False
    ) -> bool:
        """Make room for tokens [start, start + length), and with `keeps` for the state after them,
        at the cost of what is kept; False, and nothing changed but that, if there is none."""
        moves = self.is_superseded(source, start)
        while not self.ledger.has(
            self.ledger.needs(sequence_id, start, length, source, moves=moves, keeps=keeps)
        ):
            victim = next((k for k in self._kept if k != source and k not in self._sources), None)
            if victim is None:
                return False
            self.drop(victim)
        self.ledger.extend(sequence_id, start, length, source, moves=moves, keeps=keeps)
        if source:
            self._sources.add(source)
            if moves:
                self._prefixes.forget(source)  # nobody else finds it any more
            elif source in self._kept:
                self._touch(source)
        return True

    def step_is_sent(self) -> None:
        """The sources in it are taken over."""
        self._sources.clear()

    def computed(
        self, sequence_id: str, tokens: Sequence[int], count: int, *, keeps: bool = False
    ) -> None:
        """By the time of any later step the first `count` tokens are in the cache, and with `keeps`
        the state after them."""
        self._prefixes.grow(sequence_id, tokens, count, keeps=keeps)

    def keep(self, sequence_id: str) -> None:
        """Its sequence has ended; somebody may come back to it."""
        if self.holds(sequence_id) < MIN_SHARED:
            self.drop(sequence_id)
            return
        self._touch(sequence_id)
        most = KEPT_SHARE * (self.ledger.capacity or 0)
        while self._kept and sum(map(self.ledger.pages_of, self._kept)) > most:
            self.drop(next(iter(self._kept)))

    def is_superseded(self, source: str, taken: int) -> bool:
        """Whether there is no more use for a sequence of which another one takes over so much.
        There is where nothing can be cut back: the question may be asked in other words. But where
        pages are not shared, a long chat would be there twice."""
        if self.keeps_moments and self.ledger.is_paged:
            return False
        return source in self._kept and source not in self._sources and taken == self.holds(source)

    def supersede(self, source: str) -> None:
        if source in self._kept:
            self.drop(source)

    def distrust(self, sequence_id: str, *, cannot_cut: bool = False) -> None:
        """A member does not hold what it should of a sequence, or could not cut it back."""
        self._whole_only = self._whole_only or cannot_cut
        self._prefixes.forget(sequence_id)
        if sequence_id in self._kept:
            self.drop(sequence_id)

    def drop(self, sequence_id: str) -> None:
        """The engines forget it."""
        self._prefixes.forget(sequence_id)
        self._kept.pop(sequence_id, None)
        self.ledger.release(sequence_id)
        self._release((sequence_id,))

    def drop_old(self) -> float | None:
        """Forget what nobody has come back to for long. Seconds until there is more; None if
        nothing is kept."""
        now = asyncio.get_running_loop().time()
        for sequence_id in [k for k, used in self._kept.items() if now - used >= KEPT_S]:
            self.drop(sequence_id)
        oldest = next(iter(self._kept.values()), None)
        return None if oldest is None else max(1.0, oldest + KEPT_S - now)

    def _touch(self, sequence_id: str) -> None:
        self._kept.pop(sequence_id, None)
        self._kept[sequence_id] = asyncio.get_running_loop().time()
