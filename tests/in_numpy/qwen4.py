"""Qwen3.8 Flash Next, tiny and random, as a GGUF file; and what it computes, as llama.cpp's
qwen4exp.cpp and transformers' modeling_qwen4_exp.py have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import zoo
from gguf_files import Quantize, plain

from in_numpy.parts import (
    Numbers,
    Random,
    Weights,
    best_of,
    of_layer,
    rms,
    sigmoid,
    softmax,
    swiglu,
    write_gguf,
)

HIDDEN, STREAMS, RANK = 128, 3, 32
HEADS, KV_HEADS, HEAD_DIM, TURNED, THETA = 4, 2, 64, 16, 1e4
KEY_HEADS, VALUE_HEADS, STATE, TAPS = 2, 4, 32, 4
INTERVAL = 3
EXPERTS, TOP, WIDTH = 8, 2, 32
INDEX_HEADS, INDEX_DIM, MOST, POOL = 3, 32, 12, 4
NGRAM_LAYER, ORDERS, EACH, ROW, END = 1, 3, 2, 32, 7
MULTIPLIERS = [7450623198421901, 2305843009213693, 9007199254740881]
SIZES, STARTS = [101, 103, 107, 109], [0, 101, 204, 311]
EPS = 1e-6
METADATA: dict[str, Any] = {
    "block_count": zoo.LAYERS,
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": EPS,
    "rope.dimension_count": TURNED,
    "rope.dimension_sections": [3, 3, 2, 0],
    "rope.freq_base": THETA,
    "ssm.conv_kernel": TAPS,
    "ssm.state_size": STATE,
    "ssm.group_count": KEY_HEADS,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.inner_size": VALUE_HEADS * STATE,
    "full_attention_interval": INTERVAL,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_DIM,
    "attention.indexer.top_k": MOST,
    "attention.compress_ratios": [POOL * ((i + 1) % INTERVAL == 0) for i in range(zoo.LAYERS)],
    "hyper_connection.count": STREAMS,
    "hyper_connection.low_rank": RANK,
    "ple.layers": [NGRAM_LAYER],
    "ple.ngram_size": ORDERS,
    "ple.heads_per_ngram": EACH,
    "ple.conv_kernel": TAPS,
    "ple.eos_token_id": END,
    "ple.layer_multipliers": np.array(MULTIPLIERS, np.uint64),
    "ple.head_vocab_sizes": np.array(SIZES, np.uint64),
    "ple.head_offsets": np.array(STARTS, np.uint64),
    "embedding_length_per_layer_input": ROW,
    "expert_count": EXPERTS,
    "expert_used_count": TOP,
    "expert_feed_forward_length": WIDTH,
    "expert_shared_feed_forward_length": WIDTH,
    "vocab_size": zoo.VOCABULARY,
}
"""As Qwen4ExpTextModel of llama.cpp's conversion/qwen4exp.py writes it."""


def random_weights(seed: int = 3) -> Weights:
    random = Random(seed)
    matrix, norm, wide = random.matrix, random.norm, STREAMS * HIDDEN

    def gated(name: str, last: bool = False) -> Weights:
        found = {
            f"{name}_norm.weight": norm(wide),
            f"{name}_down.weight": matrix(RANK, wide),
            f"{name}_up.weight": matrix(wide, RANK),
        }
        return found if last else found | {f"{name}_inject.weight": matrix(STREAMS, wide)}

    found: Weights = {
        "token_embd.weight": matrix(zoo.VOCABULARY, HIDDEN) * np.float32(4),
        TABLE: matrix(sum(SIZES), ROW) * np.float32(4),
        "output.weight": matrix(zoo.VOCABULARY, HIDDEN),
        **gated("output_hc", last=True),
    }
    keys, values = KEY_HEADS * STATE, VALUE_HEADS * STATE
    for layer in range(zoo.LAYERS):
        own = {
            **gated("hc_attn"),
            **gated("hc_ffn"),
            **random.experts(EXPERTS, HIDDEN, WIDTH),
            "ffn_gate_inp_shexp.weight": matrix(HIDDEN),
        }
        if (layer + 1) % INTERVAL == 0:
            own |= {
                "attn_q.weight": matrix(HEADS * 2 * HEAD_DIM, HIDDEN),
                "attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
                "attn_q_norm.weight": norm(HEAD_DIM),
                "attn_k_norm.weight": norm(HEAD_DIM),
                "indexer.q_proj.weight": matrix(INDEX_HEADS * INDEX_DIM, HIDDEN),
                "indexer.k_proj.weight": matrix(INDEX_DIM, HIDDEN),
                "indexer.q_norm.weight": norm(INDEX_DIM),
                "indexer.k_norm.weight": norm(INDEX_DIM),
            }
        else:
            own |= {
                "attn_qkv.weight": matrix(2 * keys + values, HIDDEN),
                "attn_gate.weight": matrix(values, HIDDEN),
                "ssm_conv1d.weight": matrix(2 * keys + values, TAPS),
                "ssm_dt.bias": matrix(VALUE_HEADS),
                "ssm_a": -norm(VALUE_HEADS),
                "ssm_beta.weight": matrix(VALUE_HEADS, HIDDEN),
                "ssm_alpha.weight": matrix(VALUE_HEADS, HIDDEN),
                "ssm_norm.weight": norm(STATE),
                "ssm_out.weight": matrix(HIDDEN, values),
            }
        if layer == NGRAM_LAYER:
            brought = len(SIZES) * ROW
            own |= {
                "ple_key.weight": matrix(wide, brought),
                "ple_value.weight": matrix(HIDDEN, brought),
                **{f"ple_norm_{part}.weight": norm(wide) for part in ("key", "query", "conv")},
                "ple_conv1d.weight": matrix(wide, TAPS),
            }
        found |= {f"blk.{layer}.{name}": numbers for name, numbers in own.items()}
    return found


