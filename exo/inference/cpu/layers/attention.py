"""Attention: which tensors a layer has for it, and the matrices made of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer, as_list, norm


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    if arch.head_norms:
        yield f"{prefix}.q_norm.weight"
        yield f"{prefix}.k_norm.weight"
    if arch.family.sinks:
        yield f"{prefix}.sinks"
    fused = arch.family.fused_attention
    for name in (*(("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")), "o_proj"):
        yield from checkpoint.parts(f"{prefix}.{name}")


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer) -> None:
    family, q = arch.family, arch.heads * arch.head_dim
    if arch.head_norms:
        layer.q_norm = norm(family, packer, f"{prefix}.q_norm.weight")
        layer.k_norm = norm(family, packer, f"{prefix}.k_norm.weight")
        layer.norm_after_rope = family.norm_after_rope
    if family.sinks:
        layer.sinks = as_list(packer.floats(f"{prefix}.sinks"))
    if family.fused_attention:
        kv = arch.kv_heads * arch.head_dim
        layer.q, layer.k, layer.v = packer.split(f"{prefix}.qkv_proj", [q, kv, kv])
    else:
        if family.gated_attention:  # of each head its query, then its gate
            both = np.arange(2 * q).reshape(arch.heads, 2, arch.head_dim)
            rows = [both[:, 0].reshape(-1), both[:, 1].reshape(-1)]
            layer.q, layer.output_gate = packer.pick(f"{prefix}.q_proj", rows)
        else:
            layer.q = packer.matrix(f"{prefix}.q_proj")
        layer.k = packer.matrix(f"{prefix}.k_proj")
        layer.v = packer.matrix(f"{prefix}.v_proj")
    layer.o = packer.matrix(f"{prefix}.o_proj")
