"""What a GGUF file holds: metadata, and where its tensors are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.errors import ModelUnsupported

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST = 1 << 31
"""Of anything counted in a header: more would be a damaged file."""

_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

# https://github.com/ggml-org/ggml/blob/master/include/ggml.h, enum ggml_type: name, columns and
# bytes of a block. From 142 on: PrismML's, 4: Ollama's own in August 2025
# (exo/models/gguf/unpacking.py).
_FORMATS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82), 18: ("IQ3_XXS", 256, 98),
    21: ("IQ3_S", 256, 110), 19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18), 142: ("PQ2_0", 128, 34),
    143: ("PTQ1_0", 128, 28), 4: ("MXFP4_PAIRS", 32, 17),
}  # fmt: skip
_INTEGERS = {26: ("I32", 1, 4)}  # no weights: DeepSeek V4's experts of tokens
_KINDS = _FORMATS | _INTEGERS
_UNREAD = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 27: "I64", 28: "F64",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "I2_S",
}  # fmt: skip

READ_FORMATS = tuple(name for name, _, _ in _FORMATS.values())


_Found = tuple[str, str, tuple[int, ...], int, int]
"""A tensor's name, format, shape, offset from the end of the header, and bytes."""


@dataclass(frozen=True)
class GGUFTensor:
    """`shape` has the columns last, unlike in GGUF; `offset` is from the start of `file`.
    `every_second`: of a tensor with twice as many rows the first, third, ... (1) or the second,
    fourth, ... (2)."""

    file: Path
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    every_second: int = 0


@dataclass(frozen=True)
class GGUF:
    """Arrays of numbers in the metadata are NumPy's, arrays of strings are lists. `data_start`:
    where the header ends and the first tensor may begin. `arrays`: the metadata's of float32, as
    tensors inside of the header."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data_start: int
    arrays: dict[str, GGUFTensor] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def floats(self, name: str) -> npt.NDArray[np.float32] | None:
        """A tensor of plain numbers; None if there is none of that name."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.format not in ("F32", "F16"):
            return None
        dtype = np.float32 if tensor.format == "F32" else np.float16
        found = np.fromfile(tensor.file, dtype, prod(tensor.shape), offset=tensor.offset)
        return found.astype(np.float32).reshape(tensor.shape)


ENDS_TOO_SOON = (ValueError, struct.error, IndexError, OverflowError)
"""What `parse_header` raises."""


def parse_header(path: Path, data: bytes | mmap.mmap, size: int) -> GGUF:
    """The header of a file of `size` bytes that `data` begins.

    Raises:
        ModelUnsupported: it holds what exo does not read.
        ENDS_TOO_SOON: it is damaged, or does not end in `data`.
    """
    if data[:4] != _MAGIC:
        raise ValueError(f"it begins with {bytes(data[:4])!r}, not with {_MAGIC!r}")
    reader = _Reader(data)
    version, tensor_count, pair_count = reader.unpack("<IQQ")
    if version not in _VERSIONS:
        raise ModelUnsupported(f"{path} is GGUF version {version}; exo reads {_VERSIONS}")
    metadata, arrays = {}, {}
    for _ in range(_limited(pair_count)):
        key = reader.string()
        value = metadata[key] = reader.value(reader.unpack("<I")[0])
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            start = reader.at - value.nbytes
            arrays[key] = GGUFTensor(path, "F32", value.shape, start, value.nbytes)
    found: list[_Found] = []
    unread: dict[str, int] = {}
    for _ in range(_limited(tensor_count)):
        name = reader.string()
        (dimensions,) = reader.unpack("<I")
        shape = tuple(reversed(reader.unpack(f"<{_limited(dimensions)}Q")))
        kind, offset = reader.unpack("<IQ")
        if kind not in _KINDS:
            unread[_UNREAD.get(kind, str(kind))] = unread.get(_UNREAD.get(kind, str(kind)), 0) + 1
            continue
        format_name, columns, block = _KINDS[kind]
        if not shape or shape[-1] % columns:
            raise ValueError(f"tensor {name} of {shape} in blocks of {columns}")
        found.append((name, format_name, shape, offset, prod(shape) // columns * block))
    if unread:
        what = ", ".join(f"{count} tensors of {name}" for name, count in unread.items())
        raise ModelUnsupported(
            f"{path} holds {what}; exo reads {', '.join(READ_FORMATS)}. Take another quantization"
        )
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-reader.at // alignment) * alignment
    if _has_old_q2_0(found, size - start):
        found = [_as_pq2_0(*one) if one[1] == "Q2_0" else one for one in found]
    tensors = {}
    for name, format_name, shape, offset, count in found:
        if start + offset + count > size:
            raise ValueError(f"tensor {name} ends {start + offset + count - size} bytes after")
        tensors[name] = GGUFTensor(path, format_name, shape, start + offset, count)
    return GGUF(metadata, tensors, start, arrays)


def _has_old_q2_0(found: list[_Found], end: int) -> bool:
    """PrismML's first files call PQ2_0 what became Q2_0's number: with the longer blocks of Q2_0,
    tensors would overlap. `end`: of the last one at the most."""
    if not any(dtype == "Q2_0" for _, dtype, *_ in found):
        return False
    spans = sorted((offset, offset + count) for *_, offset, count in found)
    starts = [*(start for start, _ in spans[1:]), end]
    return any(stop > start for (_, stop), start in zip(spans, starts, strict=True))


def _as_pq2_0(name: str, _: str, shape: tuple[int, ...], offset: int, count: int) -> _Found:
    if shape[-1] % 128:
        raise ValueError(f"tensor {name} of {shape} in blocks of 128")
    return name, "PQ2_0", shape, offset, count // 36 * 34


def _limited(count: int) -> int:
    if count > _MOST:
        raise ValueError(f"a count of {count}")
    return count


class _Reader:
    """Takes one value after the other from a header."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self.at = 4

    def unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return found

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        raw = self._data[self.at : self.at + _limited(length)]
        if len(raw) < length:
            raise ValueError("it ends inside its header")
        self.at += length
        return raw.decode("utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: what `string` does, without a call for each."""
        data, at, length_at, end = self._data, self.at, _LENGTH.unpack_from, len(self._data)
        found = []
        for _ in range(count):
            (length,) = length_at(data, at)
            at += 8 + length
            if at > end:
                raise ValueError("it ends inside its header")
            found.append(data[at - length : at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.unpack("<IQ")
            if of in _SCALARS:
                return self._numbers(of, _limited(count))
            if of == _STRING:
                return self._strings(_limited(count))
            return [self.value(of) for _ in range(_limited(count))]
        if kind not in _SCALARS:
            raise ValueError(f"metadata of kind {kind}")
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        found = np.frombuffer(self._data, dtype, count, self.at).copy()
        self.at += dtype.itemsize * count
        return found
