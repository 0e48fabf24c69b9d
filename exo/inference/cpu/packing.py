"""Reads modules of a checkpoint into matrices as the kernels want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.family import Factor, Family
from exo.inference.cpu.grids import FORMATS, load_grids
from exo.inference.cpu.quantization import Packing, Quantization
from exo.models.checkpoint import Tensor
from exo.models.gguf.names import TENSOR_SCALE
from exo.models.gguf.unpacking import (
    MXFP4_BYTES,
    NVFP4_BYTES,
    TWO_BITS,
    mxfp4_of_pairs,
    nvfp4,
    two_bits,
)
from exo.models.hadamard import UNTURNED
from exo.models.quantizers import Affine, Float4, Float8

DTYPES = {"F32": native.DType.F32, "F16": native.DType.F16, "BF16": native.DType.BF16}
GGML = {*native.ggml_formats(), *TWO_BITS, "NVFP4", "MXFP4_PAIRS"}

OnBytes = Callable[[int], None]
Rows = npt.NDArray[np.int64]
Parts = dict[str, Tensor]


class Packer:
    """`factors` multiply the weights of modules, by how these end; `on_bytes` is told how many
    bytes of the files have been used up. `hadamard`: what turns all activations."""

    def __init__(
        self,
        checkpoint: CanonicalCheckpoint,
        quantization: Quantization,
        factors: Mapping[str, Factor],
        on_bytes: OnBytes,
        hadamard: native.Hadamard | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._quantization = quantization
        self._factors = factors
        self._on_bytes = on_bytes
        self._hadamard = hadamard

    def matrix(self, module: str) -> native.Matrix:
        """A whole linear layer (or embedding)."""
        packed = _pack(*self._read(module))
        self._done(module)
        if self._hadamard is None or not module.endswith(UNTURNED):
            return packed
        return self.dense(self._hadamard.turned(_numbers(packed)))

    def one_of(self, modules: str) -> Callable[[int], native.Matrix]:
        """Linear layers, one for each expert, by what `format` makes of their number: what packs
        one of them. Here and below the caller says what is used up."""
        return lambda index: _pack(*self._read(modules.format(index)))

    def stack(self, module: str, count: int) -> list[native.Matrix]:
        """A stack of `count` linear layers, one for each head."""
        pack = self.stacked(module)
        packed = [pack(index) for index in range(count)]
        self._done(module)
        return packed

    def stacked(self, module: str) -> Callable[[int], native.Matrix]:
        """A stack of linear layers, one for each expert: what packs one of them."""
        how, parts = self._read(module)
        return lambda index: _pack(how, {name: part.at(index) for name, part in parts.items()})

    def split(self, module: str, rows: list[int]) -> list[native.Matrix]:
        """A linear layer whose rows are several, one after the other."""
        how, parts = self._read(module)
        packed, start = [], 0
        for count in rows:
            packed.append(_pack(how, _each(parts, methodcaller("rows", start, start + count))))
            start += count
        self._done(module)
        return packed

    def pick(self, module: str, rows: list[Rows]) -> list[native.Matrix]:
        """Several linear layers out of one whose rows are mixed: of each, which rows."""
        how, parts = self._read(module)
        packed = [_pack(how, _each(parts, methodcaller("take", some))) for some in rows]
        self._done(module)
        return packed

    def rows_of(self, module: str) -> Callable[[list[int]], native.Matrix]:
        """What packs some rows, by their numbers, of a table that is not read as a whole."""
        how, parts = self._read(module)
        # All but a scale for all of them.
        names = [n for n in self.checkpoint.parts(module) if not n.endswith(TENSOR_SCALE)]
        for name in names:
            self.checkpoint.expect_rows(name)

        def pack(rows: list[int]) -> native.Matrix:
            for name in names:
                self.checkpoint.read_rows_ahead(name, sorted(set(rows)))
            return _pack(how, _each(parts, methodcaller("take", np.array(rows))))

        return pack

    def halves_of_stack(self, name: str) -> list[Callable[[int], native.Matrix]]:
        """A stack [count, rows, columns] whose layers are two each, one below the other: what packs
        one of the upper ones, and of the lower ones."""
        tensor = self.checkpoint.tensor(name)
        half = tensor.shape[1] // 2
        of_all = name.removesuffix("weight") + TENSOR_SCALE

        def scale(index: int) -> Parts:
            if of_all not in self.checkpoint:
                return {}
            return {TENSOR_SCALE: self.checkpoint.tensor(of_all).at(index)}

        def packing(start: int) -> Callable[[int], native.Matrix]:
            return lambda index: _pack(
                None, {"weight": tensor.at(index).rows(start, start + half), **scale(index)}
            )

        return [packing(0), packing(half)]

    def plain_stack(self, name: str) -> Callable[[int], native.Matrix]:
        """The same of a stack [count, rows, columns] that is a tensor, not a module."""
        tensor = self.checkpoint.tensor(name)
        return lambda index: _pack(None, {"weight": tensor.at(index)})

    def columns_of_stack(
        self, name: str, parts: int, *, alternating: bool = False
    ) -> list[Callable[[int], native.Matrix]]:
        """A stack [count, columns, rows] of numbers whose layers are so many each, one beside the
        other or, `alternating`, a row of each in turn: what packs one of each part."""
        tensor = self.checkpoint.tensor(name)
        width = tensor.shape[2]
        own = width // parts

        def packing(part: int) -> Callable[[int], native.Matrix]:
            rows = range(part, width, parts) if alternating else range(part * own, (part + 1) * own)

            def pack(index: int) -> native.Matrix:
                packed = _columns(tensor.at(index), rows)
                return self._biased(packed, name, index, rows)

            return pack

        return [packing(part) for part in range(parts)]

    def blocks_of_stack(self, name: str, parts: int) -> list[Callable[[int], native.Matrix]]:
        """The same of MXFP4 as gpt-oss was trained, alternating: blocks [count, rows, groups, 16],
        the even column in the low half of a byte, and scales [count, rows, groups]."""
        weight = self.checkpoint.tensor(f"{name}_blocks")
        scales = self.checkpoint.tensor(f"{name}_scales")

        def packing(part: int) -> Callable[[int], native.Matrix]:
            rows = range(part, weight.shape[1], parts)

            def pack(index: int) -> native.Matrix:
                own = {"weight": weight.at(index), "scales": scales.at(index)}
                packed = _pack(_MXFP4, _each(own, methodcaller("take", np.array(rows))))
                return self._biased(packed, name, index, rows)

            return pack

        return [packing(part) for part in range(parts)]

    def _biased(self, packed: native.Matrix, name: str, index: int, rows: range) -> native.Matrix:
        """With what the rows add, of a stack [count, rows] beside the weights."""
        if f"{name}_bias" in self.checkpoint:
            bias = self.checkpoint.tensor(f"{name}_bias").at(index).floats()
            packed.set_bias(bias[rows.start : rows.stop : rows.step].tolist())
        return packed

    def numbers(self, module: str) -> npt.NDArray[np.float32]:
        """A whole linear layer as float32 [rows, columns], whatever it is stored as."""
        return _numbers(self.matrix(module))

    def dense(self, rows: npt.NDArray[np.float32]) -> native.Matrix:
        """A linear layer of these numbers, which are not the checkpoint's any more."""
        data = np.ascontiguousarray(rows, np.float32).reshape(-1).view(np.uint8)
        return native.pack_dense(data, native.DType.F32, *rows.shape)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor's numbers, whatever it is stored as: some files have all of two axes packed."""
        tensor = self.checkpoint.tensor(name)
        is_packed = tensor.dtype in GGML
        values = _numbers(_pack(None, {"weight": tensor})) if is_packed else tensor.floats()
        self._on_bytes(self.checkpoint.nbytes(name))
        return values

    def _read(self, module: str) -> tuple[Packing | None, Parts]:
        """The parts of a linear layer, of which rows or whole layers may be taken, and how its
        weight is packed; None: it is not, or as a GGUF file says."""
        names = self.checkpoint.parts(module)
        parts = {name.rpartition(".")[2]: self.checkpoint.tensor(name) for name in names}
        factor = next((f for end, f in self._factors.items() if module.endswith(end)), None)
        if self.checkpoint.is_packed(module):
            return self._unpacked(module, parts, factor)
        if factor is not None:
            parts["weight"] = _multiplied(parts["weight"], factor)
        if "scales" not in parts:
            return None, parts
        words, groups = parts["weight"].shape[-1], parts["scales"].shape[-1]
        own = self.checkpoint.own_module(module)
        return self._quantization.of_module(own, words, groups), parts

    def _unpacked(self, module: str, parts: Parts, factor: Factor | None) -> tuple[Packing, Parts]:
        """What another tool than MLX packed, as if MLX had."""
        quantizer = self.checkpoint.quantizer
        assert quantizer is not None
        stored = {name: tensor.numbers() for name, tensor in parts.items() if name != "bias"}
        stored[quantizer.weight] = stored["weight"]
        found = quantizer.unpacked(stored, np)
        if factor is not None:
            found = _with_factor(found, factor)
        bias = {"bias": parts["bias"]} if "bias" in parts else {}
        if isinstance(found, Affine):
            packed = {"weight": found.words, "scales": found.scales, "biases": found.offsets}
            how = Packing("affine", found.bits, found.group)
        else:
            packed = {"weight": found.values, "scales": found.scales}
            if isinstance(found, Float8):
                how = Packing("float8", 8, found.group)
            else:
                how = Packing("nvfp4", 4, 16, float(found.scale))
        return how, {part: _tensor(module, array) for part, array in packed.items()} | bias

    def _done(self, module: str) -> None:
        for name in self.checkpoint.parts(module):
            self.used(name)

    def used(self, name: str, part: int = 0, parts: int = 1) -> None:
        """A tensor, or one part of so many, is not looked at again for now."""
        self.checkpoint.give_back(name, part, parts)
        self._on_bytes(self.checkpoint.nbytes(name) // parts)


_MXFP4 = Packing("mxfp4", 4, 32)


def _numbers(packed: native.Matrix) -> npt.NDArray[np.float32]:
    return packed.read_rows(np.arange(packed.rows, dtype=np.int32))


def _of_rows(factor: Factor, rows: int) -> npt.NDArray[np.float32]:
    """float32 [rows, 1]."""
    of_rows = ((rows, factor),) if isinstance(factor, float) else factor
    counts, factors = zip(*of_rows, strict=True)
    return np.repeat(np.array(factors, np.float32), counts)[:, None]


def _with_factor(found: Affine | Float8 | Float4, factor: Factor) -> Affine | Float8 | Float4:
    """In the scales. Float4, which has one scale for all, takes no factors of some rows."""
    if isinstance(found, Float4):
        assert isinstance(factor, float), "ShardModel checks this"
        return replace(found, scale=found.scale * factor)
    by = _of_rows(factor, found.scales.shape[0])
    if isinstance(found, Float8):
        return replace(found, scales=found.scales * by)
    return replace(found, scales=found.scales * by, offsets=found.offsets * by)


def _multiplied(weight: Tensor, factor: Factor) -> Tensor:
    """Of the same type, rounded to nearest."""
    found = weight.floats() * _of_rows(factor, weight.shape[0])
    match weight.dtype:
        case "BF16":
            bits = found.view(np.uint32)
            stored: npt.NDArray[Any] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        case "F16":
            stored = found.astype(np.float16)
        case _:
            stored = found
    return Tensor(weight.name, weight.dtype, weight.shape, stored.reshape(-1).view(np.uint8))


def _columns(tensor: Tensor, rows: range) -> native.Matrix:
    """Some columns of a tensor [columns, rows] as the rows of a layer."""
    if tensor.dtype not in DTYPES:
        raise ModelUnsupported(f"{tensor.name} of {tensor.dtype} stands column by column")
    cols, width = tensor.shape
    return native.pack_columns(
        tensor.data, DTYPES[tensor.dtype], width, rows.start, rows.step, len(rows), cols
    )


def _pack(how: Packing | None, parts: Parts) -> native.Matrix:
    if TENSOR_SCALE in parts:
        packed = _float4(parts["weight"], float(parts[TENSOR_SCALE].floats().reshape(-1)[0]))
    else:
        packed = _dense(parts["weight"]) if how is None else _quantized(how, parts)
    if "bias" in parts:
        packed.set_bias(parts["bias"].floats().tolist())
    return packed


def _each(parts: Parts, some_rows: Callable[[Tensor], Tensor]) -> Parts:
    """Some rows of all parts that have rows."""
    return {name: part if name == TENSOR_SCALE else some_rows(part) for name, part in parts.items()}


def _dense(weight: Tensor) -> native.Matrix:
    if weight.dtype == "NVFP4":
        return _float4(weight, 1.0)
    if weight.dtype in TWO_BITS:
        return _two_bits(weight)
    if weight.dtype == "MXFP4_PAIRS":
        blocks = mxfp4_of_pairs(weight.data.reshape(-1, MXFP4_BYTES))
        return native.pack_ggml(blocks.reshape(-1), "MXFP4", *weight.shape)
    if weight.dtype in GGML:
        if weight.dtype in FORMATS:
            load_grids()
        return native.pack_ggml(weight.data, weight.dtype, *weight.shape)
    return native.pack_dense(weight.data, DTYPES[weight.dtype], *weight.shape)


def _float4(weight: Tensor, scale: float) -> native.Matrix:
    if weight.dtype != "NVFP4":
        raise ModelUnsupported(f"{weight.name} of {weight.dtype} has a scale for all of it")
    values, scales = nvfp4(weight.data.reshape(-1, NVFP4_BYTES))
    return native.pack_float4(values.reshape(-1), scales.reshape(-1), scale, *weight.shape)


def _two_bits(weight: Tensor) -> native.Matrix:
    """As MLX has two bits, in groups of 64 or 128."""
    columns, size = TWO_BITS[weight.dtype]
    values, scales = two_bits(weight.dtype, weight.data.reshape(-1, size))
    group = min(columns, 128)
    of_groups = scales.repeat(columns // group)
    factors, offsets = (half.view(np.uint8) for half in (of_groups, -of_groups))
    rows, cols = weight.shape
    four = _four_in_a_byte(values)
    return native.pack_affine(four, factors, offsets, native.DType.F16, rows, cols, 2, group)


def _four_in_a_byte(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Of values below 4 [n]: [n / 4], the first lowest."""
    apart = values.reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8)
    joined: npt.NDArray[np.uint8] = np.bitwise_or.reduce(apart, axis=1)
    return joined


def _quantized(how: Packing, parts: Parts) -> native.Matrix:
    weight, scales = parts["weight"], parts["scales"]
    rows = weight.shape[0]
    cols = len(weight.data) * 8 // (rows * how.bits)
    match how.mode:
        case "float8":
            return native.pack_float8(weight.data, scales.floats(), rows, cols, how.group)
        case "mxfp8":
            powers = _powers_of_two(scales, 127).reshape(rows, -1)
            return native.pack_float8(weight.data, powers, rows, cols, how.group)
        case "nvfp4":
            return native.pack_float4(weight.data, scales.data, how.scale, rows, cols)
        case "mxfp4":
            return _packed_mxfp4(weight, scales, rows, cols)
    dtype, offsets, data, bits = DTYPES[scales.dtype], parts["biases"].data, weight.data, how.bits
    if bits == 1:  # which no kernel reads: as two
        data, bits = _four_in_a_byte(np.unpackbits(data, bitorder="little")), 2
    return native.pack_affine(data, scales.data, offsets, dtype, rows, cols, bits, how.group)


def _tensor(module: str, array: npt.NDArray[Any]) -> Tensor:
    dtype = {"uint32": "U32", "uint8": "U8", "float32": "F32"}[array.dtype.name]
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Tensor(module, dtype, array.shape, data)


def norm(family: Family, packer: Packer, name: str, own_offset: float | None = None) -> list[float]:
    """A norm's weights, with what its family adds to them, or `own_offset`."""
    offset = family.norm_offset if own_offset is None else own_offset
    if packer.checkpoint.is_raw:
        offset += family.raw_norm_offset
    return as_list(packer.floats(name) + np.float32(offset))


def as_list(values: npt.NDArray[np.float32]) -> list[float]:
    return list(values.tolist())


def _packed_mxfp4(weight: Tensor, scales: Tensor, rows: int, cols: int) -> native.Matrix:
    """E2M1 values in groups of 32 with a power of two each (OCP Microscaling Formats, 5.3.3). The
    kernels' table holds them doubled, plus 12."""
    powers = _powers_of_two(scales, 128)
    halves, offsets = (
        (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        for floats in (powers, np.float32(-12) * powers)
    )
    return native.pack_affine(
        weight.data, halves, offsets, native.DType.BF16, rows, cols, 4, 32, native.Table.E2M1
    )


def _powers_of_two(exponents: Tensor, bias: int) -> npt.NDArray[np.float32]:
    """E8M0 (OCP Microscaling Formats, 5.4.1)."""
    return np.ldexp(np.float32(1), exponents.data.astype(np.int32) - bias)
