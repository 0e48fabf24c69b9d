"""Which tensors a checkpoint's weight files hold, and where: safetensors and GGUF alike."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from exo import json_text
from exo.errors import ModelUnsupported
from exo.models.file_parts import BlocksHere, Parts, is_in_part, merged
from exo.models.gguf.families.family import GGUFFamily
from exo.models.gguf.families.table import family_of_config
from exo.models.gguf.file import read_gguf
from exo.models.gguf.fused import separated
from exo.models.gguf.header import GGUF, GGUFTensor
from exo.models.gguf.names import TENSOR_SCALE, renamed
from exo.models.weight_files import chosen_weights

_BYTES = (
    dict.fromkeys(("F64", "I64", "U64"), 8)
    | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("BF16", "F16", "I16", "U16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1)
)


_TURNED = ("q_proj", "k_proj")
OF_EXPERTS = re.compile(r"\.(experts|switch_mlp|switch_glu|ngram_embedding)\.")


@dataclass(frozen=True)
class TensorEntry:
    """`dtype` as safetensors or ggml name it; `offset` in bytes from the file's start.

    What GGUF stores otherwise is to be undone by who reads it: `adds_one`, each number is one more
    than the weight; `permuted_heads`, rows stand in the order for RoPE over neighbouring pairs, in
    so many heads (0: they do not); `is_exp`, each number is exp(weight) or -exp(weight);
    `kv_heads`, rows are all queries, keys and values, where each of so many KV heads should have
    its own together; `every_second`, see GGUFTensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    adds_one: bool = False
    permuted_heads: int = 0
    is_exp: bool = False
    kv_heads: int = 0
    head_dim: int = 0
    every_second: int = 0

    @property
    def span(self) -> int:
        """Bytes of the file from `offset` on among which it is."""
        return self.nbytes * (2 if self.every_second else 1)


def weight_files(path: Path) -> list[Path]:
    """The weight files of a checkpoint's folder.

    Raises:
        ModelUnsupported: there are none.
    """
    chosen = chosen_weights([file.name for file in path.glob("model*.safetensors")])
    chosen = chosen or chosen_weights([file.name for file in path.glob("model*.gguf")], ".gguf")
    if not chosen:
        raise ModelUnsupported(f"{path} has no model*.safetensors (pickled weights are not read)")
    return [path / name for name in chosen]


def is_gguf(path: Path) -> bool:
    """Whether the weights in a checkpoint's folder are GGUF."""
    return weight_files(path)[0].suffix == ".gguf"


