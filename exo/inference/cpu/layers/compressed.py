"""Attention to a window and to entries of several tokens: which tensors a layer has for it, and the
matrices made of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer, as_list

_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")
_INDEXER = ("indexer.q_b_proj", "indexer.scorer.weights_proj")


def tensors(
    arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str, index: int
) -> Iterator[str]:
    assert arch.compressed is not None
    yield from (f"{prefix}.{name}" for name in ("sinks", "q_a_norm.weight", "kv_norm.weight"))
    for name in _PROJECTIONS:
        yield from checkpoint.parts(f"{prefix}.{name}")
    for compressor in _compressors(arch, index):
        yield from _compressor_tensors(checkpoint, f"{prefix}.{compressor}")
    if index in arch.compressed.indexed:
        for name in _INDEXER:
            yield from checkpoint.parts(f"{prefix}.compressor.{name}")


def _compressors(arch: Architecture, index: int) -> list[str]:
    """Of the layer's entries, and of those that its indexer scores."""
    assert arch.compressed is not None
    if not arch.compressed.ratios[index]:
        return []
    return ["compressor"] + ["compressor.indexer"] * (index in arch.compressed.indexed)


def _compressor_tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.{name}" for name in ("position_bias", "kv_norm.weight"))
    for name in ("kv_proj", "gate_proj"):
        yield from checkpoint.parts(f"{prefix}.{name}")


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer, index: int) -> None:
    sizes = arch.compressed
    assert sizes is not None
    found = native.CompressedAttention()
    found.dim, found.window, found.most = arch.head_dim, sizes.window, sizes.most
    found.q_a, found.q_b, found.kv = (packer.matrix(f"{prefix}.{n}") for n in _PROJECTIONS[:3])
    rows = packer.checkpoint.shape(f"{prefix}.o_a_proj.weight")[0] // sizes.groups
    found.out = packer.split(f"{prefix}.o_a_proj", [rows] * sizes.groups)
    found.q_a_norm = as_list(packer.floats(f"{prefix}.q_a_norm.weight"))
    found.kv_norm = as_list(packer.floats(f"{prefix}.kv_norm.weight"))
    made = [
        _compressor(packer, f"{prefix}.{name}", sizes.ratios[index], index in sizes.indexed)
        for name in _compressors(arch, index)
    ]
    if made:
        found.compressor = made[0]
    if index in sizes.indexed:
        found.index_compressor = made[1]
        indexer = native.Indexer()
        indexer.heads, indexer.dim = sizes.index_heads, sizes.index_dim
        indexer.q, indexer.weights = (packer.matrix(f"{prefix}.compressor.{n}") for n in _INDEXER)
        found.indexer = indexer
    layer.compressed = found
    layer.sinks = as_list(packer.floats(f"{prefix}.sinks"))
    layer.o = packer.matrix(f"{prefix}.o_b_proj")


def _compressor(packer: Packer, prefix: str, ratio: int, overlaps: bool) -> native.Compressor:
    """Entries overlap where an indexer chooses among them."""
    found = native.Compressor()
    found.ratio, found.overlaps = ratio, overlaps
    found.kv, found.gate = (packer.matrix(f"{prefix}.{name}") for name in ("kv_proj", "gate_proj"))
    found.bias = as_list(packer.floats(f"{prefix}.position_bias").reshape(-1))
    found.norm = as_list(packer.floats(f"{prefix}.kv_norm.weight"))
    found.dim = len(found.norm)
    return found
