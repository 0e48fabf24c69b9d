"""What a checkpoint says of how to sample it, as its makers write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exo.api.sampling_defaults import sampling_defaults

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (QWEN3, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1},
        ),
        ({"temperature": None, "top_p": "high", "top_k": 0}, {}),
        ({"temperature": 7.0, "top_p": 0.9}, {"top_p": 0.9}),
        ([], {}),
    ],
)
def test_what_it_says(said: Any, found: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == found


def test_none_and_a_broken_one(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    assert sampling_defaults(tmp_path) == {}
