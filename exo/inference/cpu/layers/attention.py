"""Attention: which tensors a layer has for it, and the matrices made of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.layers import blocks, pools
from exo.inference.cpu.packing import Packer, as_list, norm


def tensors(
    arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str, index: int
) -> Iterator[str]:
    has_keys = arch.kv_from[index] == index
    if arch.head_norms:
        yield f"{prefix}.q_norm.weight"
        if has_keys:
            yield f"{prefix}.k_norm.weight"
    if index in arch.sink_layers:
        yield f"{prefix}.sinks"
    if arch.blocks and index in arch.blocks.layers:
        yield from blocks.tensors(checkpoint, prefix)
    if arch.pools:
        yield from pools.tensors(checkpoint, prefix)
    for name in _projections(arch, index):
        yield from checkpoint.parts(f"{prefix}.{name}")


def _projections(arch: Architecture, index: int) -> list[str]:
    if arch.family.fused_attention:
        return ["qkv_proj", "o_proj"]
    names = ["q_proj", "o_proj"]
    if arch.family.output_gate in ("sigmoid", "softplus"):
        names.append("gate_proj")
    if arch.kv_from[index] == index:
        names += ["k_proj"] if index in arch.values_are_keys else ["k_proj", "v_proj"]
    return names


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer, index: int) -> None:
    family, heads = arch.family, arch.query_heads[index]
    q = heads * arch.head_dim
    has_keys = arch.kv_from[index] == index
    layer.heads, (layer.kv_heads, layer.head_dim) = heads, arch.head_shapes[index]
    layer.kv_from = -1 if has_keys else arch.kv_from[index]
    for part in arch.plain_norms[index]:
        setattr(layer, f"{part}_norm", [1.0] * layer.head_dim)
    if arch.head_norms:
        layer.q_norm = norm(family, packer, f"{prefix}.q_norm.weight")
        if has_keys:
            layer.k_norm = norm(family, packer, f"{prefix}.k_norm.weight")
    layer.norm_after_rope = family.norm_after_rope
    layer.value_dim, layer.value_scale = arch.value_dim, arch.value_scale
    if index in arch.sink_layers:
        layer.sinks = as_list(packer.floats(f"{prefix}.sinks"))
    if family.fused_attention == "stacked":
        kv = arch.kv_heads * arch.head_dim
        layer.q, layer.k, layer.v = packer.split(f"{prefix}.qkv_proj", [q, kv, kv])
    elif family.fused_attention == "by_kv_head":
        own = heads // arch.kv_heads + 2
        every = np.arange(arch.kv_heads * own * arch.head_dim)
        groups = every.reshape(arch.kv_heads, own, arch.head_dim)
        rows = [part.reshape(-1) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])]
        layer.q, layer.k, layer.v = packer.pick(f"{prefix}.qkv_proj", rows)
    else:
        if family.output_gate == "in_queries":
            both = np.arange(2 * q).reshape(heads, 2, arch.head_dim)
            rows = [both[:, 0].reshape(-1), both[:, 1].reshape(-1)]
            layer.q, layer.output_gate = packer.pick(f"{prefix}.q_proj", rows)
        else:
            layer.q = packer.matrix(f"{prefix}.q_proj")
        for name in set(_projections(arch, index)) & {"k_proj", "v_proj"}:
            setattr(layer, name[0], packer.matrix(f"{prefix}.{name}"))
    if family.output_gate in ("sigmoid", "softplus"):
        layer.output_gate = packer.matrix(f"{prefix}.gate_proj")
        layer.softplus_gate = family.output_gate == "softplus"
    if arch.blocks and index in arch.blocks.layers:
        layer.blocks = blocks.build(family, arch.blocks, layer.kv_heads, packer, prefix)
    if arch.pools:
        layer.pooled = pools.build(packer, prefix, arch.pools)
    layer.o = packer.matrix(f"{prefix}.o_proj")
