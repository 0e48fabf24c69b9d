"""Tensors of a checkpoint as views of its files, read only when touched."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.errors import ModelUnsupported
from exo.models.tensor_table import TensorEntry, all_tensors

INTEGERS: dict[str, Any] = {
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
}
"""Types of tensors of which `Tensor.numbers` gives the integers, or the bytes."""


@dataclass(frozen=True)
class Tensor:
    """One tensor's bytes, row-major, [bytes] or [rows, bytes]; `dtype` as safetensors or ggml name
    it. `adds_one`: what is stored is one more than the numbers; `is_exp`: it is exp of them, or
    -exp."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    adds_one: bool = False
    is_exp: bool = False

    def rows(self, start: int, end: int) -> Tensor:
        """A view of rows [start, end) of the first axis."""
        width = len(self.data) // self.shape[0]
        view = self.data[start * width : end * width]
        return Tensor(self.name, self.dtype, (end - start, *self.shape[1:]), view)

    def take(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """A copy of some rows of the first axis, in this order."""
        picked = self.data.reshape(self.shape[0], -1)[rows].reshape(-1)
        shape = (len(rows), *self.shape[1:])
        return Tensor(self.name, self.dtype, shape, picked, self.adds_one, self.is_exp)

    def half(self, index: int) -> Tensor:
        """A copy of the first or the second half of the second axis: of each expert's rows."""
        first, second, *rest = self.shape
        picked = np.ascontiguousarray(self.data.reshape(first, 2, -1)[:, index]).reshape(-1)
        return Tensor(self.name, self.dtype, (first, second // 2, *rest), picked)

    def at(self, index: int) -> Tensor:
        """A view of one entry of the first axis."""
        row = self.rows(index, index + 1)
        return Tensor(self.name, self.dtype, self.shape[1:], row.data)

    def numbers(self) -> npt.NDArray[Any]:
        """The values in the tensor's shape: integers as they are, float8 as its bytes, floats as
        float32."""
        if self.dtype in INTEGERS:
            found: npt.NDArray[Any] = self.data.view(INTEGERS[self.dtype]).reshape(self.shape)
            return found
        return self.floats()

    def floats(self) -> npt.NDArray[np.float32]:
        """The values as float32, in the tensor's shape."""
        if self.dtype == "BF16":
            wide = self.data.view(np.uint16).astype(np.uint32) << 16
            found = wide.view(np.float32)
        else:
            dtype = {"F32": np.float32, "F16": np.float16}[self.dtype]
            found = self.data.view(dtype).astype(np.float32)
        if self.is_exp:
            found = np.log(np.abs(found))
        return (found - np.float32(1) if self.adds_one else found).reshape(self.shape)


OnMap = Callable[[Path, npt.NDArray[np.uint8]], None]


class Checkpoint:
    """The weight files of one folder. `on_map` is given each file that is mapped, with all of its
    bytes.

    Raises:
        ModelUnsupported: a header that cannot be read, a file shorter than its header says.
    """

    def __init__(self, path: Path, on_map: OnMap | None = None) -> None:
        self._entries = all_tensors(path)
        self._maps: dict[Path, mmap.mmap] = {}
        self._on_map = on_map

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A view that an exception's traceback still holds keeps the map until it is collected.
        self._maps.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def nbytes(self, name: str) -> int:
        return self._entries[name].nbytes

    def tensor(self, name: str) -> Tensor:
        """Raises ModelUnsupported if there is none of that name."""
        if name not in self._entries:
            raise ModelUnsupported(f"the checkpoint has no tensor {name}")
        entry = self._entries[name]
        data = np.frombuffer(self._map(entry.file), np.uint8, entry.span, entry.offset)
        if entry.every_second:
            data = _every_second(data, entry)
        if entry.permuted_heads:
            data = _in_order(data, entry.shape[0], entry.permuted_heads)
        if entry.kv_heads:
            data = _by_kv_head(data, entry.shape[0], entry.kv_heads, entry.head_dim)
        return Tensor(name, entry.dtype, entry.shape, data, entry.adds_one, entry.is_exp)

    def read_ahead(self, name: str, part: int = 0, parts: int = 1) -> None:
        """Have the system read a tensor, or one part of so many, from disk meanwhile."""
        start, end = self._range(name, part, parts)
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map(self._entries[name].file).madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def expect_rows(self, name: str) -> None:
        """Rows of a tensor will be read here and there: what lies beside them, of which the system
        would read megabytes as well, is not wanted."""
        start, end = self._range(name, 0, 1)
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_RANDOM"):
            self._map(self._entries[name].file).madvise(mmap.MADV_RANDOM, begin, end - begin)

    def read_rows_ahead(self, name: str, rows: Iterable[int]) -> None:
        """Have the system read rows of a tensor from disk, all of them at once."""
        count = self._entries[name].shape[0]
        for row in rows:
            self.read_ahead(name, row, count)

    def give_back(self, name: str, part: int = 0, parts: int = 1) -> None:
        """Let go of the file pages that it was read through."""
        start, end = self._range(name, part, parts)
        begin = (start + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._map(self._entries[name].file).madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _range(self, name: str, part: int, parts: int) -> tuple[int, int]:
        """Where in its file a part of a tensor begins and ends."""
        entry = self._entries[name]
        size = entry.span // parts
        return entry.offset + part * size, entry.offset + (part + 1) * size

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if self._on_map is not None:
                self._on_map(file, np.frombuffer(self._maps[file], np.uint8))
        return self._maps[file]


def _every_second(data: npt.NDArray[np.uint8], entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """Of packed rows a view [rows, bytes], of numbers a copy."""
    is_packed = entry.dtype == "MXFP4_PAIRS"
    rows = prod(entry.shape[:-1] if is_packed else entry.shape)
    view = data.reshape(rows, 2, -1)[:, entry.every_second - 1]
    return view if is_packed else np.ascontiguousarray(view).reshape(-1)


def _in_order(data: npt.NDArray[np.uint8], rows: int, heads: int) -> npt.NDArray[np.uint8]:
    """Rows that stand pair by pair as halves of a head again: llama.cpp's converter does the
    opposite (`LlamaModel.permute` of convert_hf_to_gguf.py)."""
    pairs = data.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _by_kv_head(
    data: npt.NDArray[np.uint8], rows: int, kv_heads: int, head_dim: int
) -> npt.NDArray[np.uint8]:
    """Rows of all queries, then keys, then values, as each KV head's queries, key and value again
    (`modify_tensors` of llama.cpp's conversion/gptneox.py and falcon.py does the opposite)."""
    heads = data.reshape(rows // head_dim, -1)
    queries, keys, values = np.split(np.arange(len(heads)), [-2 * kv_heads, -kv_heads])
    order = np.concatenate(
        [queries.reshape(kv_heads, -1), keys[:, None], values[:, None]], axis=1
    ).reshape(-1)
    return np.ascontiguousarray(heads[order]).reshape(-1)
