"""Repositories of the shapes that the hub's have, with contents made up.

repositories.json records names and sizes, and why each shape is there. Those of real repos are
written down from memory of the hub's listings, sizes roughly; "someone/…" is made up of what repos
were seen to hold. What a model runs on is a tiny llama's, cut into the weight files that the record
names; every other file is noise, at most `_LARGEST` bytes of it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import zoo

from exo.models.weight_files import INDEX, chosen_weights

_RECORD = Path(__file__).with_name("repositories.json")
_LARGEST = 300_000
_LAYERS = 20  # with enough tensors for 163 files


@dataclass(frozen=True)
class Shape:
    """`weights`: the files that hold the model; `files` all of them."""

    repo: str
    files: dict[str, bytes]
    weights: tuple[str, ...]


@cache
def recorded() -> dict[str, dict[str, int]]:
    """Sizes of files by path, by repo."""
    found = json.loads(_RECORD.read_text())
    return {repo: entry["files"] for repo, entry in found.items()}


RUNNABLE = [
    repo
    for repo, files in recorded().items()
    if "config.json" in files and repo != "someone/upload-that-stopped"
]


def shaped(repo: str, folder: Path) -> Shape:
    """A repo of that shape; `folder` is for the making."""
    sizes = recorded()[repo]
    weights = chosen_weights(sizes) if repo in RUNNABLE else []
    shutil.rmtree(folder, ignore_errors=True)
    config = zoo.tiny_config("llama") | {"num_hidden_layers": _LAYERS}
    zoo.write_checkpoint("llama", folder / "one", config)
    zoo.write_tokenizer(folder / "one")
    runs = _cut(folder / "one", weights) | {
        "config.json": (folder / "one" / "config.json").read_bytes(),
        "tokenizer.json": (folder / "one" / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": (folder / "one" / "tokenizer_config.json").read_bytes(),
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }} {% endfor %}",
        "generation_config.json": b"{}",
        "special_tokens_map.json": b"{}",
        "added_tokens.json": b"{}",
    }
    noise = np.random.default_rng(0)
    files = {
        path: runs[path] if path in runs else noise.bytes(min(size, _LARGEST))
        for path, size in sizes.items()
    }
    return Shape(repo, files, tuple(weights))


def _cut(checkpoint: Path, names: list[str]) -> dict[str, bytes]:
    """The checkpoint's tensors in these files, and the index that says where each is."""
    tensors = mx.load(str(checkpoint / "model.safetensors"))

    def order(name: str) -> tuple[int, str]:
        layer = re.search(r"\.(\d+)\.", name)
        return (int(layer[1]) if layer else -1 if "embed" in name else _LAYERS, name)

    ordered = sorted(tensors, key=order)
    found, where = {}, {}
    for i, file in enumerate(names):
        part = ordered[len(ordered) * i // len(names) : len(ordered) * (i + 1) // len(names)]
        scratch = checkpoint / "scratch.safetensors"
        some = {name: tensors[name] for name in part}
        mx.save_safetensors(str(scratch), some, metadata={"format": "mlx"})
        found[file] = scratch.read_bytes()
        where |= dict.fromkeys(part, file)
    return found | {INDEX: json.dumps({"metadata": {}, "weight_map": where}).encode()}
