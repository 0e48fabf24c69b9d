"""Checkpoints that another tool than MLX quantized, for mlx-lm's classes: lazily, as MLX packs.

Integers stay what they are, scales and offsets rounded to the type of the norms. What MLX has no
kernels for is widened to more bits, and so are experts, which mlx-lm's classes only stack as plain
numbers: float8 to 8 bits in groups of 32 (off by at most 1/510 of a group's range), float4 to 6
(1/126), integers of 2, 4 and 8 bits to 4, 6 and 8.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from exo.models.quantizers import Affine, Float4, Float8, Quantizer

GROUP = 32
_WIDENED = {2: 4, 4: 6, 8: 8}
_EXPERT = re.compile(r"\.experts\.\d+\.")

Weights = dict[str, mx.array]


class Repacked:
    """The layers of one checkpoint."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self._bits = 8
        self._widened: set[str] = set()  # last parts of layers' names

    @property
    def config(self) -> dict[str, Any]:
        """What to tell mlx-lm instead of the configuration's own words."""
        bits = getattr(self._quantizer, "bits", 8)
        how = {"group_size": GROUP, "bits": bits, "mode": "affine"}
        return {"quantization": how, "quantization_config": None}

    def weights(self, stored: Weights) -> Weights:
        """The tensors of the files, with parameters of MLX's instead of the quantizer's."""
        quantizer = self._quantizer
        dtype = next((a.dtype for n, a in stored.items() if n.endswith("norm.weight")), mx.float16)
        ending = f".{quantizer.weight}"
        modules = [
            name.removesuffix(ending)
            for name in stored
            if name.endswith(ending) and f"{name.removesuffix(ending)}.{quantizer.scales}" in stored
        ]
        found = dict(stored)
        for module in modules:
            names = [f"{module}.{part}" for part in (quantizer.weight, *quantizer.parts)]
            parts = {n.rpartition(".")[2]: found.pop(n) for n in names if n in found}
            quantizer.check(module, {part: array.shape for part, array in parts.items()})
            layer = quantizer.unpacked(parts, mx)
            if isinstance(layer, Affine) and not _EXPERT.search(module):
                # MLX's CUDA kernels want matrices row by row, which Metal's make so themselves.
                found[f"{module}.weight"] = mx.contiguous(layer.words)
                found[f"{module}.scales"] = mx.contiguous(layer.scales.astype(dtype))
                found[f"{module}.biases"] = mx.contiguous(layer.offsets.astype(dtype))
            else:
                self._bits = _WIDENED[layer.bits]
                self._widened.add(module.rpartition(".")[2])
                found[f"{module}.weight"] = _numbers(layer).astype(dtype)
        return found

    def widen(self, model: nn.Module) -> None:
        """Pack what `weights` gave as plain numbers."""
        if self._widened:
            nn.quantize(model, GROUP, self._bits, class_predicate=self._is_widened)

    def _is_widened(self, path: str, module: nn.Module) -> bool:
        if path.rpartition(".")[2] not in self._widened or not hasattr(module, "to_quantized"):
            return False
        return bool(module.weight.shape[-1] % GROUP == 0)


def _numbers(layer: Affine | Float8 | Float4) -> mx.array:
    if isinstance(layer, Affine):
        return mx.dequantize(layer.words, layer.scales, layer.offsets, layer.group, layer.bits)
    if isinstance(layer, Float4):
        words = mx.contiguous(layer.values).view(mx.uint32)
        numbers = mx.dequantize(words, layer.scales, group_size=16, bits=4, mode="nvfp4")
        return numbers.astype(mx.float32) * layer.scale
    values = mx.from_fp8(layer.values, mx.float32)
    scales = mx.repeat(layer.scales, layer.group, axis=1)
    return values * scales[:, : values.shape[1]]
