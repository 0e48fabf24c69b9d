"""Tensors of weight files that are not on this machine, where mlx-lm wants a whole checkpoint.

A stand-in takes each one's place before the model's class sees the weights. It has the shape and
the dtype, no memory, and no number in it. It begins with an operation that no model uses, so that
the graph of a result tells whether anything absent would go into it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from exo.inference.mlx.corrections import kept
from exo.inference.mlx.shared_choice import share_choice

_MARK = "ArcCosh"

Weights = dict[str, mx.array]
Classes = Callable[[dict[str, Any]], tuple[Any, Any]]


def classes_given(change: Callable[[Weights], Weights]) -> Classes:
    """What `mlx_lm.utils.load_model` asks for a model's classes: they see what `change` makes of
    the weights in the folder's safetensors."""

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, arguments_class = _get_classes(config)

        def sanitize(self: Any, weights: Weights) -> Weights:
            inherited = getattr(model_class, "sanitize", None)
            changed = share_choice(self, config, change(weights))
            dropped = kept(self, changed)
            return {**(inherited(self, changed) if inherited else changed), **dropped}

        return type(model_class.__name__, (model_class,), {"sanitize": sanitize}), arguments_class

    return classes


def without(weights: Weights, tensors: Collection[str]) -> Weights:
    """The weights with stand-ins for `tensors`."""
    return {n: _stand_in(a) if n in tensors else a for n, a in weights.items()}


def depend_on_absent(results: Any) -> bool:
    """Whether any array in a tree would be computed from a stand-in."""
    arrays = [array for _, array in tree_flatten([results]) if isinstance(array, mx.array)]
    if not arrays:
        return False
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return f'label ="{_MARK}"' in graph.getvalue()


def _stand_in(tensor: mx.array) -> mx.array:
    # arccosh(0) is no number.
    return mx.arccosh(mx.zeros(tensor.shape)).astype(tensor.dtype)
