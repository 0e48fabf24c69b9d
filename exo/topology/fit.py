"""Whether a model fits memory, from its size alone: for people who choose one."""

from __future__ import annotations

from typing import Literal

BESIDE = 1.15
"""Of the weights' bytes, what a loaded model takes: its KV cache and scratch beside them."""

Fits = Literal["here", "cluster", "no"]


def fit(size: int, here: int, cluster: int) -> tuple[Fits | None, int]:
    """Where weights of `size` bytes fit, by the bytes free on this node and on all nodes, and how
    many bytes are missing; None for a size of 0, which is not known. The placement decides in the
    end: it knows layers."""
    if not size:
        return None, 0
    need = int(BESIDE * size)
    if need <= here:
        return "here", 0
    if need <= cluster:
        return "cluster", 0
    return "no", need - cluster
