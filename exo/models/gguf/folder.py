"""A GGUF file as a model's folder: its weights used where they are, by a link."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from exo.errors import ModelUnsupported
from exo.models.gguf.config import config_of
from exo.models.gguf.file import read_gguf
from exo.models.gguf.tokenizer import write_tokenizer
from exo.models.tensor_table import tensors_of

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(file: Path) -> list[Path]:
    """All files of a model of which `file` is one: of a split one (name-00001-of-00003.gguf) its
    parts in order.

    Raises:
        ModelUnsupported: a part is missing.
    """
    if (split := _SPLIT.fullmatch(file.name)) is None:
        return [file]
    stem, count = split[1], int(split[3])
    parts = [file.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if gone := [part.name for part in parts if not part.is_file()]:
        raise ModelUnsupported(f"{gone[0]} is missing beside {file.name}; a split file needs all")
    return parts


def make_folder(parts: Sequence[Path], folder: Path) -> None:
    """`write_folder`, all of it or nothing, in place of what is there.

    Raises:
        ModelUnsupported: as `write_folder`.
        OSError: the folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gguf-") as scratch:
        made = Path(scratch) / "model"
        write_folder(parts, made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def weight_names(count: int) -> list[str]:
    """What a model's files are called in its folder, where it is in `count` parts."""
    if count == 1:
        return ["model.gguf"]
    return [f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def write_folder(parts: Sequence[Path], folder: Path) -> None:
    """Make `folder`: config.json and the tokenizer from the metadata, links to the file's parts.

    Raises:
        ModelUnsupported: what exo does not read of the file; the message says what.
    """
    gguf = read_gguf(parts[0])
    tensors = dict(gguf.tensors)
    for part in parts[1:]:
        tensors |= read_gguf(part).tensors
    gguf.tensors.update(tensors)  # the first part's metadata is the whole model's
    config = config_of(gguf)
    folder.mkdir(parents=True)
    write_tokenizer(gguf.metadata, folder, config)
    # Group size and bits are what mlx-lm takes for modules that nothing else is known of.
    config["quantization"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for link, part in zip(weight_names(len(parts)), parts, strict=True):
        (folder / link).symlink_to(part.resolve())
        tensors_of(folder / link)  # every tensor has a place
