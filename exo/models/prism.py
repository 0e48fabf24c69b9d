"""What PrismML's files say of weights that are stored turned (Bonsai 2), in the metadata of a GGUF
file or in hadamard.json beside weights for MLX.

Format: https://github.com/ggml-org/llama.cpp/issues/29058.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exo import json_text
from exo.errors import ModelUnsupported
from exo.models.hadamard import Floats, Hadamard

PACK = "prism_hadamard_qwen35"
"""What config.json calls the architecture of weights for MLX, as mlx-lm does."""

_PREFIX = "prism.hadamard."
_WANTED = {
    "version": 1,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
}


@dataclass(frozen=True)
class Said:
    """`turned` and `inverse`: names of the weights that are, and of tables whose rows are. `signs`
    by width; None: all are 1. `grouped`: what a delta net's last layer reads stands as in the
    checkpoint, not as llama.cpp's converter orders it."""

    block: int
    signs: Mapping[int, Floats] | None
    turned: frozenset[str]
    inverse: frozenset[str]
    grouped: bool

    def hadamard(self, widths: Iterable[int], embedding: str) -> Hadamard:
        """Of what has these widths.

        Raises:
            ModelUnsupported: a width without signs, or that the blocks do not divide.
        """
        signs: dict[int, Floats] = {}
        for width in widths:
            own = np.ones(width, np.float32) if self.signs is None else self.signs.get(width)
            if own is None:
                raise ModelUnsupported(f"{_PREFIX}sign_widths do not fit the weights: no {width}")
            if self.block < 1 or self.block & (self.block - 1) or width % self.block:
                raise ModelUnsupported(f"a Hadamard matrix of {self.block} for {width} columns")
            signs[width] = own
        return Hadamard(self.block, signs, embedding in self.inverse)


def said_in(metadata: Mapping[str, Any]) -> Said | None:
    """None: nothing is turned.

    Raises:
        ModelUnsupported: something else is said than exo computes.
    """
    said = {k.removeprefix(_PREFIX): v for k, v in metadata.items() if k.startswith(_PREFIX)}
    if "version" not in said:
        return None
    for key, wanted in _WANTED.items():
        if said.get(key) != wanted:
            raise ModelUnsupported(f"{_PREFIX}{key} is {said.get(key)!r}; exo reads {wanted!r}")
    mode = said.get("sign_mode")
    if mode not in ("identity", "explicit"):
        raise ModelUnsupported(f"{_PREFIX}sign_mode is {mode!r}; exo reads identity and explicit")
    return Said(
        block=int(said.get("block_size", 0)),
        signs=_signs(said) if mode == "explicit" else None,
        turned=frozenset(said.get("weight_names", [])),
        inverse=frozenset(said.get("inverse_weight_names", [])),
        grouped=bool(said.get("gdn_v_grouped")),
    )


def _signs(said: Mapping[str, Any]) -> dict[int, Floats]:
    widths = [int(width) for width in said.get("sign_widths", [])]
    values = np.asarray(said.get("sign_values", []), np.float32)
    if sum(widths) != len(values) or not np.isin(values, (-1, 1)).all():
        raise ModelUnsupported(f"{_PREFIX}sign_values do not fit the widths they are of")
    ends = np.cumsum(widths)
    return {width: values[end - width : end] for width, end in zip(widths, ends, strict=True)}


def config_of_pack(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json of weights for MLX as that of the architecture below, with what turns them.

    Raises:
        ModelUnsupported: there is no hadamard.json, or something is said that exo does not compute.
    """
    try:
        found = json_text.object_in(folder / "hadamard.json")
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{folder} has no readable hadamard.json: {error}") from error
    said = said_in(found)
    base, order = config.get("base_model_type"), config.get("gdn_activation_layout", "grouped")
    if said is None or said.signs is None or base != "qwen3_5":
        raise ModelUnsupported(f"{folder}: {PACK} over {base!r}, whose signs are not explicit")
    if not said.grouped or order != "grouped":
        raise ModelUnsupported(f"{folder}: turned weights whose value heads are not grouped")
    embedding = next((name for name in said.inverse if "embed_tokens" in name), "")
    hadamard = said.hadamard(said.signs, embedding)
    turned = sorted(said.turned | said.inverse)
    return {**config, "model_type": base, "hadamard": {**hadamard.as_config(), "turned": turned}}


def check_all_turned(config: Mapping[str, Any], packed: Iterable[str]) -> None:
    """`packed`: the quantized weights of a pack, by their names.

    Raises:
        ModelUnsupported: one is not turned: half of it would be nonsense.
    """
    turned = set(config.get("hadamard", {}).get("turned", []))
    if turned and (others := set(packed) - turned):
        raise ModelUnsupported(f"{min(others)} is not turned and others are (hadamard.json)")
