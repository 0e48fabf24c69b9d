"""Attention over latents: which tensors a layer has for it, and the matrices made of them."""

from __future__ import annotations

from collections.abc import Iterator

from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.families.architecture import Architecture
from exo.inference.cpu.packing import Packer, as_list

_INDEXER = ("wq_b", "wk", "weights_proj")
_POOLS = ("index_kpool_compress_gate", "index_kpool_compress_ape")


def tensors(
    arch: Architecture, checkpoint: CanonicalCheckpoint, prefix: str, index: int
) -> Iterator[str]:
    assert arch.latent is not None
    yield f"{prefix}.kv_a_layernorm.weight"
    if index in arch.latent.choosing:
        yield from indexer_tensors(checkpoint, prefix)
    if index in arch.sink_layers:
        yield f"{prefix}.sinks"
    if arch.family.output_gate:
        yield from checkpoint.parts(f"{prefix}.g_proj")
    is_low_rank = f"{prefix}.q_a_proj.weight" in checkpoint
    if is_low_rank:
        yield f"{prefix}.q_a_layernorm.weight"
    is_split = f"{prefix}.embed_q.weight" in checkpoint
    for name in (
        *(("q_a_proj", "q_b_proj") if is_low_rank else ("q_proj",)),
        "kv_a_proj_with_mqa",
        *(("embed_q", "unembed_out") if is_split else ("kv_b_proj",)),
        "o_proj",
    ):
        yield from checkpoint.parts(f"{prefix}.{name}")


def indexer_tensors(checkpoint: CanonicalCheckpoint, prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.indexer.k_norm.{part}" for part in ("weight", "bias"))
    for name in _INDEXER:
        yield from checkpoint.parts(f"{prefix}.indexer.{name}")
    yield from (name for part in _POOLS if (name := f"{prefix}.indexer.{part}") in checkpoint)


def build(arch: Architecture, packer: Packer, prefix: str, layer: native.Layer, index: int) -> None:
    sizes = arch.latent
    assert sizes is not None
    latent = native.LatentAttention()
    latent.nope, latent.turned = sizes.nope, sizes.turned
    latent.rank, latent.value_dim = sizes.rank, sizes.value_dim
    latent.norm_eps = arch.latent_eps
    if f"{prefix}.q_a_proj.weight" in packer.checkpoint:
        latent.q_a = packer.matrix(f"{prefix}.q_a_proj")
        latent.q_a_norm = as_list(packer.floats(f"{prefix}.q_a_layernorm.weight"))
        latent.q_b = packer.matrix(f"{prefix}.q_b_proj")
    else:
        latent.q_b = packer.matrix(f"{prefix}.q_proj")
    latent.kv_a = packer.matrix(f"{prefix}.kv_a_proj_with_mqa")
    latent.kv_a_norm = as_list(packer.floats(f"{prefix}.kv_a_layernorm.weight"))
    if f"{prefix}.embed_q.weight" in packer.checkpoint:
        latent.embed = packer.stack(f"{prefix}.embed_q", arch.heads)
        latent.unembed = packer.stack(f"{prefix}.unembed_out", arch.heads)
    else:
        # Of each head the rows that make keys of a latent, then those that make values.
        rows = packer.numbers(f"{prefix}.kv_b_proj").reshape(arch.heads, -1, sizes.rank)
        latent.embed = [packer.dense(head[: sizes.nope].T) for head in rows]
        latent.unembed = [packer.dense(head[sizes.nope :]) for head in rows]
    latent.most, latent.pool = sizes.most, sizes.pool
    if index in sizes.choosing:
        indexer = native.Indexer()
        indexer.heads, indexer.dim = sizes.index_heads, sizes.index_dim
        indexer.interleaved = sizes.index_interleaved
        indexer.turns_last, indexer.norm_eps = sizes.index_turns_last, sizes.index_eps
        indexer.q, indexer.k, indexer.weights = (
            packer.matrix(f"{prefix}.indexer.{name}") for name in _INDEXER
        )
        indexer.k_norm = as_list(packer.floats(f"{prefix}.indexer.k_norm.weight"))
        indexer.k_norm_bias = as_list(packer.floats(f"{prefix}.indexer.k_norm.bias"))
        if sizes.pool > 1:
            gate, bias = (packer.floats(f"{prefix}.indexer.{name}") for name in _POOLS)
            pools = native.Compressor()
            pools.ratio, pools.dim = sizes.pool, sizes.index_dim
            pools.gate, pools.bias = packer.dense(gate), as_list(bias.reshape(-1))
            indexer.pools = pools
        latent.indexer = indexer
    layer.latent = latent
    if index in arch.sink_layers:
        layer.sinks = as_list(packer.floats(f"{prefix}.sinks"))
    if arch.family.output_gate:
        layer.output_gate = packer.matrix(f"{prefix}.g_proj")
    layer.o = packer.matrix(f"{prefix}.o_proj")
