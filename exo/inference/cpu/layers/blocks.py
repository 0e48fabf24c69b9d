"""What chooses the blocks of keys that an attention reads: its tensors, and the matrices made of
them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.blocks import Blocks
from exo.inference.cpu.families.family import Family
from exo.inference.cpu.packing import Packer, norm


def tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    for part in "qk":
        yield from checkpoint.parts(f"{prefix}.index_{part}_proj")
        yield f"{prefix}.index_{part}_norm.weight"


def build(
    family: Family, blocks: Blocks, kv_heads: int, packer: Packer, prefix: str
) -> native.BlockIndexer:
    indexer = native.BlockIndexer()
    indexer.q, indexer.k = (packer.matrix(f"{prefix}.index_{part}_proj") for part in "qk")
    indexer.q_norm, indexer.k_norm = (
        norm(family, packer, f"{prefix}.index_{part}_norm.weight") for part in "qk"
    )
    if (rows := indexer.q.rows) != kv_heads * blocks.dim:
        raise ModelUnsupported(
            f"{prefix}.index_q_proj has {rows} rows, not {kv_heads} heads of {blocks.dim}"
        )
    if {len(indexer.q_norm), len(indexer.k_norm)} != {blocks.dim}:
        raise ModelUnsupported(f"norms of {prefix}'s indexer that are not of {blocks.dim} numbers")
    indexer.dim, indexer.size = blocks.dim, blocks.size
    indexer.most, indexer.local = blocks.most, blocks.local
    return indexer
