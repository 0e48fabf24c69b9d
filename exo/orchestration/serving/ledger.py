"""What each sequence holds of the ring's KV cache, counted in pages as the engines count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count

from exo.inference.batch import PAGE_TOKENS, CacheRoom

_NOW = -1


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class Ledger:
    """Every member does the same steps in the same order, so one book at the head is true of all of
    them; how many pages there are, `capacity`, is told by the member that has the fewest. Before
    anybody has said it, there is no limit.

    Where a member's cache `is_paged` not, sequences that begin alike hold pages of their own.
    Where its layers remember a state, each sequence holds `state_pages` for it, and as many for
    each moment that is kept.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.is_paged = False
        self.state_pages = 0
        self._states: dict[str, dict[int, list[int]]] = {}  # _NOW, or after how many tokens
        self._tables: dict[str, list[int]] = {}
        self._holders: Counter[int] = Counter()
        self._pages = count()
        self.told: int | None = None
        """Pages there are, whoever has them now."""
        self._withheld = 0

    def learn(self, rooms: Sequence[CacheRoom]) -> None:
        """What the members say."""
        if rooms:
            self.told = min(room.pages for room in rooms)
            self.capacity = max(0, self.told - self._withheld)
            self._withheld //= 2
            self.is_paged = all(room.is_paged for room in rooms)
            self.state_pages = max(room.state_pages for room in rooms)
            if self.state_pages:
                for early in self._tables.keys() - self._states.keys():  # before this was said
                    self._states[early] = {_NOW: self._lend(self.state_pages)}

    def shrink(self) -> None:
        """A member had less room than the book says. What is withheld comes back as they go on
        saying what they have."""
        capacity = max(0, self.used - self.used // 16 - 1)
        if self.capacity is not None:
            self._withheld = max(self._withheld, self.capacity - capacity)
        self.capacity = capacity

    def trust_again(self) -> bool:
        """Believe at once all that the members said; False if that changes nothing."""
        changes = self.capacity != self.told
        self.capacity, self._withheld = self.told, 0
        return changes

    @property
    def used(self) -> int:
        """Pages that somebody holds, each counted once."""
        return len(self._holders)

    def has(self, pages: int) -> bool:
        """Whether so many are free."""
        return self.capacity is None or self.used + pages <= self.capacity

    def held_by(self, sequence_ids: Iterable[str]) -> int:
        """Pages that these hold together."""
        return len({page for each in sequence_ids for page in self._all_of(each)})

    def pages_of(self, sequence_id: str) -> int:
        return len(self._all_of(sequence_id))

    def _all_of(self, sequence_id: str) -> list[int]:
        states = self._states.get(sequence_id, {}).values()
        return [*self._tables.get(sequence_id, ()), *chain.from_iterable(states)]

    def moments_of(self, sequence_id: str) -> int:
        """How many moments of it are kept."""
        return max(0, len(self._states.get(sequence_id, {})) - 1)

    @property
    def shared(self) -> int:
        """Pages that several sequences hold."""
        return sum(holders > 1 for holders in self._holders.values())

    def needs(
        self,
        sequence_id: str,
        start: int,
        length: int,
        source: str = "",
        *,
        moves: bool = False,
        keeps: bool = False,
    ) -> int:
        """How many more pages are used once the sequence, or a new one that takes over the first
        `start` tokens of the `source`, has tokens [start, start + length). `moves`: all that the
        source has is the new one's where pages are not shared. `keeps`: the state after these
        tokens stays."""
        states = self._states.get(sequence_id, {})
        new_states = (not states or bool(source)) + (keeps and start + length not in states)
        return new_states * self.state_pages + self._token_pages(
            sequence_id, start, length, source, moves=moves
        )

    def _token_pages(
        self, sequence_id: str, start: int, length: int, source: str, *, moves: bool
    ) -> int:
        kept = pages_for(start)
        new = pages_for(start + length) - kept
        if source:
            if not self.is_paged:
                return new if moves else new + kept
            return new + (1 if start % PAGE_TOKENS else 0)
        table = self._tables.get(sequence_id, [])
        freed = sum(self._holders[page] == 1 for page in table[kept:])
        copies = start % PAGE_TOKENS != 0 and self._holders[table[kept - 1]] > 1
        return new + copies - freed

    def extend(
        self,
        sequence_id: str,
        start: int,
        length: int,
        source: str = "",
        *,
        moves: bool = False,
        keeps: bool = False,
    ) -> None:
        """Write down what `needs` counts."""
        if source:
            self.release(sequence_id)
            taken = self._tables[source][: pages_for(start)]
            if self.is_paged:
                self._holders.update(taken)
            elif moves:
                taken = self._tables.pop(source)
                self.release(source)  # what is left: its states
            else:
                taken = self._lend(len(taken))
            self._tables[sequence_id] = taken
        table = self._tables.setdefault(sequence_id, [])
        kept = pages_for(start)
        self._give_back(table, kept)
        if start % PAGE_TOKENS and self._holders[table[-1]] > 1:
            self._give_back(table, kept - 1)
            table += self._lend(1)
        table += self._lend(pages_for(start + length) - len(table))
        if self.state_pages:
            self._remember(sequence_id, start, start + length if keeps else None)

    def _remember(self, sequence_id: str, start: int, kept: int | None) -> None:
        """Its state now, after `kept` tokens too; those after more than `start` are gone."""
        states = self._states.setdefault(sequence_id, {})
        for later in [moment for moment in states if moment > start]:
            self._give_back(states.pop(later), 0)
        for moment in [_NOW] if kept is None else [_NOW, kept]:
            if moment not in states:
                states[moment] = self._lend(self.state_pages)

    def release(self, sequence_id: str) -> None:
        for state in self._states.pop(sequence_id, {}).values():
            self._give_back(state, 0)
        self._give_back(self._tables.pop(sequence_id, []), 0)

    def _lend(self, pages: int) -> list[int]:
        lent = [next(self._pages) for _ in range(pages)]
        self._holders.update(lent)
        return lent

    def _give_back(self, table: list[int], keep: int) -> None:
        for page in table[keep:]:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
        del table[keep:]
