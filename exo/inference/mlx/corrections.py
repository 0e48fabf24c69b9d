"""What mlx-lm's classes compute otherwise than the models they are named after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from exo.errors import ModelUnsupported


def check_packed(config: Mapping[str, Any]) -> None:
    """Of a checkpoint that another tool than MLX quantized.

    Raises:
        ModelUnsupported: Falcon-H1, whose multipliers mlx-lm puts into weights that are numbers.
    """
    if config.get("model_type") == "falcon_h1":
        raise ModelUnsupported(
            "MLX runs no Falcon-H1 that GPTQ or another tool packed, as its multipliers are not in "
            "the weights there: take its GGUF file, a conversion for MLX, or a node with a CPU"
        )


def correct(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Falcon-H1's keys have a factor (`key_multiplier`, 0.03 to 0.4 in the models there are), which
    mlx-lm and what it converted leave out: its `sanitize` looks for a `key_proj` that no checkpoint
    has. The products of queries and keys get it here. In a GGUF file it is in the weights."""
    if config.get("model_type") == "falcon_h1":
        for layer in model.layers:
            layer.self_attn.scale *= config.get("key_multiplier", 1.0)
