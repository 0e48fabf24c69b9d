"""Weights that were stored turned, by a Hadamard matrix and signs (QuaRot, arXiv:2404.00456, 3.1):
W' = W R^-1, so that what W' is multiplied by has to be turned too, W x = W' (R x)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Hadamard:
    """R x = H (signs * x) by blocks of `block` columns, where H is the Sylvester-Hadamard matrix
    over the square root of its size. `signs`: 1 or -1 of each column, by how many there are; what
    has other widths is not turned. `embedding`: its rows are turned, too."""

    block: int
    signs: Mapping[int, Floats]
    embedding: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Hadamard | None:
        """As `as_config` said it."""
        if (found := config.get("hadamard")) is None:
            return None
        signs = {
            int(width): np.array([1.0 if sign == "+" else -1.0 for sign in said], np.float32)
            for width, said in found["signs"].items()
        }
        return cls(int(found["block_size"]), signs, bool(found["embedding"]))

    def as_config(self) -> dict[str, Any]:
        signs = {
            str(width): "".join("+" if sign > 0 else "-" for sign in own)
            for width, own in self.signs.items()
        }
        return {"block_size": self.block, "signs": signs, "embedding": self.embedding}


UNTURNED = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
"""Linear layers that read what is turned for others, and are stored as they are."""
