"""Products with quantized matrices on an NVIDIA card, by kernels of our own.

MLX's kernel for one row reads at a quarter of what an H100's memory can do, takes 2 to 7 rows one
after the other and sums 4-bit products in half precision; those for more are compiled for half a
minute each and reach an eighth of what the card's dense products do. Here up to 32 rows are
multiplied on the tensor cores as the weights are read, with sums in float32, and what a row comes
to does not depend on the others; for more rows a matrix is unpacked first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

MOST_ROWS = 32
MOST_MATRICES = 3
TOLERANCE = 0.02
"""Of the largest product: what bfloat16 rounds away."""

TRIED_OUTPUTS = 256

_PARTS = ("weight", "scales", "biases")
_TILE_ROWS, _TILE_OUTPUTS, _THREADS = 8, 16, 256
_COMMENT, _INDENT = re.compile(r"\s*//.*$", re.MULTILINE), re.compile(r"\n\s+")


def fits(module: nn.Module) -> bool:
    """Whether there are kernels for a layer's matrix: affine, 4 or 8 bits, in half precision."""
    cols = module.weight.shape[-1] * 32 // module.bits
    return (
        module.mode == "affine"
        and module.bits in (4, 8)
        and cols % (128 // module.bits) == 0
        and module.scales.dtype in (mx.float16, mx.bfloat16)
    )


def kind_of(module: nn.Module) -> tuple[int, int, mx.Dtype]:
    """What kernels are compiled for."""
    return module.bits, module.group_size, module.scales.dtype


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether the same rows can be multiplied with both at once."""
    return kind_of(one) == kind_of(other) and one.scales.shape[-1] == other.scales.shape[-1]


def why_not(module: nn.Module) -> str:
    """What is wrong with the kernels here, for matrices like this layer's; nothing: "". An older
    card has not the instructions they use."""
    part = nn.Module()
    part.bits, part.group_size = module.bits, module.group_size
    for name in _PARTS:
        part[name] = mx.contiguous(module[name][:TRIED_OUTPUTS])
    dense = mx.dequantize(part.weight, part.scales, part.biases, part.group_size, part.bits)
    x = mx.random.normal((MOST_ROWS, dense.shape[1]), key=mx.random.key(0)).astype(dense.dtype)
    want = x @ dense.T
    few = x[:2].reshape(2, 1, -1)
    try:
        found = [Matrices([part]).multiply(x, MOST_ROWS)[0], x @ unpack(part).T]
        for count in range(1, MOST_MATRICES + 1):
            found += [y.reshape(2, -1) for y in Matrices([part] * count).multiply(few, 2)]
        off = mx.max(mx.stack([mx.max(mx.abs(one - want[: len(one)])) for one in found]))
        is_right = bool(np.array(off <= TOLERANCE * mx.max(mx.abs(want))))
    except RuntimeError as error:
        return str(error)
    return "" if is_right else "they compute something else"


class Matrices:
    """Layers' matrices that are alike, MOST_MATRICES at most, to be multiplied with the same rows.
    Every step asks each layer, so what is the same each time is put together once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        first, count = modules[0], len(modules)
        self._modules = modules
        self._outputs = [module.weight.shape[0] for module in modules]
        self._dtypes = [first.scales.dtype] * count
        self._kernel = _few_rows(count)
        blocks = sum(-(-outputs // _TILE_OUTPUTS) for outputs in self._outputs)
        self._grid = (blocks * _THREADS, 1, 1)
        kind = [("T", first.scales.dtype), ("BITS", first.bits), ("GROUP", first.group_size)]
        self._few = [*kind, ("ROW_TILES", 1)]
        self._more = [*kind, ("ROW_TILES", MOST_ROWS // _TILE_ROWS)]

    def multiply(self, x: mx.array, rows: int) -> list[mx.array]:
        """Products of x (..., columns), of the scales' dtype, that has so many rows, MOST_ROWS at
        most: (..., outputs) for each matrix."""
        outer = x.shape[:-1]
        products: list[mx.array] = self._kernel(
            inputs=[x, *(module[name] for module in self._modules for name in _PARTS)],
            template=self._few if rows <= _TILE_ROWS else self._more,
            grid=self._grid,
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(*outer, outputs) for outputs in self._outputs],
            output_dtypes=self._dtypes,
        )
        return products


def unpack(module: nn.Module) -> mx.array:
    """The layer's matrix (outputs, columns), as its scales' dtype."""
    outputs, words = module.weight.shape
    unpacked: mx.array = _unpack()(
        inputs=[module[name] for name in _PARTS],
        template=[
            ("T", module.scales.dtype),
            ("BITS", module.bits),
            ("GROUP", module.group_size),
        ],
        grid=(-(-outputs * words // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(outputs, words * 32 // module.bits)],
        output_dtypes=[module.scales.dtype],
    )[0]
    return unpacked


@cache
def _few_rows(matrices: int) -> Any:
    numbered = range(matrices)
    packed = ", ".join(f"{{weight{i}, scales{i}, biases{i}, weight{i}_shape[0]}}" for i in numbered)
    products = ", ".join(f"out{i}" for i in numbered)
    source = f"""
        const Packed<T> matrices[] = {{{packed}}};
        T* const products[] = {{{products}}};
        int rows = 1;
        for (int i = 0; i + 1 < x_ndim; ++i) rows *= x_shape[i];
        few_rows<T, BITS, GROUP, ROW_TILES>(x, rows, x_shape[x_ndim - 1], matrices, products);
    """
    inputs = ["x", *(f"{name}{i}" for i in numbered for name in _PARTS)]
    return _kernel(f"few_rows_{matrices}", inputs, [f"out{i}" for i in numbered], source)


@cache
def _unpack() -> Any:
    source = """
        const int outputs = weight_shape[0];
        unpack<T, BITS, GROUP>(
            {weight, scales, biases, outputs}, weight_shape[1] * 32 / BITS, out);
    """
    return _kernel("unpack", list(_PARTS), ["out"], source)


def _kernel(name: str, inputs: list[str], outputs: list[str], source: str) -> Any:
    # MLX puts together and hashes the whole text whenever a kernel is used.
    text = Path(__file__).with_suffix(".cuh").read_text()
    header = _INDENT.sub("\n", _COMMENT.sub("", text))
    return mx.fast.cuda_kernel(
        name=name, input_names=inputs, output_names=outputs, header=header, source=source
    )
