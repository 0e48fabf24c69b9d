"""Attention to chosen pools of keys, with heads of keys and values: Qwen3.8 Flash Next's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo.errors import ModelUnsupported


@dataclass(frozen=True)
class Pools:
    """A query attends to `most` keys in pools of `size` tokens, which an indexer of `heads` of
    `dim` numbers chooses, and to those after the last whole pool."""

    heads: int
    dim: int
    size: int
    most: int


def no_pools(config: Mapping[str, Any]) -> Pools | None:
    """All attend to all keys they see."""
    return None


def qwen_pools(config: Mapping[str, Any]) -> Pools | None:
    """Raises ModelUnsupported where the kernels have no such pools."""
    if not config.get("indexer_budget"):
        return None
    found = Pools(
        heads=int(config["indexer_n_heads"]),
        dim=int(config["indexer_head_dim"]),
        size=int(config["indexer_compress_ratio"]),
        most=int(config["indexer_budget"]),
    )
    if found.most % found.size or found.dim % 16:
        raise ModelUnsupported(
            f"{found.most} keys in pools of {found.size} by heads of {found.dim}; the cpu engine "
            "takes whole pools, and heads that 16 divides"
        )
    return found
