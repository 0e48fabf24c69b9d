"""Tensors of GGUF files as MLX's kernels hold them: affine, in groups of 32 columns.

Formats: block_q4_0 and so on in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
All with one scale in 32 columns stay what they are, but for scales and offsets, which are rounded
to the activations' type. Q2_K, Q3_K and Q6_K have one in 16; they are quantized anew, with more
bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from exo.errors import ModelUnsupported
from exo.inference.mlx.gguf_layouts import JoinedRows, LatentHeads, ValueHeads
from exo.inference.mlx.shared_choice import unread_weights
from exo.models.checkpoint import Checkpoint, Tensor
from exo.models.description import read_config
from exo.models.gguf.names import TENSOR_SCALE
from exo.models.gguf.unpacking import TWO_BITS, mxfp4_of_pairs, two_bits

GROUP = 32

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Unpacked = tuple[Bytes, Floats, Floats]
"""Of blocks [n, bytes]: values [n, groups, 32], scales and offsets [n, groups]."""


def _half(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(quants: Bytes) -> Bytes:
    """[n, groups * 16] to [n, groups, 32]: a group's low halves, then its high ones."""
    apart = quants.reshape(len(quants), -1, 16)
    return np.concatenate([apart & 15, apart >> 4], axis=-1)


def _fifth_bits(high: Bytes) -> Bytes:
    return np.unpackbits(high, axis=1, bitorder="little")[:, None, :] * np.uint8(16)


def _about(zero: int, values: Bytes, scales: Floats) -> Unpacked:
    return values, scales, np.float32(-zero) * scales


def _q4_0(b: Bytes) -> Unpacked:
    return _about(8, _nibbles(b[:, 2:]), _half(b, 0))


def _q4_1(b: Bytes) -> Unpacked:
    return _nibbles(b[:, 4:]), _half(b, 0), _half(b, 2)


def _q5_0(b: Bytes) -> Unpacked:
    return _about(16, _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), _half(b, 0))


def _q5_1(b: Bytes) -> Unpacked:
    return _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: Bytes) -> Unpacked:
    return _about(128, b[:, None, 2:] ^ np.uint8(0x80), _half(b, 0))


_FOUR_BIT_TABLE = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
)
_IQ4 = (_FOUR_BIT_TABLE + 128).astype(np.uint8)
_E2M1 = np.array([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], np.uint8)


def _iq4_nl(b: Bytes) -> Unpacked:
    return _about(128, _IQ4[_nibbles(b[:, 2:])], _half(b, 0))


def _iq4_xs(b: Bytes) -> Unpacked:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = b[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2) & 3
    codes = (low | high << 4).astype(np.float32) - 32
    return _about(128, _IQ4[_nibbles(b[:, 8:])], _half(b, 0) * codes)


def _mxfp4(b: Bytes) -> Unpacked:
    return _about(
        12, _E2M1[_nibbles(b[:, 1:])], np.ldexp(np.float32(1), b[:, :1].astype(int) - 128)
    )


def _six_bits(b: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of Q4_K and Q5_K, whose 12 bytes hold 8 of each."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    codes = np.concatenate([low & 63, (high & 15) | low >> 6 << 4], axis=1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return _half(b, 0) * codes, -_half(b, 2) * mins


def _pairs(quants: Bytes) -> Bytes:
    """The quants of a super-block: 32 bytes hold a group in their low halves, the next in the
    high ones."""
    apart = quants.reshape(len(quants), 4, 32)
    return np.stack([apart & 15, apart >> 4], axis=2).reshape(len(quants), 8, 32)


def _q4_k(b: Bytes) -> Unpacked:
    return _pairs(b[:, 16:]), *_six_bits(b)


def _q5_k(b: Bytes) -> Unpacked:
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) * np.uint8(16)
    return np.bitwise_or(_pairs(b[:, 48:]), fifth, dtype=np.uint8), *_six_bits(b)


def _two_bits(dtype: str) -> Callable[[Bytes], Unpacked]:
    groups = TWO_BITS[dtype][0] // GROUP

    def unpack(b: Bytes) -> Unpacked:
        values, scales = two_bits(dtype, b)
        of_groups = np.repeat(scales.astype(np.float32)[:, None], groups, axis=1)
        return _about(1, values.reshape(-1, groups, GROUP), of_groups)

    return unpack


_EXACT: dict[str, tuple[int, int, Callable[[Bytes], Unpacked]]] = {
    "Q4_0": (4, 18, _q4_0),
    "Q4_1": (4, 20, _q4_1),
    "Q5_0": (5, 22, _q5_0),
    "Q5_1": (5, 24, _q5_1),
    "Q8_0": (8, 34, _q8_0),
    "Q4_K": (4, 144, _q4_k),
    "Q5_K": (5, 176, _q5_k),
    "IQ4_NL": (8, 18, _iq4_nl),
    "IQ4_XS": (8, 136, _iq4_xs),
    "MXFP4": (5, 17, _mxfp4),
    "MXFP4_PAIRS": (5, 17, lambda blocks: _mxfp4(mxfp4_of_pairs(blocks))),
    **{dtype: (2, size, _two_bits(dtype)) for dtype, (_, size) in TWO_BITS.items()},
}
"""Bits, bytes of a block, and how it is read."""

