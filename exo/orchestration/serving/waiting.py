"""Sequences that wait for a place, and whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from exo.errors import Overloaded
from exo.orchestration.serving.sequence import Sequence


class WaitingLine:
    """First come, first served, between clients in turns: whoever has the least running is next,
    so that the hundred requests of one do not stand before the only one of another."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def add(self, sequence: Sequence, held: int) -> Sequence | None:
        """Take a new one; `held` are running. In a full house who has most waiting gives way to
        who has less: the one returned is to be turned away.

        Raises:
            Overloaded: the house is full.
        """
        displaced = None
        if len(self._waiting) + held >= self._limit:
            by_client = Counter(other.request.client for other in self)
            largest, most = max(by_client.items(), key=lambda item: item[1], default=("", 0))
            if by_client[sequence.request.client] + 1 >= most:
                raise full(self._limit)
            displaced = [other for other in self if other.request.client == largest][-1]
            self.remove(displaced)
        self._waiting[sequence.id] = sequence
        return displaced

    def put_back(self, sequence: Sequence) -> None:
        """One that had to give back its place; it keeps its rank."""
        self._waiting[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.id, None)

    def next(self, running: Iterable[Sequence]) -> Sequence | None:
        """Whose turn it is; it stays in line."""
        if not self._waiting:
            return None
        by_client = Counter(other.request.client for other in running)
        return min(self, key=lambda one: (by_client[one.request.client], one.rank))


def full(limit: int) -> Overloaded:
    return Overloaded(f"{limit} requests are running or waiting for this model already")
