"""Where a model may be cut: found by watching its layers in two lazy forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.kimi_k3 import ResidualBlocks

from exo.inference.mlx import caches as kv
from exo.inference.mlx.boundary import Boundary, PerToken, Residuals, flat, leaves_of

TRACE_TOKENS = (5, 7)
"""Tokens of the two traced steps; sizes that no other axis of a model has by chance."""


@dataclass(frozen=True)
class Call:
    """One layer's call in a traced forward pass."""

    index: int
    arguments: tuple[Any, ...]
    returned: Any


def boundaries_of(first: list[Call], second: list[Call]) -> list[Boundary]:
    """The boundary after each layer, from the calls of the two traced steps."""
    return [Boundary(_template(a.returned, b.returned)) for a, b in zip(first, second, strict=True)]


def _template(first: Any, second: Any) -> Any:
    """What a layer returned in both traces, with a PerToken where an array has an axis that grew
    with the tokens of the step (and not with those before, as its keys do), else None."""
    if isinstance(first, (list, tuple)):
        return tuple(_template(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, ResidualBlocks):
        part = _template(first.raw, second.raw)
        return Residuals(part, first.eps) if part is not None else None
    if isinstance(first, mx.array) and isinstance(second, mx.array):
        for axis, sizes in enumerate(zip(first.shape, second.shape, strict=True)):
            if sizes == TRACE_TOKENS:
                return PerToken(tuple(first.shape), axis, first.dtype)
    return None


def crossings(calls: list[Call], boundaries: list[Boundary]) -> dict[int, str]:
    """Cuts that something would have to cross which does not travel, and what it is."""
    refused: dict[int, str] = {}
    first_user: dict[int, int] = {}
    made_by: dict[int, tuple[int, bool]] = {}
    for call, boundary in zip(calls, boundaries, strict=True):
        for value in call.arguments:
            if isinstance(value, dict):
                refused |= dict.fromkeys(range(1, len(calls)), "layers share state in a dictionary")
            for leaf in kv.leaves(value):
                earlier = first_user.setdefault(id(leaf), call.index)
                for cut in range(earlier + 1, call.index + 1):
                    refused[cut] = "layers share a KV cache"
            for array in leaves_of(value, mx.array):
                maker, travels = made_by.get(id(array), (call.index, True))
                for cut in range(maker + (2 if travels else 1), call.index + 1):
                    refused[cut] = "later layers read what earlier ones made"
        if not boundary.parts:
            refused[call.index + 1] = f"layer {call.index} returns nothing per token"
        for part, array in zip(flat(boundary.template), flat(call.returned), strict=True):
            if isinstance(array, mx.array):
                made_by[id(array)] = (call.index, isinstance(part, PerToken))
    return refused


def arrays_of_unknown_origin(calls: list[Call]) -> Iterator[mx.array]:
    """Arrays that reach a later layer and neither reached the first nor were returned by one:
    masks of another kind, or something read out of a KV cache."""
    known = {id(array) for array in leaves_of(calls[0].arguments, mx.array)}
    for previous, call in pairwise(calls):
        known |= {id(array) for array in leaves_of(previous.returned, mx.array)}
        # The first argument is the layer's input, whatever the model does to it in between.
        for array in leaves_of(call.arguments[1:], mx.array):
            if id(array) not in known:
                yield array
