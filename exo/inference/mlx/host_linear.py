"""Linear layers on a CPU through NumPy's BLAS.

MLX's CPU backend multiplies matrices on one thread of a reference BLAS, and quantized ones slower
still. Here the weights are dequantized to float32 once and multiplied by NumPy's BLAS, which uses
all cores: the same numbers, up to the order of their sums, many times faster in prefill
(docs/benchmarks.md). It costs 4 bytes a parameter, so it is used only where those fit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_EMBEDDING = (nn.Embedding, nn.QuantizedEmbedding)


def dense_bytes(module: nn.Module) -> int:
    """float32 bytes of all the linear layers inside."""
    return sum(4 * _elements(m) for m in module.modules() if type(m) in _LINEAR)


def use_host_blas(layer: nn.Module, twin: nn.Module) -> None:
    """Send the linear layers inside `layer` to NumPy.

    Their weights are read from `twin`, a lazy copy of the same layer that is thrown away, so that
    those of `layer` itself are never evaluated and take no memory.
    """
    twins = dict(twin.named_modules())
    for name, linear in layer.named_modules():
        if type(linear) in _LINEAR:
            object.__setattr__(linear, "_exo_weight", _dense(twins[name]))
            _send_to_host(linear)


def use_host_blas_when_called(module: nn.Module) -> None:
    """The same for one module outside the layers (a head, a tied embedding), at its first use:
    only the shard that uses it pays for it."""
    if type(module) in _LINEAR + _EMBEDDING:
        _send_to_host(module)


def forget(layer: nn.Module) -> None:
    """Undo `use_host_blas` and free its weights."""
    for linear in layer.modules():
        if vars(linear).pop("_exo_weight", None) is not None:
            linear.__class__ = type(linear).__bases__[0]


def _send_to_host(module: nn.Module) -> None:
    kind: Any = type(module)
    module.__class__ = _host_class(kind)


def _elements(linear: nn.Module) -> int:
    bits = getattr(linear, "bits", None)
    return int(linear.weight.size * 32 // bits) if bits else int(linear.weight.size)


def _dense(linear: nn.Module) -> npt.NDArray[np.float32]:
    """The weight as float32 [outputs, inputs]."""
    weight = linear.weight
    if hasattr(linear, "bits"):
        weight = mx.dequantize(
            weight,
            linear.scales,
            linear.get("biases"),
            group_size=linear.group_size,
            bits=linear.bits,
            mode=getattr(linear, "mode", "affine"),
        )
    return np.array(weight.astype(mx.float32))


def _multiply(x: mx.array, weight: npt.NDArray[np.float32]) -> mx.array:
    rows = np.asarray(x.astype(mx.float32)).reshape(-1, x.shape[-1])
    # A matrix-vector product goes to gemv, which streams the weight once.
    product = (weight @ rows[0])[None] if len(rows) == 1 else rows @ weight.T
    return mx.array(product.reshape(*x.shape[:-1], weight.shape[0]))


@cache
def _host_class(base: Any) -> Any:
    def weight(self: Any) -> npt.NDArray[np.float32]:
        if "_exo_weight" not in vars(self):
            object.__setattr__(self, "_exo_weight", _dense(self))
        return self._exo_weight

    def call(self: Any, x: mx.array) -> mx.array:
        y = _multiply(x, weight(self))
        bias = self.get("bias")
        return y if bias is None else y + bias

    def as_linear(self: Any, x: mx.array) -> mx.array:
        return _multiply(x, weight(self))

    method = {"__call__": call} if base in _LINEAR else {"as_linear": as_linear}
    return type(base.__name__, (base,), method)
