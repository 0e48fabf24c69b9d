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
    if experts.told and f"{prefix}.{experts.told}" in checkpoint:
        yield f"{prefix}.{experts.told}"
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


def _told(arch: Architecture, packer: Packer, name: str) -> list[int]:
    """Of each token its experts, one token's after the other's."""
    numbers = packer.checkpoint.tensor(name).numbers()
    packer.used(name)
    count, top = arch.expert_count, arch.experts_per_token
    if numbers.shape[-1] != top or numbers.min() < 0 or numbers.max() >= count:
        raise ModelUnsupported(f"{name} tells not {top} of {count} experts of each token")
    return list(numbers.reshape(-1).tolist())


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer) -> None:
    names, count = arch.family.experts, arch.expert_count
    assert names is not None
    layer.router = packer.matrix(f"{prefix}.{names.router}")
    if names.bias and f"{prefix}.{names.bias}" in packer.checkpoint:
        layer.router_bias = as_list(packer.floats(f"{prefix}.{names.bias}").reshape(-1))
    if names.told and f"{prefix}.{names.told}" in packer.checkpoint:
        layer.experts_of_tokens = _told(arch, packer, f"{prefix}.{names.told}")
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
