"""What the last tokens together bring to a layer: Qwen3.8 Flash Next's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo.errors import ModelUnsupported


@dataclass(frozen=True)
class Ngrams:
    """Of layer `layer`: a row of each part of a table, by a hash of the last two tokens, or more,
    up to as many as there are `multipliers`; parts of `sizes` rows from `starts` on, those of two
    tokens first. What comes before a token `end` is not looked at. `taps`: of a convolution over
    tokens that are `dilation` apart."""

    layer: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    end: int
    taps: int
    dilation: int

    @property
    def rows(self) -> int:
        """How many the table has, at least."""
        return max(map(sum, zip(self.starts, self.sizes, strict=True)))


def no_ngrams(config: Mapping[str, Any]) -> Ngrams | None:
    """Tokens bring what the embedding has of them, and no more."""
    return None


def qwen_ngrams(config: Mapping[str, Any]) -> Ngrams | None:
    """As exo/models/gguf/families/qwen4.py writes them.

    Raises:
        ModelUnsupported: parts of no rows, or not as many for each number of tokens.
    """
    if (given := config.get("ngrams")) is None:
        return None
    found = Ngrams(
        layer=int(given["layer"]),
        multipliers=tuple(given["multipliers"]),
        sizes=tuple(given["sizes"]),
        starts=tuple(given["starts"]),
        end=int(given["end"]),
        taps=int(given["taps"]),
        dilation=len(given["multipliers"]),
    )
    parts, orders = len(found.sizes), len(found.multipliers)
    if orders < 2 or not parts or parts % (orders - 1) or len(found.starts) != parts:
        raise ModelUnsupported(
            f"{parts} parts of a table, {len(found.starts)} beginnings of parts and {orders} "
            "multipliers"
        )
    if min(found.sizes) < 1 or min(found.starts) < 0 or found.taps < 1:
        raise ModelUnsupported(
            f"parts of a table of {found.sizes} rows from {found.starts} on, and a convolution of "
            f"{found.taps} tokens"
        )
    return found
