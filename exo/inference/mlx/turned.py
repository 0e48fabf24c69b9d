"""Linear layers of mlx-lm's classes whose weights a GGUF file has turned by a Hadamard matrix: what
they are multiplied by is turned first (exo/models/hadamard.py). Of weights that were turned for MLX
(exo/models/prism.py) mlx-lm has a class of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from exo.models.hadamard import UNTURNED, Hadamard


def turn(model: nn.Module, hadamard: Hadamard) -> None:
    """Have all its linear layers turn what they are given, and its embedding turn rows back."""
    signs = {width: mx.array(own) for width, own in hadamard.signs.items()}
    for name, module in model.named_modules():
        is_embedding = isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
        is_linear = isinstance(module, (nn.Linear, nn.QuantizedLinear))
        is_turned = (
            hadamard.embedding if is_embedding else is_linear and not name.endswith(UNTURNED)
        )
        width = _columns(module) if is_turned else 0
        if width in signs:
            kind: Any = type(module)
            module.__class__ = _turned_class(kind, is_embedding)
            object.__setattr__(module, "_exo_signs", signs[width])
            object.__setattr__(module, "_exo_block", hadamard.block)


def _columns(module: Any) -> int:
    bits = getattr(module, "bits", None)
    return int(module.weight.shape[-1] * 32 // bits if bits else module.weight.shape[-1])


@cache
def _turned_class(kind: Any, is_embedding: bool) -> Any:
    def linear(self: Any, x: mx.array) -> Any:
        turned = _transformed(x * self._exo_signs, self._exo_block)
        return kind.__call__(self, turned.astype(x.dtype))

    def embed(self: Any, x: mx.array) -> mx.array:
        rows: mx.array = kind.__call__(self, x)
        return (_transformed(rows, self._exo_block) * self._exo_signs).astype(rows.dtype)

    def as_linear(self: Any, x: mx.array) -> Any:
        turned = _transformed(x * self._exo_signs, self._exo_block)
        return kind.as_linear(self, turned.astype(x.dtype))

    methods = {"__call__": embed, "as_linear": as_linear} if is_embedding else {"__call__": linear}
    return type(kind.__name__, (kind,), methods)


def _transformed(x: mx.array, block: int) -> mx.array:
    blocks = x.astype(mx.float32).reshape(*x.shape[:-1], -1, block)
    return mx.hadamard_transform(blocks).reshape(x.shape)
