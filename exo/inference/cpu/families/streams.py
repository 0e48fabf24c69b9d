"""Several hidden states of a token, which layers read and write by weights of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Hyper:
    """Of hyper-connections: hidden states of a token, how often the matrix that mixes them is
    balanced, or 0 where they do not mix; `magnitude`: how large weights may be by which what a part
    gives is added, each at least `least`. With a `rank` each state is normed by itself and read
    number by number, and what reads them last stands in for a final norm (Qwen3.8 Flash Next)."""

    streams: int
    rounds: int
    eps: float
    magnitude: float = 2.0
    least: float = 0.0
    rank: int = 0


def hyper_of(config: Mapping[str, Any]) -> Hyper:
    if "hc_lowrank" in config:
        return Hyper(int(config["hc_count"]), 0, 0.0, rank=int(config["hc_lowrank"]))
    found = Hyper(
        streams=int(config["hc_mult"]),
        rounds=int(config.get("hc_sinkhorn_iters") or 0),
        eps=float(config["hc_eps"]),
    )
    if "hc_magnitude" not in config:
        return found
    return replace(found, magnitude=float(config["hc_magnitude"]), least=found.eps)
