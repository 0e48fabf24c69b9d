"""A layer's mixture of experts: which tensors it has for it, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.layers import mlp
from exo.inference.cpu.packing import Packer, as_list

Part = tuple[str, int, int]
"""A tensor, a place in it, and how many of them it has."""


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
    if experts.shared_gate:
        yield from checkpoint.parts(f"{prefix}.{experts.shared_gate}")


def expert_tensors(
    arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str
) -> Iterator[str]:
    """Of a mixture those of the experts that only some tokens go through."""
    experts = arch.family.experts
    assert experts is not None
    if _is_joined(arch, checkpoint, prefix):
        yield f"{prefix}.experts.gate_up_proj"
        yield f"{prefix}.experts.down_proj"
        return
    is_single = f"{prefix}.experts.0.up_proj.weight" in checkpoint
    blocks = [f"experts.{i}" for i in range(arch.expert_count)] if is_single else [experts.stacked]
    for block in blocks:
        for name in mlp.projections(checkpoint, f"{prefix}.{block}", experts.gated):
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


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer) -> None:
    names, count = arch.family.experts, arch.expert_count
    assert names is not None
    layer.router = packer.matrix(f"{prefix}.{names.router}")
    if names.bias and f"{prefix}.{names.bias}" in packer.checkpoint:
        layer.router_bias = as_list(packer.floats(f"{prefix}.{names.bias}"))
    if arch.family.mixture_norms:
        layer.expert_scales = as_list(packer.floats(f"{prefix}.router.per_expert_scale"))
    if _has_shared(arch, packer.checkpoint, prefix):
        mlp.build_one(packer, f"{prefix}.{names.shared}", layer, names.gated)
    if names.shared_gate:
        layer.shared_gate = packer.matrix(f"{prefix}.{names.shared_gate}")
    if layer.router.rows != count:
        raise ModelUnsupported(f"a router to {layer.router.rows} of {count} experts")


class ExpertReader:
    """Reads experts of a mixture, each by its number."""

    def __init__(self, arch: Architecture, packer: Packer, prefix: str) -> None:
        names, checkpoint = arch.family.experts, packer.checkpoint
        assert names is not None
        self._packer = packer
        self._parts: Callable[[int], Iterable[Part]]
        self._packing: dict[str, Callable[[int], native.Matrix]]
        tensors, count = list(expert_tensors(arch, checkpoint, prefix)), arch.expert_count
        parts = ("gate", "up", "down") if names.gated else ("up", "down")
        stacked, single = f"{prefix}.{names.stacked}", f"{prefix}.experts"
        if f"{single}.0.up_proj.weight" in checkpoint:
            own: dict[int, list[Part]] = {number: [] for number in range(count)}
            for name in tensors:
                number = name.removeprefix(f"{single}.").partition(".")[0]
                own[int(number)].append((name, 0, 1))
            self._parts = own.__getitem__
            self._packing = {part: packer.one_of(f"{single}.{{}}.{part}_proj") for part in parts}
            return
        self._parts = lambda number: [(name, number, count) for name in tensors]
        if _is_joined(arch, checkpoint, prefix):
            gates, ups = packer.halves_of_stack(f"{prefix}.experts.gate_up_proj")
            downs = packer.plain_stack(f"{prefix}.experts.down_proj")
            self._packing = {"gate": gates, "up": ups, "down": downs}
        elif f"{stacked}.gate_up_proj.weight" in checkpoint:
            gates, ups = packer.halves_of_stack(f"{stacked}.gate_up_proj.weight")
            downs = packer.stacked(f"{stacked}.down_proj")
            self._packing = {"gate": gates, "up": ups, "down": downs}
        else:
            self._packing = {part: packer.stacked(f"{stacked}.{part}_proj") for part in parts}

    def pack(self, number: int) -> native.Expert:
        expert = native.Expert()
        for part, packed in self._packing.items():
            setattr(expert, part, packed(number))
        for name, index, count in self._parts(number):
            self._packer.used(name, index, count)
        return expert

    def read_ahead(self, number: int) -> None:
        """Have the system read it from disk meanwhile."""
        for name, index, count in self._parts(number):
            self._packer.checkpoint.read_ahead(name, index, count)
