"""A layer's mixture of experts: which tensors it has for it, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.layers import mlp
from exo.inference.cpu.packing import Packer, as_list


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    """All but the experts'."""
    experts = arch.family.experts
    assert experts is not None
    yield from checkpoint.parts(f"{prefix}.{experts.router}")
    if experts.bias and f"{prefix}.{experts.bias}" in checkpoint:
        yield f"{prefix}.{experts.bias}"
    if arch.family.mixture_norms:
        yield f"{prefix}.router.scale"
        yield f"{prefix}.router.per_expert_scale"
    if _has_shared(arch, checkpoint, prefix):
        yield from mlp.tensors_of(checkpoint, f"{prefix}.{experts.shared}", experts.gated)
    for name in _around(arch, checkpoint, prefix):
        yield from checkpoint.parts(f"{prefix}.{name}")
    if experts.shared_gate:
        yield from checkpoint.parts(f"{prefix}.{experts.shared_gate}")


def _around(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> list[str]:
    names = arch.family.experts.around if arch.family.experts else None
    return [name for name in names or () if f"{prefix}.{name}.weight" in checkpoint]


def _has_shared(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> bool:
    experts = arch.family.experts
    if experts is None or not experts.shared:
        return False
    return f"{prefix}.{experts.shared}.down_proj.weight" in checkpoint


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer) -> None:
    names, count = arch.family.experts, arch.expert_count
    assert names is not None
    layer.router = packer.matrix(f"{prefix}.{names.router}")
    if names.bias and f"{prefix}.{names.bias}" in packer.checkpoint:
        layer.router_bias = as_list(packer.floats(f"{prefix}.{names.bias}").reshape(-1))
    if arch.family.mixture_norms:
        layer.expert_scales = as_list(packer.floats(f"{prefix}.router.per_expert_scale"))
    if _has_shared(arch, packer.checkpoint, prefix):
        mlp.build_one(packer, f"{prefix}.{names.shared}", layer, names.gated)
        layer.shared_scale = arch.shared_scale
    if around := _around(arch, packer.checkpoint, prefix):
        layer.expert_in, layer.expert_out = (packer.matrix(f"{prefix}.{one}") for one in around)
    if names.shared_gate:
        layer.shared_gate = packer.matrix(f"{prefix}.{names.shared_gate}")
    if layer.router.rows != count:
        raise ModelUnsupported(f"a router to {layer.router.rows} of {count} experts")
