"""Several hidden states of a token (DeepSeek V4, Hy4, GLM 5.3): which tensors read and mix them,
and what is made of these."""

from __future__ import annotations

import numpy as np

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Hyper
from exo.inference.cpu.packing import Packer, as_list

LAYER = {"attention_streams": "attn_hc", "mlp_streams": "ffn_hc"}
"""The native layer's name, and the checkpoint's."""

_PARTS = ("fn", "base", "scale")


def tensors(prefix: str) -> list[str]:
    return [f"{prefix}.{module}.{part}" for module in LAYER.values() for part in _PARTS]


_LAST = [f"model.hc_head.hc_{part}" for part in _PARTS]


def last_tensors(checkpoint: CanonicalCheckpoint) -> list[str]:
    """Of what makes one state of several, after the last layer, if it is not their mean."""
    return [name for name in _LAST if name in checkpoint]


def build(packer: Packer, prefix: str, sizes: Hyper) -> dict[str, native.HyperConnection]:
    """By the native layer's names. One scale for the rows of each kind: how streams are read, how
    they are added to, and how they mix, if they do."""
    rows = [sizes.streams] * 2 + [sizes.streams**2] * (sizes.rounds > 0)
    return {
        name: _connection(packer, [f"{prefix}.{module}.{part}" for part in _PARTS], rows)
        for name, module in LAYER.items()
    }


def build_last(packer: Packer, sizes: Hyper) -> native.HyperConnection | None:
    if not last_tensors(packer.checkpoint):
        return None
    return _connection(packer, _LAST, [sizes.streams])


def _connection(packer: Packer, names: list[str], rows: list[int]) -> native.HyperConnection:
    mix, base, scales = map(packer.floats, names)
    found = native.HyperConnection()
    found.mix = packer.dense(mix)
    found.base = as_list(base)
    found.scales = as_list(np.repeat(scales, rows))
    return found