TABLE = "per_layer_token_embd.weight"


def write(file: Path, weights: Weights, quantize: Quantize = plain, **extra: Any) -> None:
    """`extra` metadata replaces what would be written; None leaves it out."""
    write_gguf(file, "qwen4exp", METADATA | extra, weights, quantize)


def logits(weights: Weights, tokens: list[int]) -> Numbers:
    """float64 [tokens, vocabulary]."""
    streams = np.repeat(weights["token_embd.weight"][tokens][:, None], STREAMS, axis=1)
    streams = streams.astype(np.float64)
    for layer in range(zoo.LAYERS):
        own = of_layer(weights, layer)
        if layer == NGRAM_LAYER:
            streams = streams + _of_ngrams(streams, own, _rows(weights, tokens))
        x, added = _collapsed(streams, own, "hc_attn")
        given = _attention(x, own) if "attn_q" in own else _delta_net(x, own)
        streams = streams + added[..., None] * given[:, None]
        x, added = _collapsed(streams, own, "hc_ffn")
        streams = streams + added[..., None] * _mlp(x, own)[:, None]
    outer = {name.removesuffix(".weight"): numbers for name, numbers in weights.items()}
    x, _ = _collapsed(streams, outer, "output_hc")
    found: Numbers = x @ weights["output.weight"].T
    return found


def _normed(streams: Numbers, weight: Numbers) -> Numbers:
    return rms(streams, EPS, weight.reshape(STREAMS, HIDDEN))


def _collapsed(streams: Numbers, own: Weights, name: str) -> tuple[Numbers, Numbers]:
    """What a layer's part reads, and how much of what it gives goes to each stream."""
    normed = _normed(streams, own[f"{name}_norm"])
    wide = normed.reshape(len(normed), -1)
    low = wide @ own[f"{name}_down"].T / STREAMS
    gate = sigmoid((low * sigmoid(low)) @ own[f"{name}_up"].T).reshape(normed.shape)
    inject = own.get(f"{name}_inject")
    added = 0 * wide[:, :STREAMS] if inject is None else 2 * sigmoid(wide @ inject.T / STREAMS)
    return (gate * normed).mean(1), added


def _rows(weights: Weights, tokens: list[int]) -> Numbers:
    """[tokens, what they bring]."""
    found = []
    for at, token in enumerate(tokens):
        seen = [token]
        for back in range(1, ORDERS):
            before = tokens[at - back] if at >= back else END
            seen.append(END if back > 1 and seen[-1] == END else before)
        for part, (size, start) in enumerate(zip(SIZES, STARTS, strict=True)):
            mixed = 0
            for one, multiplier in zip(seen[: part // EACH + 2], MULTIPLIERS, strict=False):
                mixed ^= one * multiplier
            found.append(mixed % size + start)
    return weights[TABLE][found].reshape(len(tokens), -1)


def _of_ngrams(streams: Numbers, own: Weights, brought: Numbers) -> Numbers:
    key = _normed((brought @ own["ple_key"].T).reshape(streams.shape), own["ple_norm_key"])
    query = _normed(streams, own["ple_norm_query"])
    score = (key * query).sum(-1) / HIDDEN**0.5
    share = sigmoid(np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6)))
    value = share[..., None] * (brought @ own["ple_value"].T)[:, None]
    rows = _normed(value, own["ple_norm_conv"]).reshape(len(value), -1)
    rows = np.pad(rows, (((TAPS - 1) * ORDERS, 0), (0, 0)))
    taps = own["ple_conv1d"]
    summed = sum(rows[i * ORDERS :][: len(value)] * taps[:, i] for i in range(TAPS))
    found: Numbers = value + (summed * sigmoid(summed)).reshape(value.shape)
    return found


def _turned(x: Numbers, positions: Numbers) -> Numbers:
    """The first numbers of x [tokens, heads, dim], halves as pairs."""
    half = TURNED // 2
    angles = positions[:, None, None] * THETA ** (-np.arange(half) / half)
    cos, sin, found = np.cos(angles), np.sin(angles), x.copy()
    first, second = x[..., :half], x[..., half:TURNED]
    found[..., :half] = first * cos - second * sin
    found[..., half:TURNED] = second * cos + first * sin
    return found


