"""What crosses from one layer to the next, and how it becomes one row a token for the wire."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import mlx.core as mx
from mlx_lm.models.kimi_k3 import ResidualBlocks

from exo.errors import InvalidFrame


@dataclass(frozen=True)
class PerToken:
    """An array with one entry a token: its shape, where the tokens are, and the dtype this node
    computes in."""

    shape: tuple[int, ...]
    axis: int
    dtype: mx.Dtype

    @property
    def features(self) -> int:
        return prod(self.shape) // self.shape[self.axis]

    def to_rows(self, array: mx.array) -> mx.array:
        return mx.moveaxis(array, self.axis, 0).reshape(array.shape[self.axis], -1)

    def from_rows(self, rows: mx.array) -> mx.array:
        others = [size for axis, size in enumerate(self.shape) if axis != self.axis]
        return mx.moveaxis(rows.reshape(-1, *others), 0, self.axis).astype(self.dtype)

    @property
    def has_batch_axis(self) -> bool:
        """Whether the axis before that of the tokens counts sequences."""
        return self.axis > 0 and self.shape[self.axis - 1] == 1

    def to_one_of_each(self, array: mx.array) -> mx.array:
        """Of one token each of several sequences, [sequences, features]."""
        return mx.moveaxis(array, self.axis - 1, 0).reshape(array.shape[self.axis - 1], -1)

    def from_one_of_each(self, rows: mx.array) -> mx.array:
        """Rows that are one token each of as many sequences."""
        others = [1 if axis == self.axis else size for axis, size in enumerate(self.shape)]
        del others[self.axis - 1]
        array = rows.reshape(-1, *others).astype(self.dtype)
        return mx.moveaxis(array, 0, self.axis - 1)


@dataclass(frozen=True)
class Residuals:
    """The template of Kimi K3's residual blocks: the hidden states that its layers mix, more of
    them after each block of layers, [blocks, 1, tokens, hidden]."""

    part: PerToken
    eps: float

    def fill(self, states: mx.array) -> ResidualBlocks:
        blocks = ResidualBlocks(self.eps)
        for block in states:
            blocks.append(block)
        return blocks


@dataclass(frozen=True)
class Boundary:
    """What crosses from one layer to the next: a template of what the layer returns, with a
    PerToken for each array that travels. Other shards get one row of features a token; what does
    not travel (a layer's own keys, an offset) they see as None."""

    template: Any

    @property
    def parts(self) -> list[PerToken]:
        return list(leaves_of(self.template, PerToken))

    @property
    def features(self) -> int:
        return sum(part.features for part in self.parts)

    @property
    def has_batch_axis(self) -> bool:
        """Whether several sequences may pass it at once, a token of each."""
        return all(part.has_batch_axis for part in self.parts)

    def pack(self, returned: Any, *, one_of_each: bool = False) -> mx.array:
        """What a layer returned, as [tokens, features]. `one_of_each`: each token is of another
        sequence."""
        pairs = zip(flat(self.template), flat(returned), strict=True)
        rows = [
            part.to_one_of_each(array) if one_of_each else part.to_rows(array)
            for part, array in pairs
            if isinstance(part, PerToken)
        ]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    def unpack(self, rows: mx.array, *, one_of_each: bool = False) -> Any:
        """[tokens, features] as what the layer returned; raises InvalidFrame for another width."""
        if rows.ndim != 2 or rows.shape[1] != self.features:
            raise InvalidFrame(
                f"hidden states have shape {list(rows.shape)}, expected [tokens, {self.features}]"
            )
        ends = [*accumulate(part.features for part in self.parts)]
        columns = iter(zip([0, *ends], ends, strict=False))

        def fill(node: Any) -> Any:
            if isinstance(node, (list, tuple)):
                return type(node)(fill(item) for item in node)
            if isinstance(node, Residuals):
                return node.fill(fill(node.part))
            if isinstance(node, PerToken):
                start, end = next(columns)
                mine = rows[:, start:end]
                return node.from_one_of_each(mine) if one_of_each else node.from_rows(mine)
            return None

        return fill(self.template)


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, ResidualBlocks):
        yield value.raw
    elif isinstance(value, Residuals):
        yield value.part
    else:
        yield value


def as_it_is(value: Any) -> Any:
    """The value as it is now: what layers add to is copied."""
    if isinstance(value, (list, tuple)):
        return tuple(as_it_is(item) for item in value)
    return copy(value) if isinstance(value, ResidualBlocks) else value


def leaves_of(value: Any, kind: type) -> Iterator[Any]:
    return (leaf for leaf in flat(value) if isinstance(leaf, kind))
