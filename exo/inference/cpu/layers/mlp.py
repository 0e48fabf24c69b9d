"""A layer's MLP: which tensors it has for it, and the matrices made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer

_XIELU = ("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta", "act_fn.eps")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from tensors_of(checkpoint, _only(arch, checkpoint, prefix), arch.family.gated)
    if arch.family.xielu:
        yield from (f"{prefix}.{name}" for name in _XIELU)


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer) -> None:
    build_one(packer, _only(arch, packer.checkpoint, prefix), layer, arch.family.gated)
    if arch.family.xielu:
        alpha_p, alpha_n, beta, eps = (
            float(packer.floats(f"{prefix}.{name}").reshape(())) for name in _XIELU
        )
        # The alphas were learned as what softplus makes them of (XIELUActivation of transformers).
        layer.xielu = native.Xielu(_softplus(alpha_p), beta + _softplus(alpha_n), beta, eps)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _only(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> str:
    """Where a family's smaller models have one MLP only, it may stand where the shared one of the
    others does."""
    shared = f"{prefix}.{arch.family.experts.shared}" if arch.family.experts else prefix
    return shared if f"{shared}.down_proj.weight" in checkpoint else prefix


def tensors_of(checkpoint: CanonicalCheckpoint, prefix: str, gated: bool) -> Iterator[str]:
    for name in projections(checkpoint, prefix, gated):
        yield from checkpoint.parts(f"{prefix}.{name}")


def projections(checkpoint: CanonicalCheckpoint, prefix: str, gated: bool) -> tuple[str, ...]:
    if gated and f"{prefix}.gate_up_proj.weight" in checkpoint:
        return "gate_up_proj", "down_proj"
    return _PROJECTIONS if gated else _PROJECTIONS[1:]


def build_one(packer: Packer, prefix: str, layer: native.Layer, gated: bool) -> None:
    if "gate_up_proj" in projections(packer.checkpoint, prefix, gated):
        rows = packer.checkpoint.shape(f"{prefix}.gate_up_proj.weight")[0]
        layer.gate, layer.up = packer.split(f"{prefix}.gate_up_proj", [rows // 2] * 2)
    else:
        if gated:
            layer.gate = packer.matrix(f"{prefix}.gate_proj")
        layer.up = packer.matrix(f"{prefix}.up_proj")
    layer.down = packer.matrix(f"{prefix}.down_proj")
