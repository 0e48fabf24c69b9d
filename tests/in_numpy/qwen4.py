"""Qwen3.8 Flash Next, tiny and random, as a GGUF file; and what it computes, as llama.cpp's
qwen4exp.cpp and transformers' modeling_qwen4_exp.py have it."""

from __future__ import annotations

from dataclasses import dataclass
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

TURNED_SHARE, TAPS, ORDERS, END, EPS, THETA = 4, 4, 3, 7, 1e-6, 1e4
MULTIPLIERS = (7450623198421901, 2305843009213693, 9007199254740881)


@dataclass(frozen=True)
class Sizes:
    """Every `interval`-th layer attends, to `most` keys in pools of `pool`; layer 1 has a table of
    parts with so many `rows`, the same number for two tokens and for three."""

    layers: int = zoo.LAYERS
    interval: int = 3
    hidden: int = 128
    streams: int = 3
    rank: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 2
    value_heads: int = 4
    state: int = 32
    experts: int = 8
    top: int = 2
    width: int = 32
    index_heads: int = 3
    index_dim: int = 32
    most: int = 12
    pool: int = 4
    rows: tuple[int, ...] = (101, 103, 107, 109)
    context: int = 4096

    @property
    def turned(self) -> int:
        return self.head_dim // TURNED_SHARE

    @property
    def row(self) -> int:
        return self.hidden // len(self.rows)

    @property
    def starts(self) -> list[int]:
        return [sum(self.rows[:part]) for part in range(len(self.rows))]


TINY = Sizes()
NGRAM_LAYER = 1
TABLE = "per_layer_token_embd.weight"


def metadata(sizes: Sizes) -> dict[str, Any]:
    """By key below the architecture, as Qwen4ExpTextModel of llama.cpp's conversion/qwen4exp.py
    writes it."""
    pairs = sizes.turned // 2
    attends = [(layer + 1) % sizes.interval == 0 for layer in range(sizes.layers)]
    return {
        "block_count": sizes.layers,
        "context_length": sizes.context,
        "embedding_length": sizes.hidden,
        "feed_forward_length": sizes.width,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.dimension_count": sizes.turned,
        "rope.dimension_sections": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0],
        "rope.freq_base": THETA,
        "ssm.conv_kernel": TAPS,
        "ssm.state_size": sizes.state,
        "ssm.group_count": sizes.key_heads,
        "ssm.time_step_rank": sizes.value_heads,
        "ssm.inner_size": sizes.value_heads * sizes.state,
        "full_attention_interval": sizes.interval,
        "attention.indexer.head_count": sizes.index_heads,
        "attention.indexer.key_length": sizes.index_dim,
        "attention.indexer.top_k": sizes.most,
        "attention.compress_ratios": [sizes.pool * one for one in attends],
        "hyper_connection.count": sizes.streams,
        "hyper_connection.low_rank": sizes.rank,
        "ple.layers": [NGRAM_LAYER],
        "ple.ngram_size": ORDERS,
        "ple.heads_per_ngram": len(sizes.rows) // (ORDERS - 1),
        "ple.conv_kernel": TAPS,
        "ple.eos_token_id": END,
        "ple.layer_multipliers": np.array(MULTIPLIERS, np.uint64),
        "ple.head_vocab_sizes": np.array(sizes.rows, np.uint64),
        "ple.head_offsets": np.array(sizes.starts, np.uint64),
        "embedding_length_per_layer_input": sizes.row,
        "expert_count": sizes.experts,
        "expert_used_count": sizes.top,
        "expert_feed_forward_length": sizes.width,
        "expert_shared_feed_forward_length": sizes.width,
        "vocab_size": zoo.VOCABULARY,
    }


