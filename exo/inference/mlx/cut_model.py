"""Any mlx-lm model, cut at layer boundaries, without a copy of its code.

The model keeps its own class, its whole list of layers and its own forward pass; only the class of
each layer object is replaced by a subclass whose call asks `Cut` what to do:

- a layer of an earlier shard returns what that shard's last layer returned over there;
- a layer of this shard runs;
- the last layer of this shard leaves the forward pass with what it returned, by an exception.

MLX is lazy, so what the forward pass builds around this (the embedding on a later shard, the masks)
costs nothing unless this shard's layers reach it, and a tensor is read from the file only when a
result needs it. `n_layers` layers are built and only the shard's are ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from exo.errors import InvalidFrame, ModelUnsupported
from exo.inference.mlx import caches as kv

_TRACE_TOKENS = 3


class _Left(Exception):
    """Carries what the shard's last layer returned out of the model's forward pass."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned


@dataclass(frozen=True)
class Boundary:
    """What one layer returns: a template with the trailing shape of each array, and the sum of
    their sizes. Other shards get it as one row of features per token."""

    template: Any
    features: int

    def pack(self, returned: Any) -> mx.array:
        """What a layer returned, as [tokens, features]."""
        parts = [a.reshape(a.shape[1], -1) for _, a in tree_flatten(returned)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def unpack(self, rows: mx.array) -> Any:
        """[tokens, features] as what the layer returned; raises InvalidFrame for another width."""
        if rows.ndim != 2 or rows.shape[1] != self.features:
            raise InvalidFrame(
                f"hidden states have shape {list(rows.shape)}, expected [tokens, {self.features}]"
            )
        taken = 0

        def take(shape: _Trailing) -> mx.array:
            nonlocal taken
            part = rows[:, taken : taken + shape.size]
            taken += shape.size
            return part.reshape(1, rows.shape[0], *shape.dims).astype(shape.dtype)

        return tree_map(take, self.template, is_leaf=lambda leaf: isinstance(leaf, _Trailing))


@dataclass(frozen=True)
class _Trailing:
    """An array's shape after [1, tokens], and the dtype this node computes in."""

    dims: tuple[int, ...]
    dtype: mx.Dtype

    @classmethod
    def of(cls, array: mx.array) -> _Trailing:
        return cls(tuple(array.shape[2:]), array.dtype)

    @property
    def size(self) -> int:
        return int(np.prod(self.dims))


class Cut:
    """What the layers of one model do in the forward pass now running."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.start = 0
        self.end = n_layers
        self.received: Any = None
        self.keep_last = 0
        self.used_caches: set[int] = set()
        self.trace: list[_Call] | None = None

    def run_layer(
        self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.trace is not None:
            returned = call(*args, **kwargs)
            self.trace.append(_Call(index, (*args, *kwargs.values()), returned))
            return returned
        if index < self.start:
            return self.received
        for value in (*args, *kwargs.values()):
            if kv.is_cache(value):
                self.used_caches.update(map(id, kv.leaves(value)))
        returned = call(*args, **kwargs)
        if index + 1 < self.end:
            return returned
        if self.end < self.n_layers or not self.keep_last:
            raise _Left(returned)
        return _last_tokens(returned, self.keep_last)


@dataclass(frozen=True)
class _Call:
    index: int
    arguments: tuple[Any, ...]
    returned: Any


def _last_tokens(returned: Any, count: int) -> Any:
    """Only the last `count` tokens go on to the final norm and the head."""
    if isinstance(returned, mx.array) and returned.ndim == 3:
        return returned[:, -count:]
    return returned


@cache
def _cut_class(layer_class: type) -> type:
    """A subclass that asks the Cut; everything else about the layer stays as it is, so code that
    looks into it (`layer.self_attn`, `layer.use_sliding`) finds what it expects."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(cut_class, self).__call__
        return self._exo_cut.run_layer(self._exo_index, run, args, kwargs)

    cut_class = type(layer_class.__name__, (layer_class,), {"__call__": call})
    return cut_class


class CutModel:
    """A checkpoint whose layers run by range. Nothing is read before `load_layers`.

    Raises:
        ModelUnsupported: mlx-lm has no class for it, or the class cannot be built or traced.
    """

    def __init__(self, path: Path, dtype: mx.Dtype | None) -> None:
        self._path = path
        self._dtype = dtype
        self.model, self.config = self.build()
        found = getattr(self.model, "layers", None)
        if not found:
            raise ModelUnsupported(f"{self.model_type}: mlx-lm's class shows no list of layers")
        self.layers: list[nn.Module] = list(found)
        self.n_layers = len(self.layers)
        self._cut = Cut(self.n_layers)
        for index, layer in enumerate(self.layers):
            layer.__class__ = _cut_class(type(layer))
            object.__setattr__(layer, "_exo_cut", self._cut)
            object.__setattr__(layer, "_exo_index", index)
        self.boundaries, self.cuts, self.uncuttable = self._trace()

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model with every parameter still lazy: names and shapes, no data."""
        try:
            # trust_remote_code stays False: a checkpoint never brings code.
            model, config = load_model(self._path, lazy=True)
        except (ValueError, TypeError, KeyError, AttributeError, FileNotFoundError) as error:
            raise ModelUnsupported(
                f"mlx-lm cannot build the model in {self._path}: {type(error).__name__}: {error}"
            ) from error
        if self._dtype is not None:
            model.set_dtype(self._dtype)
        return model, config

    def new_caches(self) -> list[Any]:
        return list(make_prompt_cache(self.model))

    def forward(
        self,
        start: int,
        end: int,
        token_ids: mx.array,
        rows: mx.array | None,
        caches: list[Any],
        *,
        want_logits: bool,
    ) -> mx.array | None:
        """Run layers [start, end) over one sequence's tokens, lazily.

        token_ids: int32 [tokens]. rows: what the shard before sent, [tokens, features], None on
        the first shard. Returns [tokens, features], on the last shard logits [vocabulary] of the
        last token, or None there if they are not wanted. `caches` advance by the tokens.
        """
        cut = self._cut
        cut.start, cut.end = start, end
        cut.received = self.boundaries[start - 1].unpack(rows) if rows is not None else None
        cut.keep_last = 1 if want_logits else 0
        cut.used_caches = set()
        try:
            logits = self.model(token_ids[None], cache=caches)
            result: mx.array | None = logits[0, -1]
        except _Left as left:
            result = self.boundaries[end - 1].pack(left.returned) if end < self.n_layers else None
        finally:
            cut.received = None
        for cache_leaf in kv.leaves(caches):
            if id(cache_leaf) not in cut.used_caches:
                kv.advance(cache_leaf, token_ids.size)
        return result

    def _trace(self) -> tuple[list[Boundary], frozenset[int] | None, str]:
        """Run the whole model on a few tokens, lazily, and watch what passes between layers.

        Returns the boundary after each layer, where the model may be cut (None: everywhere), and
        why not elsewhere.
        """
        self._cut.trace = calls = []
        token_ids = mx.zeros((1, _TRACE_TOKENS), mx.int32)
        try:
            self.model(token_ids, cache=self.new_caches())
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ModelUnsupported(
                f"{self.model_type}: mlx-lm's forward pass fails: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._cut.trace = None
        order = [call.index for call in calls]
        if order != list(range(self.n_layers)):
            why = "runs its layers more than once, in another order, or not as a whole"
            return [], frozenset(), why
        boundaries = []
        refused: dict[int, str] = {}
        for call in calls:
            boundary = _boundary(call.returned)
            if boundary is None:
                refused[call.index + 1] = f"layer {call.index} returns more than values per token"
            boundaries.append(boundary or Boundary(None, 0))
        refused |= _crossings(calls)
        refused.pop(self.n_layers, None)
        if not refused:
            return boundaries, None, ""
        allowed = frozenset(range(1, self.n_layers)) - refused.keys()
        return boundaries, allowed, "; ".join(sorted(set(refused.values())))

    def parameter_bytes(self, index: int) -> int:
        return sum(a.nbytes for _, a in tree_flatten(self.layers[index].parameters()))

    def drop_layers(self, indices: set[int]) -> None:
        """Give back the memory of layers, by putting fresh lazy parameters in their place."""
        fresh, _ = self.build()
        for index in indices:
            self.layers[index].update(fresh.layers[index].parameters())

    def outer_modules(self) -> list[nn.Module]:
        """The modules that belong to no layer: embedding, norms, head."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        return [module for module in self.model.modules() if id(module) not in inside]


def _boundary(returned: Any) -> Boundary | None:
    """The boundary if every array is [1, tokens, ...], else None."""
    found = [a for _, a in tree_flatten(returned)]
    if not found or not all(
        isinstance(a, mx.array) and a.ndim >= 3 and a.shape[:2] == (1, _TRACE_TOKENS) for a in found
    ):
        return None
    return Boundary(tree_map(_Trailing.of, returned), sum(_Trailing.of(a).size for a in found))


def _crossings(calls: list[_Call]) -> dict[int, str]:
    """Cuts that something other than the last layer's result would have to cross."""
    refused: dict[int, str] = {}
    first_user: dict[int, int] = {}
    made_by: dict[int, int] = {}
    for call in calls:
        for value in call.arguments:
            if kv.is_cache(value):
                for leaf in kv.leaves(value):
                    earlier = first_user.setdefault(id(leaf), call.index)
                    for cut in range(earlier + 1, call.index + 1):
                        refused[cut] = f"layers {earlier} and {call.index} share a KV cache"
            for array in _arrays(value):
                maker = made_by.get(id(array), call.index)
                for cut in range(maker + 2, call.index + 1):
                    refused[cut] = f"layer {call.index} reads what layer {maker} made"
        for array in _arrays(call.returned):
            made_by.setdefault(id(array), call.index)
    return refused


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)