_WIDENED = {
    **{"Q2_K": 4, "Q3_K": 6, "Q6_K": 8, "NVFP4": 8},
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 6),
}


def _bits(dtype: str) -> int:
    """Bits of a format in MLX's layout; 0 where it is plain numbers."""
    return _EXACT[dtype][0] if dtype in _EXACT else _WIDENED.get(dtype, 0)


def affine(tensor: Tensor) -> tuple[npt.NDArray[np.uint32], Floats, Floats]:
    """A quantized tensor of [..., rows, cols] as `mx.quantize` would give it: packed weights
    uint32 [..., rows, cols * bits / 32], scales and offsets float32 [..., rows, cols / 32]."""
    if tensor.dtype not in _EXACT:
        dense = mx.array(_dequantized(tensor))
        made = mx.quantize(dense, group_size=GROUP, bits=_WIDENED[tensor.dtype])
        weight, scales, offsets = (np.array(part) for part in made)
        return weight, scales, offsets
    bits, size, unpack = _EXACT[tensor.dtype]
    values, scales, offsets = unpack(tensor.data.reshape(-1, size))
    *outer, cols = tensor.shape
    groups = (*outer, cols // GROUP)
    return (
        _packed(values.reshape(*outer, cols), bits),
        scales.reshape(groups),
        offsets.reshape(groups),
    )


def _dequantized(tensor: Tensor) -> Floats:
    from gguf import GGMLQuantizationType, quants  # late: takes a moment

    *outer, cols = tensor.shape
    blocks = tensor.data.reshape(int(np.prod(outer)), -1)
    floats: Floats = quants.dequantize(blocks, GGMLQuantizationType[tensor.dtype])
    return floats.reshape(*outer, cols)


def _packed(values: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Each row's values as one little-endian stream of bits."""
    if bits == 8:
        return np.ascontiguousarray(values).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(values[..., ::2] | values[..., 1::2] << 4).view(np.uint32)
    eight = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint64)
    stream = (eight << np.arange(0, 8 * bits, bits, dtype=np.uint64)).sum(-1, dtype=np.uint64)
    some = stream[..., None].view(np.uint8)[..., :bits]
    return np.ascontiguousarray(some.reshape(*values.shape[:-1], -1)).view(np.uint32)


_LAYER = re.compile(r"\.layers\.(\d+)\.")
_JOINED = {"shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj")}
"""Modules of mlx-lm's Granite whose rows are those of several in the file."""


