"""Whether a model fits memory, from its size alone: for people who choose one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

BESIDE = 1.15
"""Of the weights' bytes, what a loaded model takes: its KV cache and scratch beside them."""

LEAST_EXPERTS = 1 / 8
"""Of a mixture's experts, what has to be in memory; others may be read from disk."""

Fits = Literal["here", "cluster", "part", "no"]


@dataclass(frozen=True)
class Free:
    """Bytes free for models on this node, on all nodes, and on those whose engine may leave experts
    of a mixture on disk."""

    here: int
    cluster: int
    mixtures: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def best(sizes: Mapping[str, int], free: Free) -> str | None:
    """The first of these that fits here, or else the cluster; None: none does. The best is the
    first."""
    for where in ("here", "cluster"):
        for name, size in sizes.items():
            if fit(size, free)[0] == where:
                return name
    return None


def fit(size: int, free: Free, experts: int = 0) -> tuple[Fits | None, int]:
    """Where weights of `size` bytes fit, `experts` of them those of a mixture ("part": with some of
    these on disk), and how many bytes are missing; None for a size of 0, which is not known. The
    placement decides in the end: it knows layers."""
    if not size:
        return None, 0
    need = int(BESIDE * size)
    if need <= free.here:
        return "here", 0
    if need <= free.cluster:
        return "cluster", 0
    if experts and need - (1 - LEAST_EXPERTS) * experts <= free.mixtures:
        return "part", 0
    return "no", need - free.cluster