def random_weights(sizes: Sizes = TINY, seed: int = 3) -> Weights:
    random = Random(seed)
    matrix, norm, wide = random.matrix, random.norm, sizes.streams * sizes.hidden

    def gated(name: str, last: bool = False) -> Weights:
        found = {
            f"{name}_norm.weight": norm(wide),
            f"{name}_down.weight": matrix(sizes.rank, wide),
            f"{name}_up.weight": matrix(wide, sizes.rank),
        }
        return found if last else found | {f"{name}_inject.weight": matrix(sizes.streams, wide)}

    found: Weights = {
        "token_embd.weight": matrix(zoo.VOCABULARY, sizes.hidden) * np.float32(4),
        TABLE: matrix(sum(sizes.rows), sizes.row) * np.float32(4),
        "output.weight": matrix(zoo.VOCABULARY, sizes.hidden),
        **gated("output_hc", last=True),
    }
    keys, values = sizes.key_heads * sizes.state, sizes.value_heads * sizes.state
    for layer in range(sizes.layers):
        own = {
            **gated("hc_attn"),
            **gated("hc_ffn"),
            **random.experts(sizes.experts, sizes.hidden, sizes.width),
            "ffn_gate_inp_shexp.weight": matrix(sizes.hidden),
        }
        if (layer + 1) % sizes.interval == 0:
            own |= {
                "attn_q.weight": matrix(sizes.heads * 2 * sizes.head_dim, sizes.hidden),
                "attn_k.weight": matrix(sizes.kv_heads * sizes.head_dim, sizes.hidden),
                "attn_v.weight": matrix(sizes.kv_heads * sizes.head_dim, sizes.hidden),
                "attn_output.weight": matrix(sizes.hidden, sizes.heads * sizes.head_dim),
                "attn_q_norm.weight": norm(sizes.head_dim),
                "attn_k_norm.weight": norm(sizes.head_dim),
                "indexer.q_proj.weight": matrix(sizes.index_heads * sizes.index_dim, sizes.hidden),
                "indexer.k_proj.weight": matrix(sizes.index_dim, sizes.hidden),
                "indexer.q_norm.weight": norm(sizes.index_dim),
                "indexer.k_norm.weight": norm(sizes.index_dim),
            }
        else:
            own |= {
                "attn_qkv.weight": matrix(2 * keys + values, sizes.hidden),
                "attn_gate.weight": matrix(values, sizes.hidden),
                "ssm_conv1d.weight": matrix(2 * keys + values, TAPS),
                "ssm_dt.bias": matrix(sizes.value_heads),
                "ssm_a": -norm(sizes.value_heads),
                "ssm_beta.weight": matrix(sizes.value_heads, sizes.hidden),
                "ssm_alpha.weight": matrix(sizes.value_heads, sizes.hidden),
                "ssm_norm.weight": norm(sizes.state),
                "ssm_out.weight": matrix(sizes.hidden, values),
            }
        if layer == NGRAM_LAYER:
            brought = len(sizes.rows) * sizes.row
            own |= {
                "ple_key.weight": matrix(wide, brought),
                "ple_value.weight": matrix(sizes.hidden, brought),
                **{f"ple_norm_{part}.weight": norm(wide) for part in ("key", "query", "conv")},
                "ple_conv1d.weight": matrix(wide, TAPS),
            }
        found |= {f"blk.{layer}.{name}": numbers for name, numbers in own.items()}
    return found


def write(file: Path, weights: Weights, quantize: Quantize = plain, **extra: Any) -> None:
    """`extra` metadata replaces what would be written; None leaves it out."""
    write_gguf(file, "qwen4exp", metadata(TINY) | extra, weights, quantize)


def logits(weights: Weights, tokens: list[int]) -> Numbers:
    """float64 [tokens, vocabulary]."""
    streams = np.repeat(weights["token_embd.weight"][tokens][:, None], TINY.streams, axis=1)
    streams = streams.astype(np.float64)
    for layer in range(TINY.layers):
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
    return rms(streams, EPS, weight.reshape(TINY.streams, TINY.hidden))


def _collapsed(streams: Numbers, own: Weights, name: str) -> tuple[Numbers, Numbers]:
    """What a layer's part reads, and how much of what it gives goes to each stream."""
    normed = _normed(streams, own[f"{name}_norm"])
    wide = normed.reshape(len(normed), -1)
    low = wide @ own[f"{name}_down"].T / TINY.streams
    gate = sigmoid((low * sigmoid(low)) @ own[f"{name}_up"].T).reshape(normed.shape)
    inject = own.get(f"{name}_inject")
    added = (
        0 * wide[:, : TINY.streams]
        if inject is None
        else 2 * sigmoid(wide @ inject.T / TINY.streams)
    )
    return (gate * normed).mean(1), added


