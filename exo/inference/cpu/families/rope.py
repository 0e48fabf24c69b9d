"""Rotary position frequencies, in every scaling that checkpoints ask for.

The formulas are those of mlx-lm's rope_utils, which gives the periods' reciprocals. Pair i of a
head turns by position * frequencies[i] radians; `scale` multiplies what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.errors import ModelUnsupported


@dataclass(frozen=True)
class RopeTable:
    """frequencies: one for each rotated pair, radians a token."""

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


def rope_table(
    dims: int,
    base: float,
    scaling: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
    interleaved: bool = False,
) -> RopeTable:
    """The table of `dims` rotated dimensions.

    Raises:
        ModelUnsupported: a kind of scaling this engine does not know.
    """
    periods = base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    scaling = scaling or {}
    kind = scaling.get("type") or scaling.get("rope_type") or "default"
    scale = 1.0
    if kind in ("default", "mrope", "dynamic"):
        pass  # dynamic: what is beyond the positions that a model was made for is scaled
    elif kind == "proportional":  # the periods of all dimensions, of which only the first turn
        turned = np.arange(0, dims, 2) < int(dims * scaling.get("partial_rotary_factor", 1.0))
        periods = np.where(turned, periods * scaling.get("factor", 1.0), np.inf)
    elif kind == "linear":
        periods = periods * scaling["factor"]
    elif kind == "llama3":
        periods = _llama3(periods, scaling)
    elif kind in ("yarn", "deepseek_yarn", "telechat3-yarn"):
        periods, scale = _yarn(periods, dims, base, scaling)
    elif kind in ("longrope", "su"):
        original = scaling["original_max_position_embeddings"]
        periods = periods * np.asarray(scaling["long_factor"], np.float64)
        factor = (max_positions or original) / original
        if said := scaling.get("long_mscale"):
            scale = float(said)
        elif factor > 1:
            scale = math.sqrt(1 + math.log(factor) / math.log(original))
    else:
        raise ModelUnsupported(f"rope scaling {kind!r}")
    return RopeTable(tuple((1 / periods).tolist()), scale, interleaved)


def _llama3(
    periods: npt.NDArray[np.float64], scaling: Mapping[str, Any]
) -> npt.NDArray[np.float64]:
    factor = scaling["factor"]
    low = scaling.get("low_freq_factor", 1.0)
    high = scaling.get("high_freq_factor", 4.0)
    context = scaling.get("original_max_position_embeddings", 8192)
    wavelengths = 2 * math.pi * periods
    slow = wavelengths > context / low
    between = (wavelengths > context / high) & (wavelengths < context / low)
    scaled = np.where(slow, periods * factor, periods)
    if low == high:  # Llama 4's: no ramp between them
        return scaled
    smooth = (context / wavelengths - low) / (high - low)
    return np.where(between, scaled / ((1 - smooth) / factor + smooth), scaled)


def _yarn(
    periods: npt.NDArray[np.float64], dims: int, base: float, scaling: Mapping[str, Any]
) -> tuple[npt.NDArray[np.float64], float]:
    factor = scaling["factor"]
    context = scaling.get("original_max_position_embeddings", 4096)

    def correction(rotations: float) -> float:
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def attention_factor(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1

    low = max(math.floor(correction(scaling.get("beta_fast", 32))), 0)
    high: float = min(math.ceil(correction(scaling.get("beta_slow", 1))), dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    stretched = periods * factor
    mixed = stretched * periods / (stretched * keep + periods * (1 - keep))
    scale = attention_factor(scaling.get("mscale", 1)) / attention_factor(
        scaling.get("mscale_all_dim", 0)
    )
    return mixed, scale
