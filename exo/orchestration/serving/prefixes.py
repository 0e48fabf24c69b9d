"""Which sequences' KV caches begin like a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from exo.inference.batch import PAGE_TOKENS

MIN_SHARED = 16
"""Fewer tokens are computed sooner than they are taken over."""

_LOOKED_AT = 32
"""Of sequences that share whole pages with a prompt, so many of the latest are compared further."""


class _Held(msgspec.Struct):
    tokens: Sequence[int]
    count: int
    keys: list[int]
    """One for each whole page: a hash of everything up to its end."""
    moments: list[int]
    """Whole pages after which its state is kept."""


class Prefixes:
    """A tree by pages: a node is all tokens up to the end of a page, and knows who holds them."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._holders: dict[int, dict[str, None]] = {}
        self._keepers: dict[int, dict[str, None]] = {}  # of a state after such a page

    def holds(self, sequence_id: str) -> int:
        """Tokens of it that others may take over."""
        held = self._held.get(sequence_id)
        return held.count if held else 0

    def grow(
        self, sequence_id: str, tokens: Sequence[int], count: int, *, keeps: bool = False
    ) -> None:
        """The first `count` of its tokens are in the cache, and with `keeps` the state after them.
        `tokens` may grow afterwards."""
        held = self._held.get(sequence_id)
        if held is None:
            held = self._held[sequence_id] = _Held(tokens, 0, [], [])
        held.count = count
        while len(held.keys) < count // PAGE_TOKENS:
            key = _key(held.keys[-1] if held.keys else 0, tokens, len(held.keys))
            held.keys.append(key)
            self._holders.setdefault(key, {})[sequence_id] = None
        if keeps and count % PAGE_TOKENS == 0:
            held.moments.append(count // PAGE_TOKENS)
            self._keepers.setdefault(held.keys[count // PAGE_TOKENS - 1], {})[sequence_id] = None

    def forget(self, sequence_id: str) -> None:
        held = self._held.pop(sequence_id, None)
        if held is None:
            return
        for key in held.keys:
            _leave(self._holders, key, sequence_id)
        for pages in held.moments:
            _leave(self._keepers, held.keys[pages - 1], sequence_id)

    def longest(
        self, tokens: Sequence[int], *, not_of: str, whole_only: bool = False
    ) -> tuple[str, int]:
        """The sequence that shares most of its beginning with `tokens`, and how much: at least one
        token is left to compute. ("", 0) where none shares enough. `whole_only`: only up to a
        moment that is kept, or all that is held, for caches that cannot be cut back."""
        limit = len(tokens) - 1
        best, most = "", MIN_SHARED - 1
        key, pages, holders = 0, 0, [*self._held]
        kept: list[tuple[str, int]] = []
        while (pages + 1) * PAGE_TOKENS <= limit:
            following = _key(key, tokens, pages)
            if following not in self._holders:
                break
            key, pages, holders = following, pages + 1, [*self._holders[following]]
            if keepers := [other for other in self._keepers.get(key, ()) if other != not_of]:
                kept.append((keepers[-1], pages * PAGE_TOKENS))
        for other in holders[-_LOOKED_AT:][::-1]:
            held = self._held[other]
            if other == not_of or (whole_only and held.count > limit):
                continue
            shared = common(tokens, held.tokens, min(limit, held.count))
            if whole_only and shared < held.count:
                continue
            if shared > most:
                best, most = other, shared
        for keeper, shared in kept[:-_LOOKED_AT:-1] if whole_only else ():
            if shared > most and common(tokens, self._held[keeper].tokens, shared) == shared:
                return keeper, shared
        return (best, most) if best else ("", 0)


def _leave(places: dict[int, dict[str, None]], key: int, sequence_id: str) -> None:
    places[key].pop(sequence_id, None)
    if not places[key]:
        del places[key]


def common(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """How many tokens at the beginning are the same, up to `limit`."""
    low = 0
    while low < limit:  # whole pages at the speed of a comparison of lists
        high = min(limit, low + PAGE_TOKENS)
        if one[low:high] != other[low:high]:
            return low + next(i for i in range(high - low) if one[low + i] != other[low + i])
        low = high
    return limit


def _key(before: int, tokens: Sequence[int], page: int) -> int:
    """A hash that two beginnings share by chance at most: what it finds is compared in full."""
    return hash((before, tuple(tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])))
