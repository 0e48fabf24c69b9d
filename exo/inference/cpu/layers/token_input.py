"""What tokens bring to each layer beside the hidden state: its tensors, and matrices of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer, as_list

EMBEDDING, PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
NORM = "model.per_layer_projection_norm.weight"


def tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from checkpoint.parts(f"{prefix}.per_layer_input_gate")
    yield from checkpoint.parts(f"{prefix}.per_layer_projection")
    yield f"{prefix}.post_per_layer_input_norm.weight"


def build(packer: Packer, prefix: str) -> native.TokenInput:
    found = native.TokenInput()
    found.gate = packer.matrix(f"{prefix}.per_layer_input_gate")
    found.out = packer.matrix(f"{prefix}.per_layer_projection")
    found.norm = as_list(packer.floats(f"{prefix}.post_per_layer_input_norm.weight"))
    return found


def build_inputs(
    arch: Architecture, packer: Packer, embedding: native.Matrix, projection: native.Matrix
) -> native.TokenInputs:
    found = native.TokenInputs()
    found.embedding, found.projection = embedding, projection
    found.norm = as_list(packer.floats(NORM))
    found.embedding_scale = arch.token_input_dim**0.5
    found.projection_scale = arch.hidden**-0.5
    found.scale = 0.5**0.5
    return found
