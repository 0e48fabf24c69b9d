"""What MLX's CUDA backend needs to be told to be at its best.

It compiles many of its kernels when they are first asked for: products of a prompt's rows with a
quantized matrix take long, for 16, 32 and 64 rows at once. So they are compiled while a model is
loaded, and kept from then on. Of a quantized matrix it multiplies 2 to 7 rows one after the other,
while 8 take no longer than one; and those of several sequences apart, each of which reads the whole
matrix.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

logger = logging.getLogger(__name__)

COMPILED_ROWS = (8, 32, 64)
"""A prompt of each of these lengths asks for another kernel (`make_cta_tiler` in MLX's
qmm_sm80.cu); longer ones for none."""

FEW_ROWS = 8
"""So many rows are multiplied at once, fewer one by one (`QuantizedMatmul::eval_gpu` there)."""

TELL_AFTER_S = 5.0
"""Kernels that are kept are there sooner."""

_CACHE = "MLX_PTX_CACHE_DIR"


def is_used() -> bool:
    """Whether arrays are computed on an NVIDIA card."""
    return bool(mx.cuda.is_available()) and mx.default_device().type == mx.DeviceType.gpu


def keep_kernels(folder: Path) -> None:
    """Keep what is compiled from now on in `folder`, for each version of MLX and kind of card: by
    itself MLX forgets it when the machine starts anew, and takes one kind's for another's."""
    kind = mx.device_info().get("architecture", "any")
    os.environ.setdefault(_CACHE, str(folder / f"{version('mlx')}-{kind}"))


def compile_kernels(prompt_of: Callable[[int], object]) -> None:
    """Have MLX compile what prompts need; `prompt_of` computes one of so many tokens."""
    what = "compiling kernels for this GPU: a minute or two, once for each format of weights"
    tells = threading.Timer(TELL_AFTER_S, logger.warning, (what,))
    tells.start()
    try:
        for rows in COMPILED_ROWS:
            prompt_of(rows)
    finally:
        tells.cancel()


def multiply_rows_together(module: nn.Module) -> None:
    """Have a quantized linear layer, or an embedding as head, take the rows of all sequences as one
    matrix, of 8 rows at least where there are kernels for that."""
    kind: Any = type(module)
    if kind in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        module.__class__ = _flat_class(kind, _has_fast_kernel(module))


def _has_fast_kernel(module: nn.Module) -> bool:
    """`supports_qmm_sm80` in MLX's qmm.cu, of a matrix as it is loaded."""
    rows, words = module.weight.shape
    cols = words * 32 // module.bits
    return (
        module.bits in (4, 8)
        and rows % 128 == 0
        and cols % max(64, module.group_size) == 0
        and module.scales.dtype != mx.float32
    )


@cache
def _flat_class(base: Any, fills: bool) -> Any:
    method = "__call__" if base is nn.QuantizedLinear else "as_linear"
    multiply = getattr(base, method)

    def flat(self: Any, x: mx.array) -> mx.array:
        *outer, cols = x.shape
        rows = x.size // cols
        filled = fills and 1 < rows < FEW_ROWS
        if not filled and rows == (outer[-1] if outer else 1):
            return multiply(self, x)
        matrix = x.reshape(rows, cols)
        if filled:
            matrix = mx.pad(matrix, [(0, FEW_ROWS - rows), (0, 0)])
        return multiply(self, matrix)[:rows].reshape(*outer, -1)

    return type(base.__name__, (base,), {method: flat})
