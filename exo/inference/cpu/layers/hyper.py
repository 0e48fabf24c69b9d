"""Several hidden states of a token (DeepSeek V4, Hy4, GLM 5.3, Qwen3.8 Flash Next): which tensors
read and mix them, and what is made of these."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.streams import Hyper
from exo.inference.cpu.packing import Packer, as_list

_MIXED = {"attention_streams": "attn_hc", "mlp_streams": "ffn_hc"}
_GATED = {"attention_streams": "attn_hyper_connection", "mlp_streams": "mlp_hyper_connection"}
"""The native layer's name, and the checkpoint's: where one matrix says all, and of low rank."""

_PARTS = ("fn", "base", "scale")
_LAST = [f"model.hc_head.hc_{part}" for part in _PARTS]
_INJECT = "block_inject_weight"
_LAST_GATED = "model.hyper_connection_mixer"


def tensors(checkpoint: CanonicalCheckpoint, prefix: str, sizes: Hyper) -> Iterator[str]:
    if sizes.rank:
        for module in _GATED.values():
            yield from _gated_tensors(checkpoint, f"{prefix}.{module}")
            yield from checkpoint.parts(f"{prefix}.{module}.{_INJECT}")
    else:
        yield from (f"{prefix}.{module}.{part}" for module in _MIXED.values() for part in _PARTS)


def last_tensors(checkpoint: CanonicalCheckpoint, sizes: Hyper) -> list[str]:
    """Of what makes one state of several, after the last layer, if it is not their mean."""
    if sizes.rank:
        return list(_gated_tensors(checkpoint, _LAST_GATED))
    return [name for name in _LAST if name in checkpoint]


def build(packer: Packer, prefix: str, sizes: Hyper) -> dict[str, native.HyperConnection]:
    """By the native layer's names. One scale for the rows of each kind: how streams are read, how
    they are added to, and how they mix, if they do."""
    if sizes.rank:
        return {name: _gated(packer, f"{prefix}.{module}") for name, module in _GATED.items()}
    rows = [sizes.streams] * 2 + [sizes.streams**2] * (sizes.rounds > 0)
    return {
        name: _connection(packer, [f"{prefix}.{module}.{part}" for part in _PARTS], rows)
        for name, module in _MIXED.items()
    }


def build_last(packer: Packer, sizes: Hyper) -> native.HyperConnection | None:
    if not last_tensors(packer.checkpoint, sizes):
        return None
    if sizes.rank:
        return _gated(packer, _LAST_GATED)
    return _connection(packer, _LAST, [sizes.streams])


def _connection(packer: Packer, names: list[str], rows: list[int]) -> native.HyperConnection:
    mix, base, scales = map(packer.floats, names)
    found = native.HyperConnection()
    found.mix = packer.dense(mix)
    found.base = as_list(base)
    found.scales = as_list(np.repeat(scales, rows))
    return found


def _gated_tensors(checkpoint: CanonicalCheckpoint, module: str) -> Iterator[str]:
    yield f"{module}.hc_norm.weight"
    for part in ("input_mix_weight_down", "input_mix_weight_up"):
        yield from checkpoint.parts(f"{module}.{part}")


def _gated(packer: Packer, module: str) -> native.HyperConnection:
    found = native.HyperConnection()
    found.norm = as_list(packer.floats(f"{module}.hc_norm.weight").reshape(-1))
    found.down = packer.matrix(f"{module}.input_mix_weight_down")
    found.up = packer.matrix(f"{module}.input_mix_weight_up")
    if f"{module}.{_INJECT}.weight" in packer.checkpoint:  # the last adds to nothing
        found.mix = packer.matrix(f"{module}.{_INJECT}")
    return found
