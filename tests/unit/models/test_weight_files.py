"""Which files are the model, where repos hold its weights more than once or not whole."""

from __future__ import annotations

import pytest

from exo.errors import ModelUnsupported
from exo.models.weight_files import chosen_weights


def shards(count: int, total: str, first: int = 1) -> list[str]:
    return [f"model-{i:05}-of-{total}.safetensors" for i in range(first, first + count)]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "config.json"], ["model.safetensors"]),
        ([*shards(3, "00003"), "consolidated.safetensors"], shards(3, "00003")),
        ([*shards(2, "00002"), "model.safetensors"], shards(2, "00002")),
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (shards(163, "000163"), shards(163, "000163")),
        (shards(3, "00002", first=0), shards(3, "00002", first=0)),
        (shards(2, "00002", first=0), shards(2, "00002", first=0)),
        ([*shards(1, "00002"), "model.safetensors"], ["model.safetensors"]),
        (["model_part.safetensors", "a.safetensors"], ["model_part.safetensors"]),
        (["pytorch_model.bin"], []),
    ],
    ids=lambda names: f"{len(names)}-{names[0] if names else ''}",
)
def test_one_whole_set(names: list[str], chosen: list[str]) -> None:
    assert chosen_weights(names) == chosen


def test_a_missing_shard_is_named() -> None:
    with pytest.raises(ModelUnsupported, match=r"model-00002-of-00004\.safetensors is missing, a"):
        chosen_weights([shards(1, "00004")[0], *shards(1, "00004", first=4)])
