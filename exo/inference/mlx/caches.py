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


def advance(cache: Any, tokens: int) -> None:
    """Count `tokens` in the cache of a layer that runs elsewhere.

    Models take masks and positions from the cache of whichever layer they please, so the offset
    of every cache must be right, whoever holds its keys.
    """
    from mlx_lm.models.cache import KVCache  # slow to import, see MLXEngine

    if type(cache) is KVCache:
        cache.offset += tokens
    elif hasattr(cache, "update_and_fetch"):
        # One feature wide: any cache type then keeps its own books on offset and window.
        thin = mx.zeros((1, 1, tokens, 1))
        cache.update_and_fetch(thin, thin)
    elif hasattr(cache, "offset"):
        cache.offset += tokens


def truncate(caches: Any, tokens: int) -> bool:
    """Forget the last `tokens`; False where a cache cannot (recurrent state, a full window)."""
    found = list(leaves(caches))
    if not all(cache.is_trimmable() for cache in found):
        return False
    for cache in found:
        cache.trim(tokens)
    return True


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
