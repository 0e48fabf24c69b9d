"""What each sequence holds of the ring's KV cache, counted in pages as the engines count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count

from exo.inference.batch import PAGE_TOKENS, CacheRoom


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class Ledger:
    """Every member does the same steps in the same order, so one book at the head is true of all of
    them; how many pages there are, `capacity`, is told by the member that has the fewest. Before
    anybody has said it, there is no limit.

    Where a member's cache `is_paged` not, sequences that begin alike hold pages of their own.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.is_paged = False
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
        return len({page for each in sequence_ids for page in self._tables.get(each, ())})

    def pages_of(self, sequence_id: str) -> int:
        return len(self._tables.get(sequence_id, ()))

    @property
    def shared(self) -> int:
        """Pages that several sequences hold."""
        return sum(holders > 1 for holders in self._holders.values())

    def needs(
        self, sequence_id: str, start: int, length: int, source: str = "", *, moves: bool = False
    ) -> int:
        """How many more pages are used once the sequence, or a new one that takes over the first
        `start` tokens of the `source`, has tokens [start, start + length). `moves`: all that the
        source has is the new one's where pages are not shared."""
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
        self, sequence_id: str, start: int, length: int, source: str = "", *, moves: bool = False
    ) -> None:
        """Write down what `needs` counts."""
        if source:
            self.release(sequence_id)
            taken = self._tables[source][: pages_for(start)]
            if self.is_paged:
                self._holders.update(taken)
            elif moves:
                taken = self._tables.pop(source)
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

    def release(self, sequence_id: str) -> None:
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
