"""GLM 5.3, tiny and random, as a GGUF file; and what it computes, as llama.cpp's glm5-next.cpp has
it."""

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
    by_sigmoid,
    layer_norm,
    mixture,
    of_layer,
    rms,
    sigmoid,
    softmax,
    swiglu,
    write_gguf,
)

HIDDEN, STREAMS, HEADS, RANK = 64, 4, 4, 32
NOPE, LATENT, VALUE = 24, 32, 24
STATE, TAPS, BOUND = 16, 4, -5.0
EXPERTS, TOP, WIDTH, DENSE_WIDTH = 8, 2, 32, 48
INDEX_HEADS, INDEX_DIM, MOST, POOL = 12, 64, 12, 3
ATTENDS = [0, 1, 1, 0, 1, 1]
OWN_INDEXER = [1, 1, 0, 1, 1, 0]
EPS, LIMIT, SCALE = 1e-5, 1.0, 1.7
METADATA: dict[str, Any] = {
    "block_count": zoo.LAYERS,
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "feed_forward_length": DENSE_WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": ATTENDS,
    "attention.key_length": LATENT,
    "attention.value_length": LATENT,
    "attention.key_length_mla": NOPE,
    "attention.value_length_mla": VALUE,
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.layer_norm_epsilon": 1e-6,
    "attention.q_lora_rank": RANK,
    "attention.kv_lora_rank": LATENT,
    "rope.dimension_count": 0,
    "ssm.conv_kernel": TAPS,
    "kda.head_dim": STATE,
    "kda.gate_lower_bound": BOUND,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_DIM,
    "attention.indexer.top_k": MOST,
    "attention.indexer.kpool": POOL,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.types": [bool(own) for own in OWN_INDEXER],
    "hyper_connection.count": STREAMS,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": EPS,
    "leading_dense_block_count": 1,
    "expert_count": EXPERTS,
    "expert_used_count": TOP,
    "expert_feed_forward_length": WIDTH,
    "expert_shared_count": 1,
    "expert_weights_scale": SCALE,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "swiglu_clamp_exp": [LIMIT] * zoo.LAYERS,
    "swiglu_clamp_shexp": [LIMIT] * zoo.LAYERS,
    "vocab_size": zoo.VOCABULARY,
}
"""As Glm5NextModel of llama.cpp's conversion/glm.py writes it."""


def random_weights(seed: int = 3) -> Weights:
    random = Random(seed)
    matrix, norm, wide = random.matrix, random.norm, STREAMS * HIDDEN
    found: Weights = {
        "token_embd.weight": matrix(zoo.VOCABULARY, HIDDEN) * np.float32(4),
        "output_norm.weight": norm(HIDDEN),
        "output.weight": matrix(zoo.VOCABULARY, HIDDEN),
    }
    inner = HEADS * STATE
    for layer, attends in enumerate(ATTENDS):
        own: Weights = {
            "attn_norm.weight": norm(HIDDEN),
            "ffn_norm.weight": norm(HIDDEN),
            **random.connection("hc_attn", STREAMS * (STREAMS + 2), wide, 3),
            **random.connection("hc_ffn", STREAMS * (STREAMS + 2), wide, 3),
        }
        if attends:
            own |= {
                "attn_q_a.weight": matrix(RANK, HIDDEN),
                "attn_q_a_norm.weight": norm(RANK),
                "attn_q_b.weight": matrix(HEADS * NOPE, RANK),
                "attn_kv_a_mqa.weight": matrix(LATENT, HIDDEN),
                "attn_kv_a_norm.weight": norm(LATENT),
                "attn_k_b.weight": matrix(HEADS, LATENT, NOPE),
                "attn_v_b.weight": matrix(HEADS, VALUE, LATENT),
                "attn_output.weight": matrix(HIDDEN, HEADS * VALUE),
            }
        else:
            own |= {
                **{f"attn_{part}.weight": matrix(inner, HIDDEN) for part in "qkv"},
                **{f"ssm_conv1d_{part}.weight": matrix(1, inner, 1, TAPS) for part in "qkv"},
                "ssm_f_a.weight": matrix(STATE, HIDDEN),
                "ssm_f_b.weight": matrix(inner, STATE),
                "ssm_g_a.weight": matrix(STATE, HIDDEN),
                "ssm_g_b.weight": matrix(inner, STATE),
                "ssm_beta.weight": matrix(HEADS, HIDDEN),
                "ssm_a": -norm(HEADS),
                "ssm_dt.bias": matrix(inner),
                "ssm_norm.weight": norm(STATE),
                "attn_output.weight": matrix(HIDDEN, inner),
            }
        if attends and OWN_INDEXER[layer]:
            own |= {
                "indexer.attn_q_b.weight": matrix(INDEX_HEADS * INDEX_DIM, RANK),
                "indexer.attn_k.weight": matrix(INDEX_DIM, HIDDEN),
                "indexer.k_norm.weight": norm(INDEX_DIM),
                "indexer.k_norm.bias": matrix(INDEX_DIM),
                "indexer.proj.weight": matrix(INDEX_HEADS, HIDDEN),
                "indexer_compressor_gate.weight": matrix(INDEX_DIM, HIDDEN),
                "indexer_compressor_ape.weight": matrix(POOL, INDEX_DIM),
            }
        if layer == 0:
            own |= random.mlp(HIDDEN, DENSE_WIDTH)
        else:
            own |= random.experts(EXPERTS, HIDDEN, WIDTH)
            own["exp_probs_b.bias"] = matrix(EXPERTS)
        found |= {f"blk.{layer}.{name}": numbers for name, numbers in own.items()}
    return found


