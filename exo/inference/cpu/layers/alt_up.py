"""A hidden state of several streams (Gemma 3n): a layer's tensors for it, and the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer, as_list

_MATRICES = ("altup.modality_router", "laurel.linear_left", "laurel.linear_right")
_NUMBERS = ("altup.prediction_coefs", "altup.correction_coefs")
_NORMS = ("altup.router_norm.weight", "laurel.post_laurel_norm.weight")


def modules(arch: Architecture) -> list[str]:
    """What makes the other streams of the first one, and what they end in."""
    if arch.alt_up is None:
        return []
    names = ("altup_projections", "altup_unembed_projections")
    return [f"model.{name}.{i}" for name in names for i in range(arch.alt_up.streams - 1)]


def tensors(arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    for name in (*_MATRICES, *_NUMBERS):
        yield from checkpoint.parts(f"{prefix}.{name}")
    yield from (f"{prefix}.{name}" for name in _NORMS)
    yield f"{prefix}.altup.correct_output_scale"


def build(arch: Architecture, packer: Packer, prefix: str) -> native.AltUp:
    sizes = arch.alt_up
    assert sizes is not None
    found = native.AltUp()
    found.router, found.left, found.right = (packer.matrix(f"{prefix}.{n}") for n in _MATRICES)
    found.predict, found.correct = (
        as_list(packer.numbers(f"{prefix}.{name}").clip(-sizes.clip, sizes.clip).reshape(-1))
        for name in _NUMBERS
    )
    found.router_norm, found.laurel_norm = (as_list(packer.floats(f"{prefix}.{n}")) for n in _NORMS)
    scale = packer.floats(f"{prefix}.altup.correct_output_scale")
    if sizes.is_scaled:
        found.scale = as_list(scale.astype(np.float32))
    return found


def build_streams(arch: Architecture, matrix: Callable[[str], native.Matrix]) -> native.Streams:
    assert arch.alt_up is not None
    made = [matrix(module) for module in modules(arch)]
    found = native.Streams()
    found.begin, found.end = made[: len(made) // 2], made[len(made) // 2 :]
    found.active = arch.alt_up.active
    return found
