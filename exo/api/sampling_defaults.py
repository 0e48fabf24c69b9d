"""How a checkpoint's makers would have it sampled: its generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path

from exo import json_text
from exo.errors import InvalidRequest
from exo.inference.sampling import SamplingParams

logger = logging.getLogger(__name__)

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_SAMPLED = ("temperature", "top_p", "top_k", "min_p")


def sampling_defaults(path: Path) -> dict[str, float]:
    """Sampling fields that the checkpoint in a folder sets, as SamplingParams has them; empty where
    it says nothing that can be used. Models that think loop for ever when they are greedy.

    `do_sample` false means greedy; true without a temperature means 1, as transformers has it.
    """
    try:
        said = json_text.object_in(path / "generation_config.json")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s/generation_config.json is not used: %s", path, error)
        return {}
    found: dict[str, float] = {}
    for name in _NUMBERS:
        if isinstance(said.get(name), (int, float)) and not isinstance(said[name], bool):
            found[name] = float(said[name])
    if isinstance(said.get("top_k"), int) and said["top_k"] > 0:
        found["top_k"] = said["top_k"]
    if said.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name not in _SAMPLED}
    elif said.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    return {name: value for name, value in found.items() if _is_possible(name, value)}


def _is_possible(name: str, value: float) -> bool:
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidRequest as error:
        logger.warning("generation_config.json: %s", error.message)
        return False
    return True
