"""Layers that remember a state: which tensors each has, and the native layer made of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer, as_list
from exo.models.delta_net_rows import ba_rows, qkvz_rows

_PROJECTIONS = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""What may be joined (Qwen3-Next), and what it is apart (Qwen3.5): its GGUF files have one of the
first and both of the second kind."""


def delta_net_tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.{name}" for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"))
    for joined, apart in _PROJECTIONS.items():
        is_joined = f"{prefix}.{joined}.weight" in checkpoint
        for name in (joined,) if is_joined else apart:
            yield from checkpoint.parts(f"{prefix}.{name}")
    yield from checkpoint.parts(f"{prefix}.out_proj")


def delta_net(arch: Architecture, packer: Packer, prefix: str) -> native.DeltaNet:
    sizes = arch.recurrent
    assert sizes is not None
    net = native.DeltaNet()
    net.key_heads, net.value_heads = sizes.key_heads, sizes.value_heads
    net.key_dim, net.value_dim = sizes.key_dim, sizes.value_dim
    net.tiled, net.regroups = sizes.tiled, sizes.tiled and sizes.regroups
    net.sigmoid_gate = sizes.sigmoid_gate
    qkvz = qkvz_rows(sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    rows = dict(zip(_PROJECTIONS, (qkvz, ba_rows(sizes.key_heads, sizes.value_heads)), strict=True))
    made = [
        packer.pick(f"{prefix}.{joined}", list(rows[joined]))
        if f"{prefix}.{joined}.weight" in packer.checkpoint
        else [packer.matrix(f"{prefix}.{name}") for name in apart]
        for joined, apart in _PROJECTIONS.items()
    ]
    (qkv, net.z), (net.b, net.a) = made
    net.qkv = [qkv]
    net.convolution = convolution(packer, f"{prefix}.conv1d")
    net.decay = as_list(np.exp(packer.floats(f"{prefix}.A_log")))
    net.dt_bias = as_list(packer.floats(f"{prefix}.dt_bias"))
    net.norm = as_list(packer.floats(f"{prefix}.norm.weight"))
    net.out = packer.matrix(f"{prefix}.out_proj")
    return net


def _kimi_projections(checkpoint: CanonicalCheckpoint, prefix: str) -> list[str]:
    """What decays and gates are made of may be a matrix, or two of low rank."""
    parts = ["q", "k", "v", "b", "o"]
    for part in ("f", "g"):
        is_one = f"{prefix}.{part}_proj.weight" in checkpoint
        parts += [part] if is_one else [f"{part}_a", f"{part}_b"]
    return parts


def kimi_delta_net_tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.{name}" for name in ("A_log", "dt_bias", "o_norm.weight"))
    yield from (f"{prefix}.{part}_conv.conv.weight" for part in "qkv")
    for part in _kimi_projections(checkpoint, prefix):
        yield from checkpoint.parts(f"{prefix}.{part}_proj")


def kimi_delta_net(arch: Architecture, packer: Packer, prefix: str) -> native.DeltaNet:
    sizes = arch.recurrent
    assert sizes is not None
    net = native.DeltaNet()
    net.by_key, net.fading_bound = True, sizes.fading_bound
    net.key_heads, net.value_heads = sizes.key_heads, sizes.value_heads
    net.key_dim, net.value_dim = sizes.key_dim, sizes.value_dim
    made = {
        part: packer.matrix(f"{prefix}.{part}_proj")
        for part in _kimi_projections(packer.checkpoint, prefix)
    }
    net.qkv, net.b, net.out = [made[part] for part in "qkv"], made["b"], made["o"]
    net.a, net.z = (made.get(f"{part}_b") or made[part] for part in "fg")
    if "f_a" in made:
        net.a_down = made["f_a"]
    if "g_a" in made:
        net.z_down = made["g_a"]
    net.convolution = convolution(packer, *(f"{prefix}.{part}_conv.conv" for part in "qkv"))
    net.decay = as_list(np.exp(packer.floats(f"{prefix}.A_log")).reshape(-1))
    net.dt_bias = as_list(packer.floats(f"{prefix}.dt_bias").reshape(-1))
    net.norm = as_list(packer.floats(f"{prefix}.o_norm.weight"))
    return net


def state_space_tensors(
    arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str
) -> Iterator[str]:
    assert arch.state_space is not None
    norm = ["norm.weight"] if arch.state_space.norm_groups else []
    yield from (f"{prefix}.{name}" for name in ("A_log", "D", "dt_bias", *norm))
    for name in ("in_proj", "conv1d", "out_proj"):
        yield from checkpoint.parts(f"{prefix}.{name}")


def state_space(arch: Architecture, packer: Packer, prefix: str) -> native.StateSpace:
    sizes = arch.state_space
    assert sizes is not None
    space = native.StateSpace()
    space.heads, space.groups = sizes.heads, sizes.groups
    space.head_dim, space.state_dim = sizes.head_dim, sizes.state_dim
    space.norm_groups = sizes.norm_groups
    space.least_step, space.most_step = sizes.least_step, sizes.most_step
    width = sizes.heads * sizes.head_dim
    rows = [width, width + 2 * sizes.groups * sizes.state_dim, sizes.heads]
    space.gate, space.xbc, space.dt = packer.split(f"{prefix}.in_proj", rows)
    space.convolution = convolution(packer, f"{prefix}.conv1d")
    space.decay = as_list(np.exp(packer.floats(f"{prefix}.A_log")))
    space.skip = as_list(packer.floats(f"{prefix}.D"))
    space.dt_bias = as_list(packer.floats(f"{prefix}.dt_bias"))
    if sizes.norm_groups:
        space.norm = as_list(packer.floats(f"{prefix}.norm.weight"))
    space.out = packer.matrix(f"{prefix}.out_proj")
    return space


def short_convolution_tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    for name in ("in_proj", "conv", "out_proj"):
        yield from checkpoint.parts(f"{prefix}.{name}")


def short_convolution(packer: Packer, prefix: str) -> native.ShortConvolution:
    conv = native.ShortConvolution()
    rows = packer.checkpoint.shape(f"{prefix}.in_proj.weight")[0] // 3
    conv.b, conv.c, conv.x = packer.split(f"{prefix}.in_proj", [rows] * 3)
    conv.convolution = convolution(packer, f"{prefix}.conv")
    conv.out = packer.matrix(f"{prefix}.out_proj")
    return conv


def convolution(packer: Packer, *modules: str) -> native.Convolution:
    """Of each channel by itself: [channels, taps, 1] as mlx-lm has it, or [channels, 1, taps]; of
    these modules one after the other."""
    of_each = [packer.floats(f"{module}.weight") for module in modules]
    weights = np.concatenate([own.reshape(own.shape[0], -1) for own in of_each])
    convolution = native.Convolution()
    convolution.taps = weights.shape[1]
    convolution.weights = as_list(weights.T.reshape(-1))
    if f"{modules[0]}.bias" in packer.checkpoint:
        convolution.bias = as_list(packer.floats(f"{modules[0]}.bias"))
    return convolution
