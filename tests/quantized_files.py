"""Tiny checkpoints as GPTQ, AWQ, compressed-tensors, FP8, BitNet and bitsandbytes store them, each
beside the numbers it stands for.

Layouts and configurations are those of repositories on the hub: Qwen's of Qwen2.5 and Qwen3 (GPTQ,
AWQ, FP8), RedHatAI's (compressed-tensors), unsloth's (bitsandbytes), tiiuae's Falcon3 of 1.58 bits
and microsoft's (BitNet).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Parts = dict[str, Array]
Layer = tuple[Parts, npt.NDArray[np.float32]]
"""The tensors that store a layer, and its weights as they are then."""

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_DTYPES = {
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "float32": "F32",
    "float16": "F16",
}


_FLOAT_TYPES = {
    ("FP8", "weight"): "F8_E4M3",
    ("FP8", "weight_scale_inv"): "F8_E8M0",
    ("NVF", "weight_scale"): "F8_E4M3",
}
"""By the kind's first letters and the part of a layer."""


def write_safetensors(path: Path, tensors: dict[str, Array], types: dict[str, str]) -> None:
    """`types`: of those that numpy has none for, given as bytes."""
    header, blobs, at = {}, [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        dtype = types.get(name) or _DTYPES[array.dtype.name]
        place = [at, at + len(blob)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        blobs.append(blob)
        at += len(blob)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(blobs))


def _words(values: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Values along the last axis in int32 words, lowest bits first."""
    each = 32 // bits
    found = np.zeros((*values.shape[:-1], values.shape[-1] // each), np.uint32)
    for i, place in enumerate(order or range(each)):
        found |= values[..., place::each].astype(np.uint32) << np.uint32(bits * i)
    return found.view(np.int32)


def _asymmetric(weight: Array, bits: int, group: int) -> tuple[Array, Array, Array]:
    """Values [rows, cols], scales and zeros [rows, groups] of a common tool."""
    rows, cols = weight.shape
    apart = weight.reshape(rows, cols // group, group)
    low, high = apart.min(-1), apart.max(-1)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 1, 2**bits - 1)
    values = np.clip(np.round(apart / scales[..., None]) + zeros[..., None], 0, 2**bits - 1)
    return values.reshape(rows, cols).astype(np.uint32), scales, zeros.astype(np.uint32)


def _numbers(values: Array, scales: Array, zeros: Array | float) -> npt.NDArray[np.float32]:
    rows, groups = scales.shape
    apart = values.reshape(rows, groups, -1).astype(np.float64)
    offset = np.broadcast_to(np.asarray(zeros, np.float64), scales.shape)
    found = (apart - offset[..., None]) * scales[..., None]
    return found.reshape(rows, -1).astype(np.float32)


def gptq(bits: int, *, v2: bool = False) -> Callable[[Array], Layer]:
    def layer(weight: Array) -> Layer:
        values, scales, zeros = _asymmetric(weight, bits, GROUP)
        stored = zeros - (0 if v2 else 1)
        parts = {
            "qweight": np.ascontiguousarray(_words(values, bits).T),
            "qzeros": _words(np.ascontiguousarray(stored.T), bits),
            "scales": np.ascontiguousarray(scales.T.astype(np.float16)),
            "g_idx": (np.arange(weight.shape[1]) // GROUP).astype(np.int32),
        }
        return parts, _numbers(values, scales, zeros)

    return layer


def awq(weight: Array) -> Layer:
    values, scales, zeros = _asymmetric(weight, 4, GROUP)
    parts = {
        "qweight": _words(np.ascontiguousarray(values.T), 4, _AWQ_ORDER),
        "qzeros": _words(np.ascontiguousarray(zeros.T), 4, _AWQ_ORDER),
        "scales": np.ascontiguousarray(scales.T.astype(np.float16)),
    }
    return parts, _numbers(values, scales, zeros)


def packed_integers(bits: int, *, symmetric: bool) -> Callable[[Array], Layer]:
    def layer(weight: Array) -> Layer:
        values, scales, zeros = _asymmetric(weight, bits, GROUP)
        parts = {
            "weight_packed": _words(values, bits),
            "weight_scale": scales.astype(np.float16),
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if symmetric:
            return parts, _numbers(values, scales, 2 ** (bits - 1))
        parts["weight_zero_point"] = np.ascontiguousarray(_words(zeros.T, bits).T)
        return parts, _numbers(values, scales, zeros)

    return layer


def plain_integers(weight: Array) -> Layer:
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.round(weight / scales).astype(np.int8)
    return {"weight": values, "weight_scale": scales}, (values * scales).astype(np.float32)


def float8(
    block: tuple[int, int] | None, name: str, *, powers: bool = False
) -> Callable[[Array], Layer]:
    """`block`: rows and columns that share a scale; None: each row has one. `powers`: of two."""

    def layer(weight: Array) -> Layer:
        rows, cols = weight.shape
        height, width = block or (1, cols)
        high = np.zeros((-(-rows // height), -(-cols // width)), np.float32)
        for (i, j), _ in np.ndenumerate(high):
            high[i, j] = np.abs(
                weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
            ).max()
        scales = (high / 448).astype(np.float32)
        exponents = np.ceil(np.log2(scales)).astype(int)
        if powers:
            scales = np.ldexp(np.float32(1), exponents)
        wide = scales.repeat(height, 0)[:rows].repeat(width, 1)[:, :cols]
        values = mx.to_fp8(mx.array(weight / wide))
        numbers = np.array(mx.from_fp8(values, mx.float32)) * wide
        stored = (exponents + 127).astype(np.uint8) if powers else scales
        return {"weight": np.array(values), name: stored}, numbers

    return layer


def nvfp4(*, modelopt: bool) -> Callable[[Array], Layer]:
    def layer(weight: Array) -> Layer:
        divisor = np.array([2.5], np.float32)
        how: dict[str, Any] = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
        values, scales = mx.quantize(mx.array(weight * divisor), **how)
        parts = {
            "weight" if modelopt else "weight_packed": np.array(values).view(np.uint8),
            "weight_scale": np.array(scales),
        }
        if modelopt:
            parts |= {"weight_scale_2": 1 / divisor[0], "input_scale": np.ones((), np.float32)}
        else:
            parts |= {"weight_global_scale": divisor, "input_global_scale": divisor}
        numbers = mx.dequantize(values, scales, **how).astype(mx.float32)
        return parts, np.array(numbers) * (1 / divisor)

    return layer


def bitsandbytes(weight: Array) -> Layer:
    shape = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)})
    parts = {
        "weight": np.zeros((weight.size // 2, 1), np.uint8),
        "weight.absmax": np.zeros(weight.size // 64, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(shape.encode(), np.uint8),
    }
    return parts, weight


def _compressed(layout: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "symmetric": True, "actorder": None, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def ternary(*, divides: bool) -> Callable[[Array], Layer]:
    def layer(weight: Array) -> Layer:
        scale = np.float32(np.abs(weight).mean())
        values = np.clip(np.round(weight / scale), -1, 1).astype(np.int8)
        quarters = (values + 1).astype(np.uint8).reshape(4, -1, weight.shape[1])
        packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        stored = np.array([1 / scale if divides else scale], np.float32)
        by = 1 / stored if divides else stored
        return {"weight": packed, "weight_scale": stored}, values.astype(np.float32) * by

    return layer


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": True}

KINDS: dict[str, tuple[Callable[[Array], Layer], dict[str, Any]]] = {
    "GPTQ": (gptq(4), _GPTQ | {"bits": 4}),
    "GPTQ, 8 bits": (gptq(8), _GPTQ | {"bits": 8}),
    "GPTQ v2": (gptq(4, v2=True), _GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}),
    "AWQ": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    ),
    "w4a16": (packed_integers(4, symmetric=True), _compressed("pack-quantized", 4)),
    "w4a16, zeros": (packed_integers(4, symmetric=False), _compressed("pack-quantized", 4)),
    "w8a16": (packed_integers(8, symmetric=True), _compressed("pack-quantized", 8)),
    "w8a8": (plain_integers, _compressed("int-quantized", 8)),
    "FP8 in blocks": (
        float8((32, 48), "weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 48]},
    ),
    "NVFP4": (nvfp4(modelopt=False), _compressed("nvfp4-pack-quantized", 4, type="float")),
    "NVFP4 of ModelOpt": (
        nvfp4(modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
    "FP8 in blocks, powers": (
        float8((64, 32), "weight_scale_inv", powers=True),
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [64, 32]},
    ),
    "BitNet": (
        ternary(divides=False),
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
    ),
    "BitNet, divided": (ternary(divides=True), {"quant_method": "bitnet"}),
    "FP8 by rows": (float8(None, "weight_scale"), _compressed("float-quantized", 8, type="float")),
}
"""By name: how a layer is stored, and the quantization_config."""


def write(kind: str, source: Path, packed: Path, plain: Path) -> None:
    """The float32 checkpoint in `source` quantized, and once more with the numbers it has then."""
    layer, how = KINDS.get(kind, (bitsandbytes, {"quant_method": "bitsandbytes"}))
    weights = {n: np.array(a) for n, a in mx.load(str(source / "model.safetensors")).items()}
    stored: dict[str, Array] = {}
    numbers: dict[str, Array] = {}
    for name, array in weights.items():
        module = name.removesuffix(".weight")
        if array.ndim != 2 or not module.endswith("_proj"):
            stored[name] = numbers[name] = array
            continue
        parts, numbers[name] = layer(array)
        stored |= {f"{module}.{part}": values for part, values in parts.items()}
    types = {}
    for name, array in stored.items():
        part = name.rpartition(".")[2]
        if array.dtype == np.uint8 and kind.startswith(("FP8", "NVFP4")):
            types[name] = _FLOAT_TYPES.get((kind[:3], part), "U8")
    packed.mkdir()
    plain.mkdir()
    write_safetensors(packed / "model.safetensors", stored, types)
    write_safetensors(plain / "model.safetensors", numbers, {})
    config = json.loads((source / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    (plain / "config.json").write_text(json.dumps(config))


def with_convolutions_as_trained(folder: Path) -> None:
    """Whose axes mlx-lm turns."""
    file = str(folder / "model.safetensors")
    found = {
        name: array.moveaxis(1, 2) if "conv1d.weight" in name else array
        for name, array in mx.load(file).items()
    }
    write_safetensors(Path(file), {name: np.array(array) for name, array in found.items()}, {})


def with_single_experts(source: Path, target: Path) -> None:
    """The checkpoint as it was trained: a tensor for each expert, where mlx-lm stacks them."""
    found: dict[str, Array] = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        if ".switch_mlp." in name:
            for index, one in enumerate(np.array(array)):
                found[name.replace(".switch_mlp.", f".experts.{index}.")] = one
        else:
            found[name] = np.array(array)
    target.mkdir()
    write_safetensors(target / "model.safetensors", found, {})
    (target / "config.json").write_text((source / "config.json").read_text())
