"""Linear layers on a CPU outside MLX: through NumPy's BLAS, or the cpu engine's kernels.

MLX's CPU backend multiplies matrices on one thread of a reference BLAS, and quantized ones slower
still. Here they are called eagerly on the activations as arrays, in one of two ways:

- NumPy's BLAS, on weights dequantized to float32 once: MLX's numbers up to the order of sums, many
  times faster (docs/benchmarks.md), for 4 bytes a parameter, so only where those fit;
- the cpu engine's kernels, on packed weights and 8-bit activations: for architectures that engine
  does not have. They take MLX's affine quantization; what else there is goes to BLAS.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from exo.inference.cpu import _native as native

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_EMBEDDING = (nn.Embedding, nn.QuantizedEmbedding)


def dense_bytes(module: nn.Module, *, packed: bool) -> int:
    """float32 bytes of the linear layers inside that BLAS would compute."""
    linears = [m for m in module.modules() if type(m) in _LINEAR]
    return sum(4 * _elements(m) for m in linears if not (packed and _can_be_packed(m)))


def move_to_host(layer: nn.Module, twin: nn.Module, *, packed: bool, dense: bool) -> None:
    """Take the linear layers inside `layer` out of MLX: `packed` sends those it can to the cpu
    engine's kernels, `dense` the others to BLAS.

    Their weights are read from `twin`, a lazy copy of the same layer that is thrown away, so that
    those of `layer` itself are never evaluated and take no memory.
    """
    twins = dict(twin.named_modules())
    for name, linear in layer.named_modules():
        if type(linear) in _LINEAR:
            pack = packed and _can_be_packed(linear)
            if pack or dense:
                source = twins[name]
                weight = _packed(source) if pack else _dense(source)
                object.__setattr__(linear, "_exo_weight", weight)
                _send_to_host(linear)


def move_to_host_when_called(module: nn.Module, *, packed: bool, dense: bool) -> None:
    """The same for one module outside the layers (a head, a tied embedding), at its first use:
    only the shard that uses it pays for it."""
    if type(module) in _LINEAR + _EMBEDDING:
        pack = packed and _can_be_packed(module)
        if pack or dense:
            object.__setattr__(module, "_exo_pack", pack)
            _send_to_host(module)


def forget(layer: nn.Module) -> None:
    """Undo `move_to_host` and free its weights."""
    for linear in layer.modules():
        if vars(linear).pop("_exo_weight", None) is not None:
            linear.__class__ = type(linear).__bases__[0]


def is_on_host(module: nn.Module) -> bool:
    """Whether MLX computes with it no more, and its weights are elsewhere."""
    return "_exo_weight" in vars(module)


def _send_to_host(module: nn.Module) -> None:
    kind: Any = type(module)
    module.__class__ = _host_class(kind)


def _can_be_packed(linear: nn.Module) -> bool:
    return (
        type(linear) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        and getattr(linear, "mode", "affine") == "affine"
        and linear.group_size in (32, 64, 128)
        and linear.get("biases") is not None
    )


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


def _packed(linear: nn.Module) -> native.Matrix:
    """The weight as the cpu engine's kernels read it."""
    from exo.inference.cpu import _native as native

    scales = linear.scales
    dtype = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}[scales.dtype]
    rows, groups = scales.shape

    def raw(array: mx.array) -> npt.NDArray[np.uint8]:
        return np.array(array.view(mx.uint8)).reshape(-1)

    cols, bits = groups * linear.group_size, linear.bits
    values, biases = raw(linear.weight), raw(linear.biases.astype(scales.dtype))
    return native.pack_affine(
        values, raw(scales), biases, native.DType[dtype], rows, cols, bits, linear.group_size
    )


def _multiply(x: mx.array, weight: Any) -> mx.array:
    rows = np.ascontiguousarray(np.asarray(x.astype(mx.float32)).reshape(-1, x.shape[-1]))
    if not isinstance(weight, np.ndarray):
        product = weight.apply(rows)
    elif len(rows) == 1:
        # A matrix-vector product goes to gemv, which streams the weight once.
        product = (weight @ rows[0])[None]
    else:
        product = rows @ weight.T
    return mx.array(product.reshape(*x.shape[:-1], product.shape[-1]))


@cache
def _host_class(base: Any) -> Any:
    def weight(self: Any) -> Any:
        if "_exo_weight" not in vars(self):
            made = _packed(self) if vars(self)["_exo_pack"] else _dense(self)
            object.__setattr__(self, "_exo_weight", made)
        return self._exo_weight

    def call(self: Any, x: mx.array) -> mx.array:
        y = _multiply(x, weight(self))
        bias = self.get("bias")
        return y if bias is None else y + bias

    def as_linear(self: Any, x: mx.array) -> mx.array:
        return _multiply(x, weight(self))

    method = {"__call__": call} if base in _LINEAR else {"as_linear": as_linear}
    return type(base.__name__, (base,), method)
