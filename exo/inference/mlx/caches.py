"""mlx-lm's prompt caches as one sequence's KV cache on a shard: advance, truncate, evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import mlx.core as mx


def leaves(value: Any) -> Iterator[Any]:
    """The single caches in a value: inside lists, tuples and CacheLists; nothing else counts."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif hasattr(value, "caches"):
        yield from leaves(value.caches)
    elif hasattr(value, "is_trimmable"):
        yield value


KV_GROUP = 64
"""Values along a head that share a scale where a cache keeps bytes."""


def in_bytes(caches: list[Any]) -> list[Any]:
    """Fresh caches, of which those that grow with every token keep keys and values as bytes, with a
    scale and an offset for each KV_GROUP of them. Windows and states stay what they are."""
    from mlx_lm.models.cache import QuantizedKVCache  # slow to import, see MLXEngine

    found: list[Any] = []
    for cache in caches:
        if hasattr(cache, "caches"):
            cache.caches = tuple(in_bytes(list(cache.caches)))
        found.append(QuantizedKVCache(KV_GROUP, 8) if _grows(cache) else cache)
    return found


def _grows(cache: Any) -> bool:
    """Whether it is mlx-lm's plain cache, of which any number of tokens can be taken back."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache  # slow to import, see MLXEngine

    return type(cache) in (KVCache, QuantizedKVCache)


def advance(cache: Any, tokens: int) -> None:
    """Count `tokens` in the cache of a layer that runs elsewhere.

    Models take masks and positions from the cache of whichever layer they please, so the offset
    of every cache must be right, whoever holds its keys.
    """
    if _grows(cache):
        cache.offset += tokens
    elif hasattr(cache, "update_and_fetch"):
        # One feature wide: any cache type then keeps its own books on offset and window.
        thin = mx.zeros((1, 1, tokens, 1))
        cache.update_and_fetch(thin, thin)
    elif hasattr(cache, "offset"):
        cache.offset += tokens


def advance_together(cache: Any, sequences: int) -> None:
    """Count one token of each sequence in merged caches of a layer that runs elsewhere."""
    if hasattr(cache, "update_and_fetch"):
        thin = mx.zeros((sequences, 1, 1, 1))
        cache.update_and_fetch(thin, thin)


def can_merge(caches: Any) -> bool:
    """Whether mlx-lm can hold such caches of several sequences side by side."""
    return all(hasattr(type(leaf), "merge") for leaf in leaves(caches))


def merged(sequences: list[list[Any]], used: frozenset[int] | None) -> list[Any]:
    """The caches of several sequences side by side, their ends aligned. `used`: leaves in which
    something is kept, None for all; the others only count."""
    return [
        together[0].merge(list(together))
        for together in zip(*(_counting(caches, used) for caches in sequences), strict=True)
    ]


def split(caches: list[Any], index: int) -> list[Any]:
    """One sequence's own caches again."""
    return [_split(cache, index) for cache in caches]


def _split(cache: Any, index: int) -> Any:
    if hasattr(cache, "caches"):
        twin = copy(cache)
        twin.caches = tuple(_split(held, index) for held in cache.caches)
        return twin
    if any(state is None for state in getattr(cache, "cache", ())):
        return type(cache)(len(cache.cache))  # of a layer that runs elsewhere: there is no state
    return cache.extract(index)


def _counting(caches: list[Any], used: frozenset[int] | None) -> list[Any]:
    """With keys one feature wide where `advance` counted without any."""
    from mlx_lm.models.cache import KVCache  # slow to import, see MLXEngine

    for index, leaf in enumerate(leaves(caches)):
        if used is not None and index not in used and type(leaf) is KVCache:
            leaf.keys = leaf.values = mx.zeros((1, 1, leaf.offset, 1))
    return caches


def truncate(caches: Any, tokens: int) -> bool:
    """Forget the last `tokens`; False where a cache cannot (recurrent state, a full window)."""
    found = list(leaves(caches))
    if not all(cache.is_trimmable() for cache in found):
        return False
    for cache in found:
        cache.trim(tokens)
    return True


def moment(caches: Any) -> list[Any]:
    """What cannot be cut back, as it is now; None for each cache that can."""
    return [None if _grows(leaf) else copied(leaf) for leaf in leaves(caches)]


def return_to(caches: Any, kept: list[Any], tokens: int) -> None:
    """To a moment that was kept, `tokens` ago; caches of which nothing was kept are trimmed."""
    for leaf, held in zip(leaves(caches), kept, strict=True):
        if held is None:
            leaf.trim(tokens)
        else:
            vars(leaf).update(vars(copied(held)))


def before_one_more(caches: Any, most_bytes: int) -> list[Any] | None:
    """What another token changes and `trim` cannot take back, for `return_to`: states, and windows
    that are full. None where it is more than `most_bytes`, or a cache is of another kind."""
    from mlx_lm.models.cache import RotatingKVCache  # slow to import, see MLXEngine

    kept: list[Any] = []
    for leaf in leaves(caches):
        if _grows(leaf):
            kept.append(None)
        elif type(leaf) is RotatingKVCache:
            kept.append(None if leaf.offset + 1 < leaf.max_size else copied(leaf))
        elif not hasattr(leaf, "update_and_fetch"):
            kept.append(copied(leaf))
        else:
            return None
    size = sum(array.nbytes for leaf in kept if leaf is not None for array in arrays([leaf]))
    return kept if size <= most_bytes else None


def can_take_one_back(caches: Any) -> bool:
    """Of merged caches: whether each sequence, by itself again, can be without its last token."""
    from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache  # slow, see MLXEngine

    return all(
        type(leaf) is BatchKVCache
        or (type(leaf) is BatchRotatingKVCache and leaf._offset + 1 < leaf.max_size)
        for leaf in leaves(caches)
    )


def state_bytes(caches: Any) -> int:
    """What a moment takes."""
    kept = [leaf for leaf in leaves(caches) if not _grows(leaf)]
    return sum(array.nbytes for array in arrays(kept))


def arrays(caches: Any) -> list[mx.array]:
    """Everything the caches hold, so that it can be evaluated and no graph grows from step to
    step."""
    return [array for cache in leaves(caches) for array in _arrays_in(vars(cache).values())]


def _arrays_in(values: Iterable[Any]) -> Iterator[mx.array]:
    for value in values:
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _arrays_in(value)


def copied(value: Any) -> Any:
    """Caches that go their own way from here. Arrays are shared until one side writes to them."""
    if isinstance(value, mx.array):
        return mx.array(
            value
        )  # a handle of its own: writing to a slice changes what a handle holds
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    if hasattr(value, "caches") or hasattr(value, "is_trimmable"):
        twin = copy(value)
        vars(twin).update({name: copied(held) for name, held in vars(value).items()})
        return twin
    return value
