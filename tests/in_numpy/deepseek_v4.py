"""DeepSeek V4, tiny and random, as a GGUF file; and what it computes, as transformers'
modeling_deepseek_v4.py has it."""

from __future__ import annotations

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
    mixture,
    of_layer,
    rms,
    softmax,
    turned,
    write_gguf,
)

HIDDEN, STREAMS, HEADS, DIM, TURNED, GROUPS, RANK = 64, 4, 4, 32, 16, 2, 32
EXPERTS, TOP, WIDTH = 8, 2, 32
INDEX_HEADS, INDEX_DIM = 12, 64
RATIOS = [0, 0, 4, 128, 4, 128]
TOLD, WINDOW, MOST = 2, 70, 8
EPS, LIMIT, SCALE = 1e-6, 1.5, 1.5
BASE, STRETCHED_BASE, FACTOR, ORIGINAL = 10000.0, 160000.0, 4.0, 64
METADATA: dict[str, Any] = {
    "block_count": zoo.LAYERS,
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "embedding_length_out": HIDDEN * STREAMS,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": DIM,
    "attention.value_length": DIM,
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.q_lora_rank": RANK,
    "attention.sliding_window": WINDOW,
    "attention.output_group_count": GROUPS,
    "attention.output_lora_rank": RANK,
    "attention.compress_ratios": RATIOS,
    "attention.compress_rope_freq_base": STRETCHED_BASE,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_DIM,
    "attention.indexer.top_k": MOST,
    "rope.dimension_count": TURNED,
    "rope.freq_base": BASE,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": FACTOR,
    "rope.scaling.original_context_length": ORIGINAL,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "hyper_connection.count": STREAMS,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": EPS,
    "hash_layer_count": TOLD,
    "expert_count": EXPERTS,
    "expert_used_count": TOP,
    "expert_feed_forward_length": WIDTH,
    "expert_shared_count": 1,
    "expert_weights_scale": SCALE,
    "expert_weights_norm": True,
    "expert_gating_func": 4,
    "swiglu_clamp_exp": [LIMIT] * zoo.LAYERS,
    "vocab_size": zoo.VOCABULARY,
}
"""As DeepseekV4Model of llama.cpp's conversion/deepseek.py writes it."""


