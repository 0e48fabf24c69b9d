"""Hy4, tiny and random, as a GGUF file; and what it computes, as llama.cpp's hy-v4.cpp has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zoo

from in_numpy.hyper import collapsed
from in_numpy.parts import (
    Numbers,
    Random,
    Weights,
    attended,
    best_of,
    by_sigmoid,
    layer_norm,
    mixture,
    of_layer,
    rms,
    sigmoid,
    swiglu,
    turned,
    write_gguf,
)

HIDDEN, STREAMS, HEADS, RANK = 64, 4, 4, 32
NOPE, TURNED, LATENT, VALUE = 16, 16, 32, 24
EXPERTS, TOP, WIDTH, DENSE_WIDTH = 8, 2, 32, 48
INDEX_HEADS, INDEX_DIM, MOST = 12, 64, 12
OWN_INDEXER = [1, 1, 0, 0, 1, 0]
EPS, LIMIT, SCALE, MAGNITUDE, BASE = 1e-5, 1.0, 1.7, 1.8, 10000.0
EPS_OF_LATENTS = 1e-6  # which is not configured
METADATA: dict[str, Any] = {
    "block_count": zoo.LAYERS,
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "feed_forward_length": DENSE_WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": LATENT + TURNED,
    "attention.value_length": LATENT,
    "attention.key_length_mla": NOPE + TURNED,
    "attention.value_length_mla": VALUE,
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.q_lora_rank": RANK,
    "attention.kv_lora_rank": LATENT,
    "rope.dimension_count": TURNED,
    "rope.freq_base": BASE,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_DIM,
    "attention.indexer.top_k": MOST,
    "attention.indexer.types": [bool(own) for own in OWN_INDEXER],
    "hyper_connection.count": STREAMS,
    "hyper_connection.epsilon": EPS,
    "hyper_connection.magnitude": MAGNITUDE,
    "leading_dense_block_count": 1,
    "expert_count": EXPERTS,
    "expert_used_count": TOP,
    "expert_feed_forward_length": WIDTH,
    "expert_shared_count": 1,
    "expert_weights_scale": SCALE,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "swiglu_clamp_exp": [LIMIT] * zoo.LAYERS,
    "vocab_size": zoo.VOCABULARY,
}
"""As HYV4Model of llama.cpp's conversion/hy_v4.py writes it."""


def random_weights(indexed: bool = True, seed: int = 2) -> Weights:
    random = Random(seed)
    matrix, norm, wide = random.matrix, random.norm, STREAMS * HIDDEN
    found: Weights = {
        "token_embd.weight": matrix(zoo.VOCABULARY, HIDDEN) * np.float32(4),
        "output_norm.weight": norm(HIDDEN),
        "output.weight": matrix(zoo.VOCABULARY, HIDDEN),
        **random.connection("output_hc", STREAMS, wide, 1),
    }
    for layer, has_indexer in enumerate(OWN_INDEXER):
        own: Weights = {
            "attn_norm.weight": norm(HIDDEN),
            "ffn_norm.weight": norm(HIDDEN),
            "attn_sinks.weight": matrix(HEADS),
            "attn_q_a.weight": matrix(RANK, HIDDEN),
            "attn_q_a_norm.weight": norm(RANK),
            "attn_q_b.weight": matrix(HEADS * (NOPE + TURNED), RANK),
            "attn_kv_a_mqa.weight": matrix(LATENT + TURNED, HIDDEN),
            "attn_kv_a_norm.weight": norm(LATENT),
            "attn_k_b.weight": matrix(HEADS, LATENT, NOPE),
            "attn_v_b.weight": matrix(HEADS, VALUE, LATENT),
            "attn_gate.weight": matrix(HEADS * VALUE, HIDDEN),
            "attn_output.weight": matrix(HIDDEN, HEADS * VALUE),
            **random.connection("hc_attn", 2 * STREAMS, wide, 2),
            **random.connection("hc_ffn", 2 * STREAMS, wide, 2),
        }
        if has_indexer and indexed:
            own["indexer.attn_q_b.weight"] = matrix(INDEX_HEADS * INDEX_DIM, RANK)
            own["indexer.attn_k.weight"] = matrix(INDEX_DIM, HIDDEN)
            own["indexer.k_norm.weight"] = norm(INDEX_DIM)
            own["indexer.k_norm.bias"] = matrix(INDEX_DIM)
            own["indexer.proj.weight"] = matrix(INDEX_HEADS, HIDDEN)
        if layer == 0:
            own |= random.mlp(HIDDEN, DENSE_WIDTH)
        else:
            own |= random.experts(EXPERTS, HIDDEN, WIDTH)
            own["exp_probs_b.bias"] = matrix(EXPERTS)
        found |= {f"blk.{layer}.{name}": numbers for name, numbers in own.items()}
    return found