def _chosen(x: Numbers, own: Weights) -> Numbers:
    """Of the tokens before each, those of the best pools and those after the last whole one."""
    positions = np.arange(len(x))
    q = (x @ own["indexer.q_proj"].T).reshape(len(x), INDEX_HEADS, INDEX_DIM)
    q = _turned(rms(q, EPS, own["indexer.q_norm"]), positions)
    pools = len(x) // POOL
    k = (x @ own["indexer.k_proj"].T)[: pools * POOL].reshape(pools, POOL, -1).mean(1)
    k = _turned(rms(k, EPS, own["indexer.k_norm"])[:, None], np.arange(pools) * POOL)[:, 0]
    scores = np.maximum(np.einsum("thd,pd->thp", q, k), 0).sum(1)
    whole = (positions + 1) // POOL
    best = best_of(scores, np.arange(pools) < whole[:, None], MOST // POOL)
    found = np.zeros((len(x), len(x)), bool)
    found[:, : pools * POOL] = np.repeat(best, POOL, axis=1)
    found |= positions >= (whole * POOL)[:, None]
    return found & (positions <= positions[:, None])


def _attention(x: Numbers, own: Weights) -> Numbers:
    count, positions = len(x), np.arange(len(x))
    both = (x @ own["attn_q"].T).reshape(count, HEADS, 2, HEAD_DIM)
    q = _turned(rms(both[:, :, 0], EPS, own["attn_q_norm"]), positions)
    k = (x @ own["attn_k"].T).reshape(count, KV_HEADS, HEAD_DIM)
    k = _turned(rms(k, EPS, own["attn_k_norm"]), positions)
    v = (x @ own["attn_v"].T).reshape(count, KV_HEADS, HEAD_DIM)
    k, v = (np.repeat(one, HEADS // KV_HEADS, axis=1) for one in (k, v))
    scores = np.einsum("thd,khd->thk", q, k) * HEAD_DIM**-0.5
    weights = softmax(np.where(_chosen(x, own)[:, None], scores, -np.inf))
    out = np.einsum("thk,khd->thd", weights, v) * sigmoid(both[:, :, 1])
    found: Numbers = out.reshape(count, -1) @ own["attn_output"].T
    return found


def _delta_net(x: Numbers, own: Weights) -> Numbers:
    """Gated (arXiv:2412.06464, eq. 10); value head i goes with key head i modulo their number."""
    count, keys = len(x), KEY_HEADS * STATE
    rows = np.pad(x @ own["attn_qkv"].T, ((TAPS - 1, 0), (0, 0)))
    summed = sum(rows[i : i + count] * own["ssm_conv1d"][:, i] for i in range(TAPS))
    mixed = summed * sigmoid(summed)

    def of_heads(part: Numbers) -> Numbers:
        own_keys = part.reshape(count, KEY_HEADS, STATE)
        found = own_keys / np.sqrt((own_keys**2).sum(-1, keepdims=True) + EPS)
        return np.tile(found, (1, VALUE_HEADS // KEY_HEADS, 1))

    q, k = of_heads(mixed[:, :keys]) * STATE**-0.5, of_heads(mixed[:, keys : 2 * keys])
    v = mixed[:, 2 * keys :].reshape(count, VALUE_HEADS, STATE)
    fading = np.exp(own["ssm_a"] * np.logaddexp(0, x @ own["ssm_alpha"].T + own["ssm_dt.bias"]))
    beta = sigmoid(x @ own["ssm_beta"].T)
    state = np.zeros((VALUE_HEADS, STATE, STATE))  # [keys, values]
    out = np.zeros((count, VALUE_HEADS, STATE))
    for t in range(count):
        state = state * fading[t][:, None, None]
        wrong = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv->hkv", k[t], wrong * beta[t][:, None])
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    gate = sigmoid(x @ own["attn_gate"].T)
    found: Numbers = rms(out, EPS, own["ssm_norm"]).reshape(count, -1) * gate
    return found @ own["ssm_out"].T


def _mlp(x: Numbers, own: Weights) -> Numbers:
    scores = softmax(x @ own["ffn_gate_inp"].T)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
    shares = np.take_along_axis(scores, best, axis=1)
    shares = shares / shares.sum(1, keepdims=True)
    parts = ("gate", "up", "down")
    shared = swiglu(x, *(own[f"ffn_{part}_shexp"] for part in parts), np.inf)
    found = shared * sigmoid(x @ own["ffn_gate_inp_shexp"])[:, None]
    for token, (experts, weights) in enumerate(zip(best, shares, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            own_parts = (own[f"ffn_{part}_exps"][expert] for part in parts)
            found[token] += weight * swiglu(x[token], *own_parts, np.inf)
    return found
