"""The experts of a mixture that only some tokens go through: how they stand in a checkpoint, and
what reads one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.layers import mlp
from exo.inference.cpu.packing import Packer

Part = tuple[str, int, int]
"""A tensor, a place in it, and how many of them it has."""

Layout = Literal["single", "over", "beside", "blocks", "stacked"]
"""One by one; gates over ups in one tensor [experts, rows, columns]; gates beside ups in one of
[experts, columns, rows]; MXFP4 as gpt-oss was trained; each projection's stacked."""


def layout_of(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Layout:
    experts = arch.family.experts
    assert experts is not None
    if f"{prefix}.experts.0.up_proj.weight" in checkpoint:
        return "single"
    if f"{prefix}.experts.gate_up_proj_blocks" in checkpoint:
        return "blocks"
    if experts.joined and f"{prefix}.experts.gate_up_proj" in checkpoint:
        return experts.joined
    return "stacked"


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    experts = arch.family.experts
    assert experts is not None
    layout = layout_of(arch, checkpoint, prefix)
    if layout in ("over", "beside", "blocks"):
        parts = ("_blocks", "_scales", "_bias") if layout == "blocks" else ("", "_bias")
        for name in ("gate_up_proj", "down_proj"):
            whole = [f"{prefix}.experts.{name}{part}" for part in parts]
            yield from (tensor for tensor in whole if tensor in checkpoint)
        return
    is_single = layout == "single"
    blocks = [f"experts.{i}" for i in range(arch.expert_count)] if is_single else [experts.stacked]
    for block in blocks:
        for name in mlp.projections(checkpoint, f"{prefix}.{block}", experts.gated):
            yield from checkpoint.parts(f"{prefix}.{block}.{name}")


def check(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> None:
    """Raises ModelUnsupported where a stack is not of all experts, or of more: some conversions of
    MiniMax M3 have the shared one behind the others, and who does not know leaves it out."""
    if layout_of(arch, checkpoint, prefix) == "single":
        return
    for name in tensors(arch, checkpoint, prefix):
        shape = checkpoint.shape(name)
        if len(shape) == 3 and shape[0] != arch.expert_count:  # not a scale of all
            raise ModelUnsupported(f"{name} is of {shape[0]} experts, not {arch.expert_count}")


class ExpertReader:
    """Reads experts of a mixture, each by its number."""

    def __init__(self, arch: Architecture, packer: Packer, prefix: str) -> None:
        names, count = arch.family.experts, arch.expert_count
        assert names is not None
        self._packer = packer
        self._parts: Callable[[int], Iterable[Part]]
        self._packing: dict[str, Callable[[int], native.Matrix]]
        self._parts = lambda number: [(name, number, count) for name in stacks]
        stacks = list(tensors(arch, packer.checkpoint, prefix))
        parts = ("gate", "up", "down") if names.gated else ("up", "down")
        stacked, single = f"{prefix}.{names.stacked}", f"{prefix}.experts"
        match layout_of(arch, packer.checkpoint, prefix):
            case "single":
                own: dict[int, list[Part]] = {number: [] for number in range(count)}
                for name in stacks:
                    number = name.removeprefix(f"{single}.").partition(".")[0]
                    own[int(number)].append((name, 0, 1))
                self._parts = own.__getitem__
                packing = [packer.one_of(f"{single}.{{}}.{part}_proj") for part in parts]
            case "over":
                halves = packer.halves_of_stack(f"{single}.gate_up_proj")
                packing = [*halves, packer.plain_stack(f"{single}.down_proj")]
            case "beside":
                both, down = f"{single}.gate_up_proj", f"{single}.down_proj"
                halves = packer.columns_of_stack(both, 2, alternating=names.alternating)
                packing = [*halves, *packer.columns_of_stack(down, 1)]
            case "blocks":
                both, down = f"{single}.gate_up_proj", f"{single}.down_proj"
                packing = [*packer.blocks_of_stack(both, 2), *packer.blocks_of_stack(down, 1)]
            case "stacked":
                if f"{stacked}.gate_up_proj.weight" in packer.checkpoint:
                    halves = packer.halves_of_stack(f"{stacked}.gate_up_proj.weight")
                    packing = [*halves, packer.stacked(f"{stacked}.down_proj")]
                else:
                    packing = [packer.stacked(f"{stacked}.{part}_proj") for part in parts]
        self._packing = dict(zip(parts, packing, strict=True))

    def pack(self, number: int) -> native.Expert:
        expert = native.Expert()
        for part, packed in self._packing.items():
            setattr(expert, part, packed(number))
        self._packer.checkpoint.check()
        for name, index, count in self._parts(number):
            self._packer.used(name, index, count)
        return expert

    def read_ahead(self, number: int) -> None:
        """Have the system read it from disk meanwhile."""
        for name, index, count in self._parts(number):
            self._packer.checkpoint.read_ahead(name, index, count)