class GGUFWeights:
    """A folder's GGUF weights for a model of mlx-lm, read module by module when they are wanted."""

    def __init__(self, path: Path, dtype: mx.Dtype | None) -> None:
        """`dtype`: of everything that is not packed; None: what a GPU computes the model in."""
        self._checkpoint = Checkpoint(path)
        config = read_config(path)
        self._n_layers = int(config["num_hidden_layers"])
        self._unread = unread_weights(config)
        is_tiled = bool(config.get("linear_value_heads_tiled"))
        self._value_heads = ValueHeads(config) if is_tiled else None
        self._is_out_grouped = "hadamard" in config
        self._joined_modules = _JOINED if config["model_type"] == "granitemoehybrid" else {}
        self._joined_rows = JoinedRows(config)
        self._latent_heads = LatentHeads(config) if config.get("kv_lora_rank") else None
        gemma = any(".post_feedforward_layernorm." in name for name in self._checkpoint.names())
        # Gemma's hidden states are larger than what float16 holds.
        self._dtype = dtype or (mx.bfloat16 if gemma else mx.float16)

    def stand_ins(self) -> dict[str, mx.array]:
        """Every parameter by name, with its shape and type and nothing computed."""
        found: dict[str, mx.array] = {}
        for name in self._checkpoint.names():
            layer = _LAYER.search(name)
            if layer is not None and int(layer[1]) >= self._n_layers:
                continue  # it guesses further tokens, which nobody asks for
            if name.startswith(self._unread):
                continue
            if name.endswith(TENSOR_SCALE):
                continue  # part of what it scales
            shape, dtype = self._checkpoint.shape(name), self._checkpoint.dtype(name)
            module = name.removesuffix(".weight")
            parts = self._joined_rows.made_of(name, shape)
            for made_name, made_shape in (parts or {name: shape}).items():
                found |= self._zeros(made_name, dtype, made_shape)
            if self._latent_heads and (made := self._latent_heads.made_of(name)):
                for part in ("weight", "scales", "biases"):
                    found.pop(f"{module}.{part}", None)
                found |= {made_name: mx.zeros(s, self._dtype) for made_name, s in made.items()}
        for name in list(found):
            module, _, part = name.rpartition(".")
            for whole, (first, second) in self._joined_modules.items():
                if module.endswith(first):
                    base = module.removesuffix(first)
                    rows = [found.pop(f"{base}{half}.{part}") for half in (first, second)]
                    found[f"{base}{whole}.{part}"] = mx.concatenate(rows)
        return found

    def _zeros(self, name: str, dtype: str, shape: tuple[int, ...]) -> dict[str, mx.array]:
        if not (bits := _bits(dtype)):
            return {name: mx.zeros(shape, self._dtype)}
        *outer, cols = shape
        module, groups = name.removesuffix(".weight"), (*outer, cols // GROUP)
        return {
            name: mx.zeros((*outer, cols * bits // 32), mx.uint32),
            f"{module}.scales": mx.zeros(groups, self._dtype),
            f"{module}.biases": mx.zeros(groups, self._dtype),
        }

    def check(self, model: nn.Module) -> None:
        """Every parameter is in the files and has its shape, and nothing else is there: weights
        that are left out would be another model.

        Raises:
            ModelUnsupported: one is not, or is; the message names it.
        """
        here = self.stand_ins()
        wanted = tree_flatten(model.parameters())
        if unused := set(here) - {name for name, _ in wanted}:
            raise ModelUnsupported(
                f"mlx-lm's class has no place for {min(unused)} of the GGUF file"
            )
        for name, parameter in wanted:
            if name not in here or here[name].shape != parameter.shape:
                found = here[name].shape if name in here else "nothing"
                raise ModelUnsupported(
                    f"mlx-lm's class wants {name} of {parameter.shape}, the GGUF file has {found}"
                )

    def read_into(self, module: nn.Module, prefix: str) -> None:
        """Give a module its parameters, whose names in the model begin with `prefix`."""
        made: dict[str, mx.array] = {}
        for name, _ in tree_flatten(module.parameters()):
            whole = f"{prefix}{name}"
            if whole not in made:
                made |= self._parameters(whole.rpartition(".")[0], whole)
        here = [(name.removeprefix(prefix), array) for name, array in made.items()]
        module.update(tree_unflatten(here))

    def _parameters(self, module: str, name: str) -> dict[str, mx.array]:
        """The parameter, and where it is one part of a quantized weight the other parts."""
        for joined, halves in self._joined_modules.items():
            if module.endswith(joined):
                base = module.removesuffix(joined)
                return self._joined(module, [f"{base}{half}" for half in halves])
        wanted = name if name in self._checkpoint else f"{module}.weight"
        stored, part = self._joined_rows.source(wanted, self._checkpoint.__contains__)
        if self._latent_heads is not None and stored not in self._checkpoint:
            made = self._latent_heads.make(stored, self._numbers)
            return {stored: mx.array(made).astype(self._dtype)}
        tensor = self._checkpoint.tensor(stored)
        tensor = part.of(tensor) if part is not None else tensor
        heads = self._value_heads if ".linear_attn." in stored else None
        is_out = stored.endswith(".out_proj.weight")
        if is_out and self._is_out_grouped:
            heads = None
        if heads and not is_out:
            tensor = heads.rows(tensor)
        if not _bits(tensor.dtype):
            numbers = tensor.floats()
            numbers = heads.columns(numbers) if heads and is_out else numbers
            return {wanted: mx.array(numbers).astype(self._dtype)}
        weight, scales, offsets = affine(tensor)
        of_all = f"{stored.removesuffix('.weight')}.{TENSOR_SCALE}"
        if of_all in self._checkpoint:
            factor = self._checkpoint.tensor(of_all).floats()  # one, or one for each expert
            factor = factor.reshape(-1, *[1] * (scales.ndim - 1))
            scales, offsets = scales * factor, offsets * factor
        if heads and is_out:
            weight, scales, offsets = map(heads.columns, (weight, scales, offsets))
        parts: dict[str, Any] = {
            f"{module}.weight": mx.array(weight),
            f"{module}.scales": mx.array(scales).astype(self._dtype),
            f"{module}.biases": mx.array(offsets).astype(self._dtype),
        }
        mx.eval(list(parts.values()))
        self._checkpoint.give_back(stored)
        return parts

    def _numbers(self, name: str) -> Floats:
        tensor = self._checkpoint.tensor(name)
        return _dequantized(tensor) if _bits(tensor.dtype) else tensor.floats()

    def _joined(self, module: str, parts: list[str]) -> dict[str, mx.array]:
        """One module whose rows are those of several, one after the other."""
        made = [self._parameters(part, f"{part}.weight") for part in parts]
        kinds = [name.rpartition(".")[2] for name in made[0]]
        return {
            f"{module}.{kind}": mx.concatenate(
                [arrays[f"{part}.{kind}"] for part, arrays in zip(parts, made, strict=True)]
            )
            for kind in kinds
        }
