"""The indexer that chooses pools of keys beside heads of keys and values: its tensors, and what is
made of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.pools import Pools
from exo.inference.cpu.packing import Packer, as_list

_PARTS = ("q_proj", "k_proj")
_NORMS = ("q_layernorm", "k_layernorm")


def tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.indexer.{name}.weight" for name in _NORMS)
    for name in _PARTS:
        yield from checkpoint.parts(f"{prefix}.indexer.{name}")


def build(packer: Packer, prefix: str, sizes: Pools) -> native.PoolIndexer:
    pools = native.Compressor()
    pools.dim, pools.ratio, pools.turns_first = sizes.dim, sizes.size, True
    found = native.PoolIndexer()
    found.q, pools.kv = (packer.matrix(f"{prefix}.indexer.{name}") for name in _PARTS)
    found.q_norm, pools.norm = (
        as_list(packer.floats(f"{prefix}.indexer.{name}.weight")) for name in _NORMS
    )
    found.pools = pools
    found.heads, found.dim, found.most = sizes.heads, sizes.dim, sizes.most
    return found
