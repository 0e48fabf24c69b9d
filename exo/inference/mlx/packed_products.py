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

_TILE_ROWS, _TILE_OUTPUTS, _THREADS = 8, 16, 256
_COMMENT = re.compile(r"\s*//.*$", re.MULTILINE)


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
    for name in ("weight", "scales", "biases"):
        part[name] = mx.contiguous(module[name][:TRIED_OUTPUTS])
    dense = mx.dequantize(part.weight, part.scales, part.biases, part.group_size, part.bits)
    x = mx.random.normal((MOST_ROWS, dense.shape[1]), key=mx.random.key(0)).astype(dense.dtype)
    want = x @ dense.T
    try:
        together = [y for n in range(1, MOST_MATRICES + 1) for y in multiply(x[:1], [part] * n)]
        found = [multiply(x, [part])[0], x @ unpack(part).T, *together]
        off = mx.max(mx.stack([mx.max(mx.abs(one - want[: len(one)])) for one in found]))
        is_right = bool(np.array(off <= TOLERANCE * mx.max(mx.abs(want))))
    except RuntimeError as error:
        return str(error)
    return "" if is_right else "they compute something else"


def multiply(x: mx.array, modules: Sequence[nn.Module]) -> list[mx.array]:
    """The products of x (rows, columns), of the dtype of the scales, with the matrices of layers
    that are alike: (rows, outputs) each. At most MOST_ROWS rows and MOST_MATRICES matrices."""
    rows, first = x.shape[0], modules[0]
    outputs = [module.weight.shape[0] for module in modules]
    inputs = [x]
    for module in modules:
        inputs += (module.weight, module.scales, module.biases)
    tiles = 1 if rows <= _TILE_ROWS else MOST_ROWS // _TILE_ROWS
    products: list[mx.array] = _few_rows(len(modules))(
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("BITS", first.bits),
            ("GROUP", first.group_size),
            ("ROW_TILES", tiles),
        ],
        grid=(sum(-(-count // _TILE_OUTPUTS) for count in outputs) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, count) for count in outputs],
        output_dtypes=[x.dtype] * len(outputs),
    )
    return products


def unpack(module: nn.Module) -> mx.array:
    """The layer's matrix (outputs, columns), as its scales' dtype."""
    outputs, words = module.weight.shape
    unpacked: mx.array = _unpack()(
        inputs=[module.weight, module.scales, module.biases],
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
        few_rows<T, BITS, GROUP, ROW_TILES>(x, x_shape[0], x_shape[1], matrices, products);
    """
    of_matrix = [(f"weight{i}", f"scales{i}", f"biases{i}") for i in numbered]
    inputs = ["x", *(name for names in of_matrix for name in names)]
    return _kernel(f"few_rows_{matrices}", inputs, [f"out{i}" for i in numbered], source)


@cache
def _unpack() -> Any:
    source = """
        const int outputs = weight_shape[0];
        unpack<T, BITS, GROUP>(
            {weight, scales, biases, outputs}, weight_shape[1] * 32 / BITS, out);
    """
    return _kernel("unpack", ["weight", "scales", "biases"], ["out"], source)


def _kernel(name: str, inputs: list[str], outputs: list[str], source: str) -> Any:
    # MLX hashes the whole text whenever a kernel is used.
    header = _COMMENT.sub("", Path(__file__).with_suffix(".cuh").read_text())
    return mx.fast.cuda_kernel(
        name=name, input_names=inputs, output_names=outputs, header=header, source=source
    )
