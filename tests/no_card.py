"""In place of an NVIDIA card: who asks for exo's kernels gets MLX's products."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn

from exo.inference.mlx import packed_products
from exo.inference.mlx.packed_products import Matrices


class NoCard:
    """What was asked for: the rows' shape and how many matrices; how often one was unpacked."""

    def __init__(self) -> None:
        self.multiplied: list[tuple[tuple[int, ...], int]] = []
        self.unpacked = 0

    def multiply(self, matrices: Matrices, x: mx.array, rows: int) -> list[mx.array]:
        assert rows == x.size // x.shape[-1]
        modules = matrices._modules
        self.multiplied.append((x.shape, len(modules)))
        return [
            mx.quantized_matmul(
                x, m.weight, m.scales, m.biases, group_size=m.group_size, bits=m.bits
            )
            for m in modules
        ]

    def unpack(self, module: nn.Module) -> mx.array:
        self.unpacked += 1
        return mx.dequantize(
            module.weight, module.scales, module.biases, module.group_size, module.bits
        )

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packed_products, "_few_rows", lambda matrices: None)
        monkeypatch.setattr(
            Matrices, "multiply", lambda matrices, x, rows: self.multiply(matrices, x, rows)
        )
        monkeypatch.setattr(packed_products, "unpack", self.unpack)