def write(file: Path, weights: Weights, **extra: Any) -> None:
    """`extra` metadata replaces what would be written; None leaves it out."""
    write_gguf(file, "glm5-next", METADATA | extra, weights)


def logits(weights: Weights, tokens: list[int]) -> Numbers:
    """float64 [tokens, vocabulary]."""
    streams = np.repeat(weights["token_embd.weight"][tokens][:, None], STREAMS, axis=1)
    streams = streams.astype(np.float64)
    seen = np.tril(np.ones((len(tokens),) * 2, bool))
    for layer, attends in enumerate(ATTENDS):
        own = of_layer(weights, layer)
        x, mixes = collapsed(streams, own, "hc_attn", EPS)
        x = rms(x, EPS, own["attn_norm"])
        if "indexer.proj" in own:
            seen = _chosen(x, own)
        given = _attention(x, own, seen) if attends else _delta_net(x, own)
        streams = expanded(streams, given, mixes, EPS)
        x, mixes = collapsed(streams, own, "hc_ffn", EPS)
        streams = expanded(streams, _mlp(rms(x, EPS, own["ffn_norm"]), own), mixes, EPS)
    x = rms(streams.mean(1), EPS, weights["output_norm.weight"])
    found: Numbers = x @ weights["output.weight"].T
    return found


def _chosen(x: Numbers, own: Weights) -> Numbers:
    """Of the tokens before each, those of the best pools and those after the last whole one."""
    count = len(x)
    low = rms(x @ own["attn_q_a"].T, EPS, own["attn_q_a_norm"])
    q = (low @ own["indexer.attn_q_b"].T).reshape(count, INDEX_HEADS, INDEX_DIM)
    k = x @ own["indexer.attn_k"].T
    k = layer_norm(k, 1e-6, own["indexer.k_norm"], own["indexer.k_norm.bias"])
    pools = count // POOL
    shape = (pools, POOL, INDEX_DIM)
    gate = (x @ own["indexer_compressor_gate"].T)[: pools * POOL].reshape(shape)
    weights = softmax(gate + own["indexer_compressor_ape"], axis=1)
    pooled = (weights * k[: pools * POOL].reshape(shape)).sum(1)
    scores = np.maximum(np.einsum("thd,pd->thp", q, pooled), 0)
    summed = np.einsum("th,thp->tp", x @ own["indexer.proj"].T, scores)
    whole = (np.arange(count) + 1) // POOL
    best = best_of(summed, np.arange(pools) < whole[:, None], MOST // POOL)
    found = np.zeros((count, count), bool)
    found[:, : pools * POOL] = np.repeat(best, POOL, axis=1)
    positions = np.arange(count)
    found |= positions >= (whole * POOL)[:, None]
    return found & (positions <= positions[:, None])


def _attention(x: Numbers, own: Weights, seen: Numbers) -> Numbers:
    count = len(x)
    low = rms(x @ own["attn_q_a"].T, EPS, own["attn_q_a_norm"])
    q = (low @ own["attn_q_b"].T).reshape(count, HEADS, NOPE)
    latent = rms(x @ own["attn_kv_a_mqa"].T, EPS, own["attn_kv_a_norm"])
    inside = np.einsum("thn,hln->thl", q, own["attn_k_b"])
    mixed = attended(inside, latent, latent, seen, np.full(HEADS, -np.inf), NOPE**-0.5)
    out = np.einsum("thl,hvl->thv", mixed, own["attn_v_b"]).reshape(count, -1)
    found: Numbers = out @ own["attn_output"].T
    return found


def _delta_net(x: Numbers, own: Weights) -> Numbers:
    """Kimi's (arXiv:2510.26692, eq. 6)."""
    count = len(x)

    def convolved(part: str) -> Numbers:
        rows = np.pad(x @ own[f"attn_{part}"].T, ((TAPS - 1, 0), (0, 0)))
        taps = own[f"ssm_conv1d_{part}"].reshape(-1, TAPS)
        summed = sum(rows[i : i + count] * taps[:, i] for i in range(TAPS))
        return (summed * sigmoid(summed)).reshape(count, HEADS, STATE)

    def unit(rows: Numbers) -> Numbers:
        found: Numbers = rows / np.sqrt((rows**2).sum(-1, keepdims=True) + 1e-6)
        return found

    q, k, v = unit(convolved("q")) * STATE**-0.5, unit(convolved("k")), convolved("v")
    made = x @ own["ssm_f_a"].T @ own["ssm_f_b"].T + own["ssm_dt.bias"]
    rate = -own["ssm_a"].reshape(HEADS, 1)
    fading = np.exp(BOUND * sigmoid(made.reshape(count, HEADS, STATE) * rate))
    beta = sigmoid(x @ own["ssm_beta"].T)
    state = np.zeros((HEADS, STATE, STATE))  # [keys, values]
    out = np.zeros((count, HEADS, STATE))
    for t in range(count):
        state = state * fading[t][..., None]
        wrong = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv->hkv", k[t], wrong * beta[t][:, None])
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    gate = sigmoid(x @ own["ssm_g_a"].T @ own["ssm_g_b"].T)
    found: Numbers = rms(out, EPS, own["ssm_norm"]).reshape(count, -1) * gate
    return found @ own["attn_output"].T


def _mlp(x: Numbers, own: Weights) -> Numbers:
    if "ffn_gate_inp" not in own:
        return swiglu(x, own["ffn_gate"], own["ffn_up"], own["ffn_down"], LIMIT)
    return mixture(x, own, *by_sigmoid(x, own, TOP, SCALE), LIMIT, LIMIT)
