"""MLPs and mixtures of them: which tensors a layer has for them, and the matrices made of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer, as_list

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    return _tensors(checkpoint, _only(arch, checkpoint, prefix), arch.family.gated)


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer) -> None:
    _build(packer, _only(arch, packer.checkpoint, prefix), layer, arch.family.gated)


def _only(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> str:
    """Where a family's smaller models have one MLP only, it may stand where the shared one of the
    others does."""
    shared = f"{prefix}.{arch.family.experts.shared}" if arch.family.experts else prefix
    return shared if f"{shared}.down_proj.weight" in checkpoint else prefix


def _tensors(checkpoint: CanonicalCheckpoint, prefix: str, gated: bool) -> Iterator[str]:
    for name in _projections(checkpoint, prefix, gated):
        yield from checkpoint.parts(f"{prefix}.{name}")


def _projections(checkpoint: CanonicalCheckpoint, prefix: str, gated: bool) -> tuple[str, ...]:
    if gated and f"{prefix}.gate_up_proj.weight" in checkpoint:
        return "gate_up_proj", "down_proj"
    return _PROJECTIONS if gated else _PROJECTIONS[1:]


def _build(packer: Packer, prefix: str, layer: native.Layer, gated: bool) -> None:
    if "gate_up_proj" in _projections(packer.checkpoint, prefix, gated):
        rows = packer.checkpoint.shape(f"{prefix}.gate_up_proj.weight")[0]
        layer.gate, layer.up = packer.split(f"{prefix}.gate_up_proj", [rows // 2] * 2)
    else:
        if gated:
            layer.gate = packer.matrix(f"{prefix}.gate_proj")
        layer.up = packer.matrix(f"{prefix}.up_proj")
    layer.down = packer.matrix(f"{prefix}.down_proj")


def mixture_tensors(
    arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str
) -> Iterator[str]:
    experts = arch.family.experts
    assert experts is not None
    yield from checkpoint.parts(f"{prefix}.{experts.router}")
    if experts.bias and f"{prefix}.{experts.bias}" in checkpoint:
        yield f"{prefix}.{experts.bias}"
    if arch.family.mixture_norms:
        yield f"{prefix}.router.scale"
        yield f"{prefix}.router.per_expert_scale"
    if _has_shared(arch, checkpoint, prefix):
        yield from _tensors(checkpoint, f"{prefix}.{experts.shared}", experts.gated)
    if experts.shared_gate:
        yield from checkpoint.parts(f"{prefix}.{experts.shared_gate}")
    if _is_joined(arch, checkpoint, prefix):
        yield f"{prefix}.experts.gate_up_proj"
        yield f"{prefix}.experts.down_proj"
        return
    is_single = f"{prefix}.experts.0.up_proj.weight" in checkpoint
    blocks = [f"experts.{i}" for i in range(arch.expert_count)] if is_single else [experts.stacked]
    for block in blocks:
        for name in _projections(checkpoint, f"{prefix}.{block}", experts.gated):
            yield from checkpoint.parts(f"{prefix}.{block}.{name}")


def _has_shared(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> bool:
    experts = arch.family.experts
    if experts is None or not experts.shared:
        return False
    return f"{prefix}.{experts.shared}.down_proj.weight" in checkpoint


def _is_joined(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> bool:
    """Whether all experts' gates stand over their ups in one tensor. Other families have one of
    that name with other axes."""
    experts = arch.family.experts
    is_known = experts is not None and experts.joined
    return is_known and f"{prefix}.experts.gate_up_proj" in checkpoint


def build_mixture(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer) -> None:
    names, count = arch.family.experts, arch.expert_count
    assert names is not None
    layer.router = packer.matrix(f"{prefix}.{names.router}")
    if names.bias and f"{prefix}.{names.bias}" in packer.checkpoint:
        layer.router_bias = as_list(packer.floats(f"{prefix}.{names.bias}"))
    if arch.family.mixture_norms:
        layer.expert_scales = as_list(packer.floats(f"{prefix}.router.per_expert_scale"))
    if _has_shared(arch, packer.checkpoint, prefix):
        _build(packer, f"{prefix}.{names.shared}", layer, names.gated)
    if names.shared_gate:
        layer.shared_gate = packer.matrix(f"{prefix}.{names.shared_gate}")
    if _is_joined(arch, packer.checkpoint, prefix):
        gates, ups = packer.halves_of_stack(f"{prefix}.experts.gate_up_proj", count)
        downs = packer.plain_stack(f"{prefix}.experts.down_proj", count)
        columns = {"gate_proj": gates, "up_proj": ups, "down_proj": downs}
    elif f"{prefix}.{names.stacked}.gate_up_proj.weight" in packer.checkpoint:
        both = f"{prefix}.{names.stacked}.gate_up_proj.weight"
        gates, ups = packer.halves_of_stack(both, count)
        downs = packer.stack(f"{prefix}.{names.stacked}.down_proj", count)
        columns = {"gate_proj": gates, "up_proj": ups, "down_proj": downs}
    else:
        is_single = f"{prefix}.experts.0.up_proj.weight" in packer.checkpoint
        columns = {
            name: [packer.matrix(f"{prefix}.experts.{index}.{name}") for index in range(count)]
            if is_single
            else packer.stack(f"{prefix}.{names.stacked}.{name}", count)
            for name in (_PROJECTIONS if names.gated else _PROJECTIONS[1:])
        }
    experts = []
    for index in range(count):
        expert = native.Expert()
        if names.gated:
            expert.gate = columns["gate_proj"][index]
        expert.up, expert.down = columns["up_proj"][index], columns["down_proj"][index]
        experts.append(expert)
    layer.experts = experts
