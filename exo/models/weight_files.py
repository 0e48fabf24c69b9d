"""Which of a checkpoint's files hold its weights, where there is more than one way to read it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

from exo.errors import ModelUnsupported

_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.(?:safetensors|gguf)")

INDEX = "model.safetensors.index.json"


def chosen_weights(names: Collection[str], suffix: str = ".safetensors") -> list[str]:
    """Of a folder's file names those that are the model: one whole set of shards, else the single
    file, else whatever is called model*.safetensors. Repos also hold the weights a second time,
    in one file, in another precision (model.fp16.safetensors), or as their authors trained them
    (consolidated.safetensors). `names` are of files that end with `suffix`, or of a whole repo.

    Raises:
        ModelUnsupported: a shard is missing, and there is no other way to have the model.
    """
    single = f"model{suffix}"
    sets: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if found := _SHARD.fullmatch(name):
            sets[found[2]].add(int(found[1]))
    missing = {total: _missing(numbers, int(total)) for total, numbers in sets.items()}
    whole = sorted(total for total, gone in missing.items() if not gone)
    if whole:
        return sorted(n for n in names if (m := _SHARD.fullmatch(n)) and m[2] == whole[0])
    if single in names:
        return [single]
    for total, gone in missing.items():
        raise ModelUnsupported(
            f"model-{gone[0]:05}-of-{total}{suffix} is missing"
            + (f", and {len(gone) - 1} more" if len(gone) > 1 else "")
            + ": the upload of this model is not complete"
        )
    return sorted(n for n in names if re.fullmatch(rf"model[^/]*{re.escape(suffix)}", n))


def _missing(numbers: set[int], total: int) -> list[int]:
    """Shards are numbered from 1 to `total`, or from 0 to `total` or the one before."""
    expected = range(total) if 0 in numbers else range(1, total + 1)
    return [number for number in expected if number not in numbers]
