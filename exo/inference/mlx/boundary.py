"""What crosses from one layer to the next, and how it becomes one row a token for the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import mlx.core as mx

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
        """Whether the first axis counts sequences."""
        return self.axis > 0 and self.shape[0] == 1

    def from_one_of_each(self, rows: mx.array) -> mx.array:
        """Rows that are one token each of as many sequences."""
        shape = [1 if axis == self.axis else size for axis, size in enumerate(self.shape)][1:]
        return rows.reshape(-1, *shape).astype(self.dtype)


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
            array.reshape(array.shape[0], -1) if one_of_each else part.to_rows(array)
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
    else:
        yield value


def leaves_of(value: Any, kind: type) -> Iterator[Any]:
    return (leaf for leaf in flat(value) if isinstance(leaf, kind))