def all_tensors(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint's folder. Raises ModelUnsupported as `tensors_of`."""
    return {name: entry for file in weight_files(path) for name, entry in tensors_of(file).items()}


def expert_bytes(path: Path) -> int:
    """Of a folder's weights, or a GGUF file's, those that need not all be in memory: experts that
    only some tokens go through, and a table that stays on disk (docs/decisions/039). Raises
    ModelUnsupported as `tensors_of`."""
    if path.suffix == ".gguf":
        gguf = read_gguf(path)
        parts = ("_exps.", *(["per_layer_token_embd."] if gguf.architecture == "qwen4exp" else []))
        tensors = gguf.tensors.items()
        return sum(own.nbytes for name, own in tensors if any(part in name for part in parts))
    return sum(entry.nbytes for name, entry in all_tensors(path).items() if OF_EXPERTS.search(name))


def is_whole(path: Path) -> bool:
    """False where a folder has weight files that are not all here."""
    return not any(is_in_part(file) for file in path.glob("model*"))


def absent_tensors(path: Path) -> frozenset[str]:
    """Names of the tensors of which not all is here."""
    absent = []
    for file in path.glob("model*"):
        if is_in_part(file):
            here = BlocksHere(file)
            absent += [
                name
                for name, entry in tensors_of(file).items()
                if not here.hold(entry.offset, entry.offset + entry.span)
            ]
    return frozenset(absent)


def parts_with(path: Path, tensors: Collection[str]) -> Parts:
    """Where some tensors are in a folder's weight files, each file's header among it."""
    found: dict[str, list[tuple[int, int]]] = {}
    for file in weight_files(path):
        entries = tensors_of(file)
        ranges = [
            (entry.offset, entry.offset + entry.span)
            for name, entry in entries.items()
            if name in tensors
        ]
        if ranges:
            # What has no shape may be a number in a GGUF's header, which may be all of a file.
            starts = (entry.offset for entry in entries.values() if entry.shape)
            header = 0, min(starts, default=file.stat().st_size)
            found[file.name] = merged([header, *ranges])
    return found


def tensors_of(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one weight file, by mlx-lm's names for them.

    Raises:
        ModelUnsupported: the header cannot be read, or says what cannot be.
    """
    if file.suffix != ".gguf":
        return _safetensors(file)
    written = [path.stat() for path in (file, file.parent / "config.json")]
    known = [(one.st_ino, one.st_size, one.st_mtime_ns) for one in written]
    return dict(_gguf_tensors(file, *known))


def _safetensors(file: Path) -> dict[str, TensorEntry]:
    start, header = safetensors_header(file)
    size = file.stat().st_size
    entries = {}
    for name, said in header.items():
        try:
            entry = msgspec.convert(said, _HeaderEntry)
        except msgspec.ValidationError as error:
            raise ModelUnsupported(f"{file}: tensor {name} cannot be read: {error}") from error
        begin, end = entry.data_offsets
        width = _BYTES.get(entry.dtype)
        if not begin <= end <= size - start or (width and prod(entry.shape) * width != end - begin):
            raise ModelUnsupported(
                f"{file}: tensor {name} does not fit the file; fetch the file again"
            )
        entries[name] = TensorEntry(file, entry.dtype, entry.shape, start + begin, end - begin)
    return entries


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@lru_cache(maxsize=32)  # a header ends with a whole vocabulary: it takes a quarter of a second
def _gguf_tensors(file: Path, *_known: tuple[int, int, int]) -> dict[str, TensorEntry]:
    config = json_text.object_in(file.parent / "config.json")
    family = family_of_config(config)
    kv_heads, q_heads = int(config["num_key_value_heads"]), int(config["num_attention_heads"])
    head_dim = int(config["hidden_size"]) // q_heads
    gguf = read_gguf(file)
    entries = _layer_numbers(gguf, family, int(config["num_hidden_layers"]))
    for gguf_name, tensor in separated(gguf.tensors, family, config).items():
        if (name := renamed(gguf_name, family, config)) is None:
            continue
        parts = name.split(".")
        if len(parts) > 1 and parts[-2] in family.lists:
            entries |= _listed(name, file, tensor)
            continue
        permuted = 0
        if family.interleaved_rope and parts[-1] != TENSOR_SCALE and parts[-2] in _TURNED:
            rows = family.qkv_rows(config, int(gguf_name.split(".")[1]))
            assert rows is not None
            permuted = rows[_TURNED.index(parts[-2])] // int(config["head_dim"])
        entries[name] = TensorEntry(
            file,
            tensor.format,
            _shape_of(name, tensor.shape),
            tensor.offset,
            tensor.nbytes,
            adds_one=parts[-1] == "weight"
            and "norm" in parts[-2]
            and (
                family.norms_add_one == "all"
                or (family.norms_add_one == "layers" and "layers" in parts)
            ),
            permuted_heads=permuted,
            is_exp=parts[-1] == "A_log",
            kv_heads=kv_heads if parts[-2] == family.by_kv_head else 0,
            head_dim=head_dim,
            every_second=tensor.every_second,
        )
    return entries


def _layer_numbers(gguf: GGUF, family: GGUFFamily, layers: int) -> dict[str, TensorEntry]:
    """Numbers of layers that stand in the metadata, each where it is in there."""
    entries = {}
    for key, module in family.layer_numbers.items():
        if (array := gguf.arrays.get(key)) is None:
            continue  # in the first of a model's files
        if array.shape != (layers,):
            raise ModelUnsupported(
                f"{array.file}: {key} has {array.shape[0]} numbers, and there are {layers} layers"
            )
        for layer in range(layers):
            name = f"{family.prefix}{family.layers}.{layer}.{module}"
            entries[name] = TensorEntry(array.file, "F32", (), array.offset + 4 * layer, 4)
    return entries


def _listed(name: str, file: Path, tensor: GGUFTensor) -> dict[str, TensorEntry]:
    """The matrices of a list, which stand one after the other in a tensor."""
    module, _, kind = name.rpartition(".")
    count, shape = tensor.shape[0], tensor.shape[1:]
    size = tensor.nbytes // count
    return {
        f"{module}.{i}.{kind}": TensorEntry(
            file, tensor.format, shape, tensor.offset + i * size, size
        )
        for i in range(count)
    }


def _shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """As mlx-lm has it, where llama.cpp has an axis less or more."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return (prod(shape) // shape[-1], shape[-1], 1)
    if name.endswith((".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")):
        # Of a state space: with an axis more there. Mamba's A has a number for each of two.
        has_two = name.endswith(".A_log") and sum(axis > 1 for axis in shape) == 2
        return shape if has_two else (prod(shape),)
    return (1, *shape) if name.endswith("shared_expert_gate.weight") else shape


def safetensors_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's tensor data begins, and its tensors: 8 bytes little-endian length, then JSON.

    Format: https://huggingface.co/docs/safetensors/index#format

    Raises:
        ModelUnsupported: the file is no safetensors file.
    """
    try:
        with file.open("rb") as stream:
            length = header_length(stream.read(8), file.stat().st_size)
            header = json_text.parsed_object(stream.read(length))
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{file} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return 8 + length, header


def header_length(first: bytes, size: int) -> int:
    """Bytes of JSON after the first 8 of a file of `size`. Raises ValueError if that cannot be."""
    length = int.from_bytes(first[:8], "little")
    if size < 8 or length > min(100_000_000, size - 8):
        raise ValueError(f"its header would have {length} bytes")
    return length
