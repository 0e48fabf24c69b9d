"""What MLX's CUDA backend needs to be told to be at its best.

It compiles many of its kernels when they are first asked for: products of a prompt's rows with a
quantized matrix take long, for 16, 32 and 64 rows at once. So they are compiled while a model is
loaded, and kept from then on. And it multiplies 2 to 7 rows as it multiplies one, in turn, while 8
take no longer than one.
"""

from __future__ import annotations

import logging
import os
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

_CACHE = "MLX_PTX_CACHE_DIR"


def is_used() -> bool:
    """Whether arrays are computed on an NVIDIA card."""
    return bool(mx.cuda.is_available()) and mx.default_device().type == mx.DeviceType.gpu


def keep_kernels(folder: Path) -> None:
    """Keep what is compiled from now on in `folder`, for each version of MLX and kind of card: by
    itself MLX forgets it when the machine starts anew, and takes one kind's for another's."""
    kind = mx.device_info().get("architecture", "any")
    os.environ.setdefault(_CACHE, str(folder / f"{version('mlx')}-{kind}"))


def compile_kernels(prompt_of: Callable[[int], None]) -> None:
    """Have MLX compile what prompts need; `prompt_of` computes one of so many tokens."""
    kept = os.environ.get(_CACHE)
    if kept is None or not any(Path(kept).glob("qmm*")):
        logger.warning("compiling kernels for this GPU, once: this takes a minute or two")
    for rows in COMPILED_ROWS:
        prompt_of(rows)


def multiply_few_rows_together(module: nn.Module) -> None:
    """Have a quantized linear layer, or an embedding as head, fill 2 to 7 rows up to 8."""
    kind: Any = type(module)
    if kind in (nn.QuantizedLinear, nn.QuantizedEmbedding) and _has_fast_kernel(module):
        module.__class__ = _filling_class(kind)


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
def _filling_class(base: Any) -> Any:
    method = "__call__" if base is nn.QuantizedLinear else "as_linear"
    multiply = getattr(base, method)

    def filled(self: Any, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        if not 1 < rows < FEW_ROWS:
            return multiply(self, x)
        flat = mx.pad(x.reshape(rows, x.shape[-1]), [(0, FEW_ROWS - rows), (0, 0)])
        return multiply(self, flat)[:rows].reshape(*x.shape[:-1], -1)

    return type(base.__name__, (base,), {method: filled})