def random_weights(seed: int = 1) -> Weights:
    random = Random(seed)
    matrix, norm, wide = random.matrix, random.norm, STREAMS * HIDDEN

    def compressor(name: str, width: int, ratio: int) -> Weights:
        both = 2 * width if ratio == 4 else width
        return {
            f"{name}_compressor_kv.weight": matrix(both, HIDDEN),
            f"{name}_compressor_gate.weight": matrix(both, HIDDEN),
            f"{name}_compressor_ape.weight": matrix(ratio, both),
            f"{name}_compressor_norm.weight": norm(width),
        }

    found: Weights = {
        "token_embd.weight": matrix(zoo.VOCABULARY, HIDDEN) * np.float32(4),
        "output_norm.weight": norm(HIDDEN),
        "output.weight": matrix(zoo.VOCABULARY, HIDDEN),
        **random.connection("output_hc", STREAMS, wide, 1),
    }
    for layer, ratio in enumerate(RATIOS):
        own: Weights = {
            "attn_norm.weight": norm(HIDDEN),
            "ffn_norm.weight": norm(HIDDEN),
            "attn_sinks.weight": matrix(HEADS),
            "attn_q_a.weight": matrix(RANK, HIDDEN),
            "attn_q_a_norm.weight": norm(RANK),
            "attn_q_b.weight": matrix(HEADS * DIM, RANK),
            "attn_kv.weight": matrix(DIM, HIDDEN),
            "attn_kv_a_norm.weight": norm(DIM),
            "attn_output_a.weight": matrix(GROUPS * RANK, HEADS * DIM // GROUPS),
            "attn_output_b.weight": matrix(HIDDEN, GROUPS * RANK),
            **random.connection("hc_attn", STREAMS * (STREAMS + 2), wide, 3),
            **random.connection("hc_ffn", STREAMS * (STREAMS + 2), wide, 3),
            **random.experts(EXPERTS, HIDDEN, WIDTH),
        }
        if ratio:
            own |= compressor("attn", DIM, ratio)
        if ratio == 4:
            own |= compressor("indexer", INDEX_DIM, ratio)
            own["indexer.attn_q_b.weight"] = matrix(INDEX_HEADS * INDEX_DIM, RANK)
            own["indexer.proj.weight"] = matrix(INDEX_HEADS, HIDDEN)
        if layer < TOLD:
            chosen = [random.order(EXPERTS)[:TOP] for _ in range(zoo.VOCABULARY)]
            own["ffn_gate_tid2eid.weight"] = np.array(chosen, np.int32)
        else:
            own["exp_probs_b.bias"] = matrix(EXPERTS)
        found |= {f"blk.{layer}.{name}": numbers for name, numbers in own.items()}
    return found


def write(file: Path, weights: Weights, **extra: Any) -> None:
    """`extra` metadata replaces what would be written; None leaves it out."""
    write_gguf(file, "deepseek4", METADATA | extra, weights)


def logits(weights: Weights, tokens: list[int]) -> Numbers:
    """float64 [tokens, vocabulary]."""
    streams = np.repeat(weights["token_embd.weight"][tokens][:, None], STREAMS, axis=1)
    streams = streams.astype(np.float64)
    for layer, ratio in enumerate(RATIOS):
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
    pairs = np.arange(TURNED // 2)
    if not ratio:
        return positions[:, None] * BASE ** (-2 * pairs / TURNED)
    plain = STRETCHED_BASE ** (-2 * pairs / TURNED)

    def turns(count: float) -> float:
        whole = np.log(ORIGINAL / (count * 2 * np.pi)) / np.log(STRETCHED_BASE)
        return float(TURNED * whole / 2)

    low, high = max(np.floor(turns(32)), 0), min(np.ceil(turns(1)), TURNED - 1)
    ramp = np.clip((pairs - low) / (max(high, low + 0.001) - low), 0, 1)
    return positions[:, None] * (plain / FACTOR * ramp + plain * (1 - ramp))


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
    q = turned(rms((low @ own["attn_q_b"].T).reshape(count, HEADS, DIM), EPS), angles)
    keys = turned(rms(x @ own["attn_kv"].T, EPS, own["attn_kv_a_norm"]), angles)
    ago = positions[:, None] - positions
    seen = (ago >= 0) & (ago < WINDOW)
    if ratio and count >= ratio:
        entries = _entries(x, own, "attn", ratio)
        there = np.arange(len(entries)) < ((positions + 1) // ratio)[:, None]
        if ratio == 4:
            there = _chosen(x, low, own, ratio, there)
        keys, seen = np.concatenate([keys, entries]), np.concatenate([seen, there], axis=1)
    mixed = turned(attended(q, keys, keys, seen, own["attn_sinks"], DIM**-0.5), -angles)
    parts = mixed.reshape(count, GROUPS, -1)
    through = own["attn_output_a"].reshape(GROUPS, RANK, -1)
    grouped = np.einsum("tgi,gri->tgr", parts, through).reshape(count, -1)
    found: Numbers = grouped @ own["attn_output_b"].T
    return found


def _chosen(x: Numbers, low: Numbers, own: Weights, ratio: int, there: Numbers) -> Numbers:
    keys = _entries(x, own, "indexer", ratio)
    q = (low @ own["indexer.attn_q_b"].T).reshape(len(x), INDEX_HEADS, INDEX_DIM)
    q = turned(q, _angles(np.arange(len(x)), ratio))
    weights = x @ own["indexer.proj"].T
    scores = np.einsum("th,thk->tk", weights, np.maximum(np.einsum("thd,kd->thk", q, keys), 0))
    return best_of(scores, there, MOST)


def _mixture(x: Numbers, own: Weights, ratio: int, tokens: Numbers) -> Numbers:
    scores = np.sqrt(np.log1p(np.exp(x @ own["ffn_gate_inp"].T)))
    if (told := own.get("ffn_gate_tid2eid")) is not None:
        best = told[tokens]
    else:
        best = np.argsort(-(scores + own["exp_probs_b.bias"]), axis=1, kind="stable")[:, :TOP]
    shares = np.take_along_axis(scores, best, axis=1)
    shares = shares / shares.sum(1, keepdims=True) * SCALE
    return mixture(x, own, best, shares, LIMIT, LIMIT)