def _rows(weights: Weights, tokens: list[int]) -> Numbers:
    """[tokens, what they bring]."""
    found = []
    for at, token in enumerate(tokens):
        seen = [token]
        for back in range(1, ORDERS):
            before = tokens[at - back] if at >= back else END
            seen.append(END if back > 1 and seen[-1] == END else before)
        for part, (size, start) in enumerate(zip(TINY.rows, TINY.starts, strict=True)):
            mixed = 0
            for one, multiplier in zip(
                seen[: part // (len(TINY.rows) // (ORDERS - 1)) + 2], MULTIPLIERS, strict=False
            ):
                mixed ^= one * multiplier
            found.append(mixed % size + start)
    return weights[TABLE][found].reshape(len(tokens), -1)


def _of_ngrams(streams: Numbers, own: Weights, brought: Numbers) -> Numbers:
    key = _normed((brought @ own["ple_key"].T).reshape(streams.shape), own["ple_norm_key"])
    query = _normed(streams, own["ple_norm_query"])
    score = (key * query).sum(-1) / TINY.hidden**0.5
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
    half = TINY.turned // 2
    angles = positions[:, None, None] * THETA ** (-np.arange(half) / half)
    cos, sin, found = np.cos(angles), np.sin(angles), x.copy()
    first, second = x[..., :half], x[..., half : TINY.turned]
    found[..., :half] = first * cos - second * sin
    found[..., half : TINY.turned] = second * cos + first * sin
    return found


def _chosen(x: Numbers, own: Weights) -> Numbers:
    """Of the tokens before each, those of the best pools and those after the last whole one."""
    positions = np.arange(len(x))
    q = (x @ own["indexer.q_proj"].T).reshape(len(x), TINY.index_heads, TINY.index_dim)
    q = _turned(rms(q, EPS, own["indexer.q_norm"]), positions)
    pools = len(x) // TINY.pool
    k = (x @ own["indexer.k_proj"].T)[: pools * TINY.pool].reshape(pools, TINY.pool, -1).mean(1)
    k = _turned(rms(k, EPS, own["indexer.k_norm"])[:, None], np.arange(pools) * TINY.pool)[:, 0]
    scores = np.maximum(np.einsum("thd,pd->thp", q, k), 0).sum(1)
    whole = (positions + 1) // TINY.pool
    best = best_of(scores, np.arange(pools) < whole[:, None], TINY.most // TINY.pool)
    found = np.zeros((len(x), len(x)), bool)
    found[:, : pools * TINY.pool] = np.repeat(best, TINY.pool, axis=1)
    found |= positions >= (whole * TINY.pool)[:, None]
    return found & (positions <= positions[:, None])


def _attention(x: Numbers, own: Weights) -> Numbers:
    count, positions = len(x), np.arange(len(x))
    both = (x @ own["attn_q"].T).reshape(count, TINY.heads, 2, TINY.head_dim)
    q = _turned(rms(both[:, :, 0], EPS, own["attn_q_norm"]), positions)
    k = (x @ own["attn_k"].T).reshape(count, TINY.kv_heads, TINY.head_dim)
    k = _turned(rms(k, EPS, own["attn_k_norm"]), positions)
    v = (x @ own["attn_v"].T).reshape(count, TINY.kv_heads, TINY.head_dim)
    k, v = (np.repeat(one, TINY.heads // TINY.kv_heads, axis=1) for one in (k, v))
    scores = np.einsum("thd,khd->thk", q, k) * TINY.head_dim**-0.5
    weights = softmax(np.where(_chosen(x, own)[:, None], scores, -np.inf))
    out = np.einsum("thk,khd->thd", weights, v) * sigmoid(both[:, :, 1])
    found: Numbers = out.reshape(count, -1) @ own["attn_output"].T
    return found


def _delta_net(x: Numbers, own: Weights) -> Numbers:
    """Gated (arXiv:2412.06464, eq. 10); value head i goes with key head i modulo their number."""
    count, keys = len(x), TINY.key_heads * TINY.state
    rows = np.pad(x @ own["attn_qkv"].T, ((TAPS - 1, 0), (0, 0)))
    summed = sum(rows[i : i + count] * own["ssm_conv1d"][:, i] for i in range(TAPS))
    mixed = summed * sigmoid(summed)

    def of_heads(part: Numbers) -> Numbers:
        own_keys = part.reshape(count, TINY.key_heads, TINY.state)
        found = own_keys / np.sqrt((own_keys**2).sum(-1, keepdims=True) + EPS)
        return np.tile(found, (1, TINY.value_heads // TINY.key_heads, 1))

    q, k = of_heads(mixed[:, :keys]) * TINY.state**-0.5, of_heads(mixed[:, keys : 2 * keys])
    v = mixed[:, 2 * keys :].reshape(count, TINY.value_heads, TINY.state)
    fading = np.exp(own["ssm_a"] * np.logaddexp(0, x @ own["ssm_alpha"].T + own["ssm_dt.bias"]))
    beta = sigmoid(x @ own["ssm_beta"].T)
    state = np.zeros((TINY.value_heads, TINY.state, TINY.state))  # [keys, values]
    out = np.zeros((count, TINY.value_heads, TINY.state))
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
    best = np.argsort(-scores, axis=1, kind="stable")[:, : TINY.top]
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
