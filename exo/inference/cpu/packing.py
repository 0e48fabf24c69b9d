"""Reads modules of a checkpoint into matrices as the kernels want them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.family import Family
from exo.inference.cpu.quantization import Quantization
from exo.models.checkpoint import Tensor

DTYPES = {"F32": native.DType.F32, "F16": native.DType.F16, "BF16": native.DType.BF16}
GGML = native.ggml_formats()

OnBytes = Callable[[int], None]
Rows = npt.NDArray[np.int64]


class Packer:
    """`on_bytes` is told how many bytes of the files have been used up."""

    def __init__(
        self, checkpoint: CanonicalCheckpoint, quantization: Quantization, on_bytes: OnBytes
    ) -> None:
        self.checkpoint = checkpoint
        self._quantization = quantization
        self._on_bytes = on_bytes

    def matrix(self, module: str) -> native.Matrix:
        """A whole linear layer (or embedding)."""
        packed = self._pack(module, self._read(module))
        self._done(module)
        return packed

    def stack(self, module: str, count: int) -> list[native.Matrix]:
        """A stack of `count` linear layers, one for each expert."""
        parts = self._read(module)
        packed = [
            self._pack(module, {name: tensor.at(index) for name, tensor in parts.items()})
            for index in range(count)
        ]
        self._done(module)
        return packed

    def split(self, module: str, rows: list[int]) -> list[native.Matrix]:
        """A linear layer whose rows are several, one after the other."""
        parts, packed, start = self._read(module), [], 0
        for count in rows:
            some = {name: tensor.rows(start, start + count) for name, tensor in parts.items()}
            packed.append(self._pack(module, some))
            start += count
        self._done(module)
        return packed

    def pick(self, module: str, rows: list[Rows]) -> list[native.Matrix]:
        """Several linear layers out of one whose rows are mixed: of each, which rows."""
        parts = self._read(module)
        packed = [
            self._pack(module, {name: tensor.take(some) for name, tensor in parts.items()})
            for some in rows
        ]
        self._done(module)
        return packed

    def halves_of_stack(self, name: str, count: int) -> list[list[native.Matrix]]:
        """A stack [count, rows, columns] whose layers are two each, one below the other."""
        layers = [self.checkpoint.tensor(name).at(index) for index in range(count)]
        half = layers[0].shape[0] // 2
        packed = [
            [self._pack(name, {"weight": layer.rows(start, start + half)}) for layer in layers]
            for start in (0, half)
        ]
        self._used(name)
        return packed

    def plain_stack(self, name: str, count: int) -> list[native.Matrix]:
        """A stack [count, rows, columns] that is a tensor, not a module."""
        tensor = self.checkpoint.tensor(name)
        packed = [self._pack(name, {"weight": tensor.at(index)}) for index in range(count)]
        self._used(name)
        return packed

    def numbers(self, module: str) -> npt.NDArray[np.float32]:
        """A whole linear layer as float32 [rows, columns], whatever it is stored as."""
        packed = self.matrix(module)
        return packed.read_rows(np.arange(packed.rows, dtype=np.int32))

    def dense(self, rows: npt.NDArray[np.float32]) -> native.Matrix:
        """A linear layer of these numbers, which are not the checkpoint's any more."""
        data = np.ascontiguousarray(rows, np.float32).reshape(-1).view(np.uint8)
        return native.pack_dense(data, native.DType.F32, *rows.shape)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        values = self.checkpoint.tensor(name).floats()
        self._on_bytes(self.checkpoint.nbytes(name))
        return values

    def _read(self, module: str) -> dict[str, Tensor]:
        names = self.checkpoint.parts(module)
        return {name.rpartition(".")[2]: self.checkpoint.tensor(name) for name in names}

    def _pack(self, module: str, parts: dict[str, Tensor]) -> native.Matrix:
        weight = parts["weight"]
        rows = weight.shape[0]
        if "scales" in parts:
            scales = parts["scales"]
            own = self.checkpoint.own_module(module)
            how = self._quantization.of_module(own, weight.shape[1], scales.shape[1])
            cols = weight.shape[1] * 32 // how.bits
            if how.mode == "mxfp4":
                packed = _packed_mxfp4(weight, scales, rows, cols)
            else:
                dtype, offsets = DTYPES[scales.dtype], parts["biases"].data
                packed = native.pack_affine(
                    weight.data, scales.data, offsets, dtype, rows, cols, how.bits, how.group
                )
        elif weight.dtype in GGML:
            packed = native.pack_ggml(weight.data, weight.dtype, rows, weight.shape[1])
        else:
            packed = native.pack_dense(weight.data, DTYPES[weight.dtype], rows, weight.shape[1])
        if "bias" in parts:
            packed.set_bias(parts["bias"].floats().tolist())
        return packed

    def _done(self, module: str) -> None:
        for name in self.checkpoint.parts(module):
            self._used(name)

    def _used(self, name: str) -> None:
        self.checkpoint.give_back(name)
        self._on_bytes(self.checkpoint.nbytes(name))


def norm(family: Family, packer: Packer, name: str) -> list[float]:
    """A norm's weights, with what its family adds to them."""
    offset = family.norm_offset
    if packer.checkpoint.is_raw:
        offset += family.raw_norm_offset
    return as_list(packer.floats(name) + np.float32(offset))


def as_list(values: npt.NDArray[np.float32]) -> list[float]:
    return list(values.tolist())


def _packed_mxfp4(weight: Tensor, scales: Tensor, rows: int, cols: int) -> native.Matrix:
    """E2M1 values in groups of 32 with a power of two each (OCP Microscaling Formats, 5.3.3). The
    kernels' table holds them doubled, plus 12."""
    powers = np.ldexp(np.float32(1), scales.data.astype(np.int32) - 128)
    halves, offsets = (
        (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        for floats in (powers, np.float32(-12) * powers)
    )
    return native.pack_affine(
        weight.data, halves, offsets, native.DType.BF16, rows, cols, 4, 32, native.Table.E2M1
    )
