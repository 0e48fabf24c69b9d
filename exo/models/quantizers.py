"""Linear layers as GPTQ, AWQ, compressed-tensors, FP8, NVFP4 and BitNet checkpoints store them, and
what the engines hold instead: the same numbers as MLX would pack them, or float8 and float4 with
scales.

Formats: AutoGPTQ's and GPTQModel's `qlinear_cuda`, AutoAWQ's `packing_utils`, `compressors` of
vllm-project/compressed-tensors, `finegrained_fp8` and `bitnet` of transformers; float8 is E4M3 of
the OCP 8-bit Floating Point Specification, float4 E2M1 of the OCP Microscaling Formats.

What computes is numpy or mlx.core, as the arrays are: `xp`, of which only what both call alike is
used. With MLX everything stays lazy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from exo.errors import ModelUnsupported

Array = Any
Module = Any
Shapes = Mapping[str, tuple[int, ...]]

GROUPS = (128, 64, 32)
"""Columns that may share a scale in the engines."""

_FLOAT8_BLOCK = 128
_FLOAT4_GROUP = 16


@dataclass(frozen=True)
class Affine:
    """w = scale * q + offset. `words` uint32 [rows, cols * bits / 32], each row's values as a
    stream of bits, lowest first; `scales` and `offsets` float32 [rows, cols / group]."""

    words: Array
    scales: Array
    offsets: Array
    bits: int
    group: int


@dataclass(frozen=True)
class Float8:
    """w = scale * value. `values` uint8 [rows, cols], E4M3; `scales` float32
    [rows, ceil(cols / group)]."""

    values: Array
    scales: Array
    group: int
    bits: int = 8


@dataclass(frozen=True)
class Float4:
    """w = scale * group's scale * value. `values` uint8 [rows, cols / 2], E2M1, the even column in
    the low half; `scales` uint8 [rows, cols / 16], E4M3; `scale` float32, one number."""

    values: Array
    scales: Array
    scale: Array
    bits: int = 4


class Quantizer(ABC):
    """How a tool stored a linear layer: `weight` and `scales` name two of the layer's tensors,
    `needed` what else there must be, `others` what there may be."""

    weight: str = "weight"
    scales: str
    needed: tuple[str, ...] = ()
    others: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """All but the weight."""
        return (self.scales, *self.needed, *self.others)

    def check(self, module: str, shapes: Shapes) -> None:
        """Raises ModelUnsupported if `unpacked` could not read a layer with parts of these shapes;
        `module` is for the message."""
        if missing := {self.weight, self.scales, *self.needed} - shapes.keys():
            raise ModelUnsupported(f"the checkpoint has no tensor {module}.{min(missing)}")
        self._check_shapes(module, shapes)

    @abstractmethod
    def _check_shapes(self, module: str, shapes: Shapes) -> None: ...

    @abstractmethod
    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Affine | Float8 | Float4:
        """A layer of these parts."""


class _Packed(Quantizer):
    """Integers with a scale, and perhaps a zero, for each group of columns."""

    bits: int

    @abstractmethod
    def size(self, shapes: Shapes) -> tuple[int, int, int]:
        """Rows, columns, groups of columns."""

    def _check_shapes(self, module: str, shapes: Shapes) -> None:
        _, cols, groups = self.size(shapes)
        if not groups or not any(cols % (groups * group) == 0 for group in GROUPS):
            raise ModelUnsupported(
                f"{module} has {groups} scales for {cols} columns; exo knows multiples of "
                f"{GROUPS[-1]} columns a scale"
            )

    def affine(self, words: Array, scales: Array, zeros: Array, xp: Module) -> Affine:
        """`scales` float32 [rows, groups]; w = scale * (q - zero)."""
        columns = words.shape[1] * 32 // self.bits // scales.shape[1]
        group = next(size for size in GROUPS if columns % size == 0)
        offsets = -(scales * zeros)
        if columns > group:
            scales = xp.repeat(scales, columns // group, axis=1)
            offsets = xp.repeat(offsets, columns // group, axis=1)
        return Affine(_contiguous(words, xp), scales, offsets, self.bits, group)


class GPTQ(_Packed):
    """`qweight` [cols * bits / 32, rows], `scales` [groups, rows], `qzeros` packed along rows. The
    first format stores a zero less one."""

    weight = "qweight"
    scales = "scales"
    needed = ("qzeros",)
    others = ("g_idx",)

    def __init__(self, bits: int, *, less_one: bool) -> None:
        self.bits, self._less_one = bits, less_one

    def size(self, shapes: Shapes) -> tuple[int, int, int]:
        packed, rows = shapes["qweight"]
        return rows, packed * 32 // self.bits, shapes["scales"][0]

    def _check_shapes(self, module: str, shapes: Shapes) -> None:
        # Some tools give single layers more bits, and say so in words of their own.
        if shapes["qzeros"][-1] * 32 != shapes["qweight"][1] * self.bits:
            raise _unreadable(f"{module} has other than {self.bits} bits")
        super()._check_shapes(module, shapes)

    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Affine:
        scales = _floats(parts["scales"], xp).T
        zeros = _floats(_values(parts["qzeros"], self.bits, xp), xp).T
        zeros = zeros + 1 if self._less_one else zeros
        return self.affine(parts["qweight"].view(xp.uint32).T, scales, zeros, xp)


class AWQ(_Packed):
    """`qweight` [cols, rows / 8], `scales` [groups, rows], `qzeros` [groups, rows / 8]; the eight
    nibbles of a word are columns 0, 2, 4, 6, 1, 3, 5, 7."""

    weight = "qweight"
    scales = "scales"
    needed = ("qzeros",)
    bits = 4
    _PLACE_OF = (0, 4, 1, 5, 2, 6, 3, 7)

    def size(self, shapes: Shapes) -> tuple[int, int, int]:
        cols, packed = shapes["qweight"]
        return packed * 8, cols, shapes["scales"][0]

    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Affine:
        values = _contiguous(self._in_order(parts["qweight"], xp).T, xp)
        words = _contiguous(values[:, 0::2] | values[:, 1::2] << 4, xp).view(xp.uint32)
        zeros = self._in_order(parts["qzeros"], xp).T
        return self.affine(words, _floats(parts["scales"], xp).T, _floats(zeros, xp), xp)

    def _in_order(self, words: Array, xp: Module) -> Array:
        stored = _values(words, 4, xp)
        eight = stored.reshape(len(stored), -1, 8)[..., xp.array(self._PLACE_OF)]
        return eight.reshape(stored.shape)


class PackedIntegers(_Packed):
    """compressed-tensors' "pack-quantized": `weight_packed` [rows, cols * bits / 32],
    `weight_scale` [rows, groups], perhaps `weight_zero_point` packed along rows; all with
    2^(bits - 1) added."""

    weight = "weight_packed"
    scales = "weight_scale"
    others = ("weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def size(self, shapes: Shapes) -> tuple[int, int, int]:
        rows, packed = shapes["weight_packed"]
        return rows, packed * 32 // self.bits, shapes["weight_scale"][-1]

    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Affine:
        scales = _floats(parts["weight_scale"], xp)
        zeros = xp.array(float(1 << self.bits - 1), dtype=xp.float32)
        if "weight_zero_point" in parts:
            stored = _values(parts["weight_zero_point"].T, self.bits, xp)
            zeros = _floats(stored.T, xp)
        return self.affine(parts["weight_packed"].view(xp.uint32), scales, zeros, xp)


class PlainIntegers(_Packed):
    """compressed-tensors' "int-quantized": `weight` int8 [rows, cols], `weight_scale`
    [rows, groups]."""

    scales = "weight_scale"
    others = ("weight_zero_point", "input_scale", "input_zero_point")
    bits = 8

    def size(self, shapes: Shapes) -> tuple[int, int, int]:
        rows, cols = shapes["weight"]
        return rows, cols, prod(shapes["weight_scale"][1:])

    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Affine:
        values = _contiguous(parts["weight"], xp).view(xp.uint8) ^ 0x80
        scales = _by_row(parts["weight_scale"], values.shape[0], xp)
        zeros = xp.array(128.0, dtype=xp.float32)
        if "weight_zero_point" in parts:
            zeros = zeros + _by_row(parts["weight_zero_point"], values.shape[0], xp)
        return self.affine(_contiguous(values, xp).view(xp.uint32), scales, zeros, xp)


class Ternary(_Packed):
    """BitNet's: `weight` uint8 [rows / 4, cols], whose four values of two bits, with 1 added, are
    of rows a quarter of all apart, the lowest bits the first; `weight_scale` is one number, which
    multiplies, or by which is divided."""

    scales = "weight_scale"
    bits = 2

    def __init__(self, *, divides: bool) -> None:
        self._divides = divides

    def size(self, shapes: Shapes) -> tuple[int, int, int]:
        packed, cols = shapes["weight"]
        return 4 * packed, cols, prod(shapes["weight_scale"])

    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Affine:
        quarters = [parts["weight"] >> shift & 3 for shift in range(0, 8, 2)]
        values = xp.concatenate(quarters, axis=0)
        octets = values[:, 0::4]
        for i in range(1, 4):
            octets = octets | values[:, i::4] << 2 * i
        scales = _by_row(parts["weight_scale"], len(values), xp)
        scales = 1 / scales if self._divides else scales
        words = _contiguous(octets, xp).view(xp.uint32)
        return self.affine(words, scales, xp.array(1.0, dtype=xp.float32), xp)


class Float8Blocks(Quantizer):
    """`weight` float8 [rows, cols] and a scale for all, for each row, or for each block of rows and
    columns: floats, or powers of two in a byte."""

    others = ("input_scale", "weight_zero_point")

    def __init__(self, scales: str, block: tuple[int, int]) -> None:
        self.scales = scales
        self._block = block

    def _check_shapes(self, module: str, shapes: Shapes) -> None:
        (rows, cols), stored = shapes["weight"], shapes[self.scales]
        height, width = self._block
        known = ((-(-rows // height), -(-cols // width)), (rows, 1), (rows,), (1, 1), (1,), ())
        if stored not in known:
            raise ModelUnsupported(
                f"{module} is {rows} x {cols} with scales of shape {list(stored)}; exo knows one "
                f"for all, one a row, and blocks of {height} x {width}"
            )

    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Float8:
        values = parts["weight"].view(xp.uint8)
        (rows, cols), stored = values.shape, parts[self.scales]
        if stored.dtype == xp.uint8:  # E8M0, a float's exponent
            stored = (stored.astype(xp.uint32) << 23).view(xp.float32)
        height, width = self._block
        if stored.ndim == 2 and stored.shape == (-(-rows // height), -(-cols // width)):
            scales = xp.repeat(_floats(stored, xp), height, axis=0)[:rows]
            return Float8(values, _contiguous(scales, xp), width)
        return Float8(values, _by_row(stored, rows, xp), cols)


class NVFP4(Quantizer):
    """Float4 with a float8 scale for 16 columns and one more for all, which compressed-tensors
    divides by (`weight_global_scale`) and ModelOpt multiplies with (`weight_scale_2`)."""

    scales = "weight_scale"
    others = ("input_global_scale", "input_scale")

    def __init__(self, *, compressed_tensors: bool) -> None:
        self._divides = compressed_tensors
        self.weight = "weight_packed" if compressed_tensors else "weight"
        self.needed = ("weight_global_scale" if compressed_tensors else "weight_scale_2",)

    def _check_shapes(self, module: str, shapes: Shapes) -> None:
        (rows, packed), scales = shapes[self.weight], shapes["weight_scale"]
        if scales != (rows, 2 * packed / _FLOAT4_GROUP):
            raise ModelUnsupported(
                f"{module} is {rows} x {2 * packed} with scales of shape {list(scales)}; NVFP4 has "
                f"one for {_FLOAT4_GROUP} columns"
            )

    def unpacked(self, parts: Mapping[str, Array], xp: Module) -> Float4:
        scale = _floats(parts[self.needed[0]], xp).reshape(-1)[0]
        values, scales = (parts[name].view(xp.uint8) for name in (self.weight, "weight_scale"))
        return Float4(values, scales, 1 / scale if self._divides else scale)


def quantizer_of(config: Mapping[str, Any]) -> Quantizer | None:
    """What the checkpoint with this config.json was quantized with; None: nothing, or what only MLX
    and mlx-lm know.

    Raises:
        ModelUnsupported: nobody here can read it; the message says what to take instead.
    """
    how = config.get("quantization_config")
    if "quantization" in config or not isinstance(how, Mapping):
        return None
    method = str(how.get("quant_method", "")).lower()
    if method in ("gptq", "awq", "auto-round", "autoround", "intel/auto-round"):
        return _of_gptq_or_awq(method, how)
    if method == "compressed-tensors":
        return _of_compressed_tensors(how)
    if method in ("fp8", "fbgemm_fp8"):
        block = how.get("weight_block_size")
        if how.get("scale_fmt") == "ue8m0" and list(block or ()) == [32, 32]:
            return None
        height, width = block or (_FLOAT8_BLOCK, _FLOAT8_BLOCK)
        scales = "weight_scale_inv" if method == "fp8" else "weight_scale"
        return Float8Blocks(scales, (int(height), int(width)))
    if method == "bitnet":
        if how.get("quantization_mode", "offline") != "offline":
            raise _unreadable("its weights become ternary only as they are used")
        if how.get("use_rms_norm"):
            raise _unreadable("its BitNet layers have norms of their own")
        return Ternary(divides=how.get("linear_class", "bitlinear") != "autobitlinear")
    if method == "modelopt" and how.get("quant_algo") == "NVFP4":
        return NVFP4(compressed_tensors=False)
    if method == "modelopt" and how.get("quant_algo") == "FP8":
        return Float8Blocks("weight_scale", (_FLOAT8_BLOCK, _FLOAT8_BLOCK))
    if method in ("bitsandbytes", "hqq", "exl2", "exl3", "aqlm", "quip", "torchao", "eetq", "vptq"):
        raise _unreadable(f"it was quantized by {method}")
    return None


def _of_gptq_or_awq(method: str, how: Mapping[str, Any]) -> Quantizer:
    bits = int(how.get("bits") or how.get("w_bit") or 4)
    layout = str(how.get("packing_format") or how.get("checkpoint_format") or method).lower()
    if how.get("desc_act"):
        raise _unreadable("its columns are quantized out of order (GPTQ with desc_act)")
    if "awq" in layout or method == "awq":
        if bits != 4 or str(how.get("version", "gemm")).lower() != "gemm":
            raise _unreadable(f"it is AWQ of {bits} bits, version {how.get('version')}")
        return AWQ()
    if bits not in (2, 4, 8):
        raise _unreadable(f"it is GPTQ of {bits} bits")
    return GPTQ(bits, less_one="v2" not in layout)


def _of_compressed_tensors(how: Mapping[str, Any]) -> Quantizer | None:
    layout = str(how.get("format"))
    groups = [g.get("weights") or {} for g in (how.get("config_groups") or {}).values()]
    bits = {int(weights.get("num_bits") or 0) for weights in groups}
    if any(weights.get("actorder") in ("group", "dynamic") for weights in groups):
        raise _unreadable("its columns are quantized out of order (actorder)")
    if layout == "nvfp4-pack-quantized":
        return NVFP4(compressed_tensors=True)
    if layout == "mxfp4-pack-quantized":
        return None
    if layout == "pack-quantized" and len(bits) == 1 and bits <= {4, 8}:
        return PackedIntegers(bits.pop())
    if layout in ("int-quantized", "naive-quantized") and bits == {8}:
        return PlainIntegers()
    if layout == "float-quantized" and bits == {8}:
        block = next((w["block_structure"] for w in groups if w.get("block_structure")), None)
        height, width = block or (_FLOAT8_BLOCK, _FLOAT8_BLOCK)
        return Float8Blocks("weight_scale", (int(height), int(width)))
    raise _unreadable(f"it is compressed-tensors' {layout} of {sorted(bits)} bits")


def _unreadable(why: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"exo cannot read these weights: {why}. Take the model as GGUF, as MLX, AWQ, GPTQ or FP8 "
        "quantize it, or not quantized at all"
    )


# Arrays ---------------------------------------------------------------------------------------


def _contiguous(array: Array, xp: Module) -> Array:
    return xp.ascontiguousarray(array) if hasattr(xp, "ascontiguousarray") else xp.contiguous(array)


def _floats(array: Array, xp: Module) -> Array:
    return array.astype(xp.float32)


def _values(words: Array, bits: int, xp: Module) -> Array:
    """Unsigned values in int32 words along the last axis, lowest bits first: uint8 [..., n]."""
    octets = _contiguous(words, xp).view(xp.uint8)
    if bits == 8:
        return octets
    each = [octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return xp.stack(each, axis=-1).reshape(*octets.shape[:-1], -1)


def _by_row(scales: Array, rows: int, xp: Module) -> Array:
    """One scale for all, one a row or several a row: float32 [rows, n]."""
    some = _floats(scales, xp).reshape(1, 1) if scales.size == 1 else _floats(scales, xp)
    some = some.reshape(len(some), -1)
    return xp.repeat(some, rows, axis=0) if len(some) == 1 and rows > 1 else some