def write(file: Path, weights: Weights, **extra: Any) -> None:
    """`extra` metadata replaces what would be written; None leaves it out."""
    write_gguf(file, "hy_v4", METADATA | extra, weights)


def logits(weights: Weights, tokens: list[int]) -> Numbers:
    """float64 [tokens, vocabulary]."""
    streams = np.repeat(weights["token_embd.weight"][tokens][:, None], STREAMS, axis=1)
    streams = streams.astype(np.float64)
    count = len(tokens)
    seen = np.tril(np.ones((count, count), bool))
    for layer in range(zoo.LAYERS):
        own = of_layer(weights, layer)
        x, rows = collapsed(streams, own, "hc_attn", EPS)
        x = rms(x, EPS, own["attn_norm"])
        if "indexer.proj" in own:
            seen = _chosen(x, own)
        streams = _added(streams, _attention(x, own, seen), rows)
        x, rows = collapsed(streams, own, "hc_ffn", EPS)
        streams = _added(streams, _mlp(rms(x, EPS, own["ffn_norm"]), own), rows)
    outer = {name.removesuffix(".weight"): numbers for name, numbers in weights.items()}
    x = rms(collapsed(streams, outer, "output_hc", EPS)[0], EPS, outer["output_norm"])
    found: Numbers = x @ outer["output"].T
    return found


def _added(streams: Numbers, given: Numbers, rows: Numbers) -> Numbers:
    post = MAGNITUDE * sigmoid(rows) + EPS
    return streams + post[..., None] * given[:, None]


def _angles(count: int) -> Numbers:
    return np.arange(count)[:, None] * BASE ** (-2 * np.arange(TURNED // 2) / TURNED)


def _low(x: Numbers, own: Weights) -> Numbers:
    return rms(x @ own["attn_q_a"].T, EPS_OF_LATENTS, own["attn_q_a_norm"])


def _chosen(x: Numbers, own: Weights) -> Numbers:
    count = len(x)
    q = (_low(x, own) @ own["indexer.attn_q_b"].T).reshape(count, INDEX_HEADS, INDEX_DIM)
    k = x @ own["indexer.attn_k"].T
    k = layer_norm(k, EPS, own["indexer.k_norm"], own["indexer.k_norm.bias"])
    q, k = turned(q, _angles(count)), turned(k, _angles(count))
    scores = np.maximum(np.einsum("thd,kd->thk", q, k), 0)
    summed = np.einsum("th,thk->tk", x @ own["indexer.proj"].T, scores)
    return best_of(summed, np.tril(np.ones((count, count), bool)), MOST)


def _attention(x: Numbers, own: Weights, seen: Numbers) -> Numbers:
    count = len(x)
    q = (_low(x, own) @ own["attn_q_b"].T).reshape(count, HEADS, -1)
    angles = _angles(count)
    latent, key = np.split(x @ own["attn_kv_a_mqa"].T, [LATENT], axis=-1)
    latent = rms(latent, EPS_OF_LATENTS, own["attn_kv_a_norm"])
    inside = np.einsum("thn,hln->thl", q[..., :NOPE], own["attn_k_b"])
    q = np.concatenate([turned(q[..., NOPE:], angles), inside], axis=-1)
    keys = np.concatenate([turned(key, angles), latent], axis=-1)
    scale = (NOPE + TURNED) ** -0.5
    mixed = attended(q, keys, latent, seen, own["attn_sinks"], scale)
    out = np.einsum("thl,hvl->thv", mixed, own["attn_v_b"]).reshape(count, -1)
    found: Numbers = (out * sigmoid(x @ own["attn_gate"].T)) @ own["attn_output"].T
    return found


def _mlp(x: Numbers, own: Weights) -> Numbers:
    if "ffn_gate_inp" not in own:
        return swiglu(x, own["ffn_gate"], own["ffn_up"], own["ffn_down"], np.inf)
    return mixture(x, own, *by_sigmoid(x, own, TOP, SCALE), LIMIT, np.inf)
