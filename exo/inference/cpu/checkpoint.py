"""Tensors of a checkpoint as views of its files, read only when touched."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from exo.errors import ModelUnsupported
from exo.models.description import safetensors_files, safetensors_header

_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}


@dataclass(frozen=True)
class Tensor:
    """One tensor's bytes, row-major; `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def rows(self, start: int, end: int) -> Tensor:
        """A view of rows [start, end) of the first axis."""
        width = len(self.data) // self.shape[0]
        view = self.data[start * width : end * width]
        return Tensor(self.name, self.dtype, (end - start, *self.shape[1:]), view)

    def at(self, index: int) -> Tensor:
        """A view of one entry of the first axis."""
        row = self.rows(index, index + 1)
        return Tensor(self.name, self.dtype, self.shape[1:], row.data)

    def floats(self) -> npt.NDArray[np.float32]:
        """The values as float32, in the tensor's shape."""
        if self.dtype == "BF16":
            wide = self.data.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        dtype = {"F32": np.float32, "F16": np.float16}[self.dtype]
        return self.data.view(dtype).astype(np.float32).reshape(self.shape)


class Checkpoint:
    """The safetensors of one folder.

    Raises:
        ModelUnsupported: a header that cannot be read, a file shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self._entries: dict[str, tuple[Path, int, int, str, tuple[int, ...]]] = {}
        for file in safetensors_files(path):
            start, header = safetensors_header(file)
            size = file.stat().st_size
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                width = _WIDTHS.get(entry["dtype"])
                if start + end > size or (width and prod(shape) * width != end - begin):
                    raise ModelUnsupported(
                        f"{file}: tensor {name} does not fit the file; fetch the file again"
                    )
                self._entries[name] = (file, start + begin, end - begin, entry["dtype"], shape)
        self._maps: dict[Path, mmap.mmap] = {}

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
        return self._entries[name][3]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name][4]

    def nbytes(self, name: str) -> int:
        return self._entries[name][2]

    def file_of(self, name: str) -> Path:
        return self._entries[name][0]

    def tensor(self, name: str) -> Tensor:
        """Raises ModelUnsupported if there is none of that name."""
        if name not in self._entries:
            raise ModelUnsupported(f"the checkpoint has no tensor {name}")
        file, offset, size, dtype, shape = self._entries[name]
        whole = np.frombuffer(self._map(file), np.uint8)
        return Tensor(name, dtype, shape, whole[offset : offset + size])

    def read_ahead(self, name: str) -> None:
        """Have the system read a tensor from disk meanwhile."""
        file, offset, size, _, _ = self._entries[name]
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map(file).madvise(mmap.MADV_WILLNEED, begin, offset + size - begin)

    def give_back(self, name: str) -> None:
        """Let go of the file pages a tensor was read through."""
        file, offset, size, _, _ = self._entries[name]
        begin = (offset + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._map(file).madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]
