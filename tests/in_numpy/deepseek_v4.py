"""DeepSeek V4, tiny and random, as a GGUF file; and what it computes, as transformers'
modeling_deepseek_v4.py has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zoo

from in_numpy.hyper import collapsed, expanded
from in_numpy.parts import (
    Numbers,
    Random,
    Weights,
    attended,
    best_of,
    chosen_experts,
    mixture,
    of_layer,
    rms,
    softmax,
    turned,
    write_gguf,
)

EPS, BASE, STRETCHED_BASE = 1e-6, 10000.0, 160000.0


@dataclass(frozen=True)
class Sizes:
    """`ratios`: of how many tokens a layer's entries stand for; in the `told` first ones tokens
    tell their experts. `most`: entries that a query attends to; positions are stretched by `factor`
    beyond `original`."""

    ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 128)
    hidden: int = 64
    streams: int = 4
    heads: int = 4
    dim: int = 32
    turned: int = 16
    groups: int = 2
    rank: int = 32
    experts: int = 8
    top: int = 2
    width: int = 32
    index_heads: int = 12
    index_dim: int = 64
    told: int = 2
    window: int = 70
    most: int = 8
    context: int = 4096
    limit: float = 1.5
    scale: float = 1.5
    factor: float = 4.0
    original: int = 64


TINY = Sizes()


def metadata(sizes: Sizes) -> dict[str, Any]:
    """By key below the architecture, as DeepseekV4Model of llama.cpp's conversion/deepseek.py
    writes it."""
    return {
        "block_count": len(sizes.ratios),
        "context_length": sizes.context,
        "embedding_length": sizes.hidden,
        "embedding_length_out": sizes.hidden * sizes.streams,
        "feed_forward_length": sizes.width,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": sizes.dim,
        "attention.value_length": sizes.dim,
        "attention.layer_norm_rms_epsilon": EPS,
        "attention.q_lora_rank": sizes.rank,
        "attention.sliding_window": sizes.window,
        "attention.output_group_count": sizes.groups,
        "attention.output_lora_rank": sizes.rank,
        "attention.compress_ratios": list(sizes.ratios),
        "attention.compress_rope_freq_base": STRETCHED_BASE,
        "attention.indexer.head_count": sizes.index_heads,
        "attention.indexer.key_length": sizes.index_dim,
        "attention.indexer.top_k": sizes.most,
        "rope.dimension_count": sizes.turned,
        "rope.freq_base": BASE,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": sizes.factor,
        "rope.scaling.original_context_length": sizes.original,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "hyper_connection.count": sizes.streams,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": EPS,
        "hash_layer_count": sizes.told,
        "expert_count": sizes.experts,
        "expert_used_count": sizes.top,
        "expert_feed_forward_length": sizes.width,
        "expert_shared_count": 1,
        "expert_weights_scale": sizes.scale,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [sizes.limit] * len(sizes.ratios),
        "vocab_size": zoo.VOCABULARY,
    }


def random_weights(sizes: Sizes = TINY, seed: int = 1) -> Weights:
    random = Random(seed)
    matrix, norm, wide = random.matrix, random.norm, sizes.streams * sizes.hidden

    def compressor(name: str, width: int, ratio: int) -> Weights:
        both = 2 * width if ratio == 4 else width
        return {
            f"{name}_compressor_kv.weight": matrix(both, sizes.hidden),
            f"{name}_compressor_gate.weight": matrix(both, sizes.hidden),
            f"{name}_compressor_ape.weight": matrix(ratio, both),
            f"{name}_compressor_norm.weight": norm(width),
        }

    found: Weights = {
        "token_embd.weight": matrix(zoo.VOCABULARY, sizes.hidden) * np.float32(4),
        "output_norm.weight": norm(sizes.hidden),
        "output.weight": matrix(zoo.VOCABULARY, sizes.hidden),
        **random.connection("output_hc", sizes.streams, wide, 1),
    }
    for layer, ratio in enumerate(sizes.ratios):
        own: Weights = {
            "attn_norm.weight": norm(sizes.hidden),
            "ffn_norm.weight": norm(sizes.hidden),
            "attn_sinks.weight": matrix(sizes.heads),
            "attn_q_a.weight": matrix(sizes.rank, sizes.hidden),
            "attn_q_a_norm.weight": norm(sizes.rank),
            "attn_q_b.weight": matrix(sizes.heads * sizes.dim, sizes.rank),
            "attn_kv.weight": matrix(sizes.dim, sizes.hidden),
            "attn_kv_a_norm.weight": norm(sizes.dim),
            "attn_output_a.weight": matrix(
                sizes.groups * sizes.rank, sizes.heads * sizes.dim // sizes.groups
            ),
            "attn_output_b.weight": matrix(sizes.hidden, sizes.groups * sizes.rank),
            **random.connection("hc_attn", sizes.streams * (sizes.streams + 2), wide, 3),
            **random.connection("hc_ffn", sizes.streams * (sizes.streams + 2), wide, 3),
            **random.experts(sizes.experts, sizes.hidden, sizes.width),
        }
        if ratio:
            own |= compressor("attn", sizes.dim, ratio)
        if ratio == 4:
            own |= compressor("indexer", sizes.index_dim, ratio)
            own["indexer.attn_q_b.weight"] = matrix(sizes.index_heads * sizes.index_dim, sizes.rank)
            own["indexer.proj.weight"] = matrix(sizes.index_heads, sizes.hidden)
        if layer < sizes.told:
            chosen = [random.order(sizes.experts)[: sizes.top] for _ in range(zoo.VOCABULARY)]
            own["ffn_gate_tid2eid.weight"] = np.array(chosen, np.int32)
        else:
            own["exp_probs_b.bias"] = matrix(sizes.experts)
        found |= {f"blk.{layer}.{name}": numbers for name, numbers in own.items()}
    return found


def write(file: Path, weights: Weights, **extra: Any) -> None:
    """Tiny. `extra` metadata replaces what would be written; None leaves it out."""
    write_gguf(file, "deepseek4", metadata(TINY) | extra, weights)


def logits(weights: Weights, tokens: list[int]) -> Numbers:
    """Of the tiny one, float64 [tokens, vocabulary]."""
    streams = np.repeat(weights["token_embd.weight"][tokens][:, None], TINY.streams, axis=1)
    streams = streams.astype(np.float64)
    for layer, ratio in enumerate(TINY.ratios):
        own = of_layer(weights, layer)
        for place, part in (("attn", _attention), ("ffn", _mixture)):
            x, rows = collapsed(streams, own, f"hc_{place}", EPS)
            given = part(rms(x, EPS, own[f"{place}_norm"]), own, ratio, np.array(tokens))
            streams = expanded(streams, given, rows, EPS)
    outer = {name.removesuffix(".weight"): numbers for name, numbers in weights.items()}
    x = rms(collapsed(streams, outer, "output_hc", EPS)[0], EPS, outer["output_norm"])
    found: Numbers = x @ outer["output"].T
    return found


def _angles(positions: Numbers, ratio: int) -> Numbers:
    """Layers that have entries stretch positions (YaRN, arXiv:2309.00071)."""
    pairs = np.arange(TINY.turned // 2)
    if not ratio:
        return positions[:, None] * BASE ** (-2 * pairs / TINY.turned)
    plain = STRETCHED_BASE ** (-2 * pairs / TINY.turned)

    def turns(count: float) -> float:
        whole = np.log(TINY.original / (count * 2 * np.pi)) / np.log(STRETCHED_BASE)
        return float(TINY.turned * whole / 2)

    low, high = max(np.floor(turns(32)), 0), min(np.ceil(turns(1)), TINY.turned - 1)
    ramp = np.clip((pairs - low) / (max(high, low + 0.001) - low), 0, 1)
    return positions[:, None] * (plain / TINY.factor * ramp + plain * (1 - ramp))


def _entries(x: Numbers, own: Weights, name: str, ratio: int) -> Numbers:
    """[len(x) // ratio, dim]"""
    count = len(x) // ratio
    shape = (count, ratio, -1)
    kv = (x @ own[f"{name}_compressor_kv"].T)[: count * ratio].reshape(shape)
    gate = (x @ own[f"{name}_compressor_gate"].T)[: count * ratio].reshape(shape)
    gate = gate + own[f"{name}_compressor_ape"]
    if ratio == 4:  # the first half is for the entry after, where there is one before
        width = kv.shape[-1] // 2
        before_kv = np.concatenate([np.zeros_like(kv[:1]), kv[:-1]])[..., :width]
        before_gate = np.concatenate([np.full_like(gate[:1], -np.inf), gate[:-1]])[..., :width]
        kv = np.concatenate([before_kv, kv[..., width:]], axis=1)
        gate = np.concatenate([before_gate, gate[..., width:]], axis=1)
    mean = (kv * softmax(gate, axis=1)).sum(1)
    normed = rms(mean, EPS, own[f"{name}_compressor_norm"])
    return turned(normed, _angles(np.arange(count) * ratio, ratio))


def _attention(x: Numbers, own: Weights, ratio: int, tokens: Numbers) -> Numbers:
    count = len(x)
    positions = np.arange(count)
    angles = _angles(positions, ratio)
    low = rms(x @ own["attn_q_a"].T, EPS, own["attn_q_a_norm"])
    q = turned(rms((low @ own["attn_q_b"].T).reshape(count, TINY.heads, TINY.dim), EPS), angles)
    keys = turned(rms(x @ own["attn_kv"].T, EPS, own["attn_kv_a_norm"]), angles)
    ago = positions[:, None] - positions
    seen = (ago >= 0) & (ago < TINY.window)
    if ratio and count >= ratio:
        entries = _entries(x, own, "attn", ratio)
        there = np.arange(len(entries)) < ((positions + 1) // ratio)[:, None]
        if ratio == 4:
            there = _chosen(x, low, own, ratio, there)
        keys, seen = np.concatenate([keys, entries]), np.concatenate([seen, there], axis=1)
    mixed = turned(attended(q, keys, keys, seen, own["attn_sinks"], TINY.dim**-0.5), -angles)
    parts = mixed.reshape(count, TINY.groups, -1)
    through = own["attn_output_a"].reshape(TINY.groups, TINY.rank, -1)
    grouped = np.einsum("tgi,gri->tgr", parts, through).reshape(count, -1)
    found: Numbers = grouped @ own["attn_output_b"].T
    return found


def _chosen(x: Numbers, low: Numbers, own: Weights, ratio: int, there: Numbers) -> Numbers:
    keys = _entries(x, own, "indexer", ratio)
    q = (low @ own["indexer.attn_q_b"].T).reshape(len(x), TINY.index_heads, TINY.index_dim)
    q = turned(q, _angles(np.arange(len(x)), ratio))
    weights = x @ own["indexer.proj"].T
    scores = np.einsum("th,thk->tk", weights, np.maximum(np.einsum("thd,kd->thk", q, keys), 0))
    return best_of(scores, there, TINY.most)


def _mixture(x: Numbers, own: Weights, ratio: int, tokens: Numbers) -> Numbers:
    scores = np.sqrt(np.log1p(np.exp(x @ own["ffn_gate_inp"].T)))
    told = own.get("ffn_gate_tid2eid")
    own_experts = None if told is None else told[tokens]
    best, shares = chosen_experts(scores, own, TINY.top, TINY.scale, own_experts)
    return mixture(x, own, best, shares, TINY.limit, TINY.limit)
