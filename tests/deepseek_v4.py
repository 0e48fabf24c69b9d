"""DeepSeek V4, tiny and random, as a GGUF file; and what it computes, written out in NumPy as
transformers' modeling_deepseek_v4.py has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import zoo
from gguf_files import TOKENIZER

Numbers = npt.NDArray[Any]
Weights = dict[str, Numbers]

HIDDEN, STREAMS, HEADS, DIM, TURNED, GROUPS, RANK = 64, 4, 4, 32, 16, 2, 32
EXPERTS, TOP, WIDTH = 8, 2, 32
INDEX_HEADS, INDEX_DIM = 2, 64
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
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> Numbers:
        return rng.standard_normal(shape).astype(np.float32) * np.float32(2 / shape[-1] ** 0.5)

    def norm(size: int) -> Numbers:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    def connection(name: str, rows: int, scales: int) -> Weights:
        return {
            f"{name}_fn.weight": matrix(rows, STREAMS * HIDDEN),
            f"{name}_base.weight": matrix(rows),
            f"{name}_scale.weight": norm(scales),
        }

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
        **connection("output_hc", STREAMS, 1),
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
            **connection("hc_attn", STREAMS * (STREAMS + 2), 3),
            **connection("hc_ffn", STREAMS * (STREAMS + 2), 3),
            "ffn_gate_inp.weight": matrix(EXPERTS, HIDDEN),
            **{
                f"ffn_{part}_exps.weight": matrix(
                    EXPERTS, *((HIDDEN, WIDTH) if part == "down" else (WIDTH, HIDDEN))
                )
                for part in ("gate", "up", "down")
            },
            "ffn_gate_shexp.weight": matrix(WIDTH, HIDDEN),
            "ffn_up_shexp.weight": matrix(WIDTH, HIDDEN),
            "ffn_down_shexp.weight": matrix(HIDDEN, WIDTH),
        }
        if ratio:
            own |= compressor("attn", DIM, ratio)
        if ratio == 4:
            own |= compressor("indexer", INDEX_DIM, ratio)
            own["indexer.attn_q_b.weight"] = matrix(INDEX_HEADS * INDEX_DIM, RANK)
            own["indexer.proj.weight"] = matrix(INDEX_HEADS, HIDDEN)
        if layer < TOLD:
            chosen = [rng.permutation(EXPERTS)[:TOP] for _ in range(zoo.VOCABULARY)]
            own["ffn_gate_tid2eid.weight"] = np.array(chosen, np.int32)
        else:
            own["exp_probs_b.bias"] = matrix(EXPERTS)
        found |= {f"blk.{layer}.{name}": numbers for name, numbers in own.items()}
    return found


def write(file: Path, weights: Weights, **extra: Any) -> None:
    """`extra` metadata replaces what would be written; None leaves it out."""
    writer = gguf.GGUFWriter(file, "deepseek4")
    own = {f"deepseek4.{key}": value for key, value in (METADATA | extra).items()}
    for key, value in {**TOKENIZER, **own}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, numbers in weights.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(weights: Weights, tokens: list[int]) -> Numbers:
    """float64 [tokens, vocabulary]."""
    streams = np.repeat(weights["token_embd.weight"][tokens][:, None], STREAMS, axis=1)
    streams = streams.astype(np.float64)
    for layer, ratio in enumerate(RATIOS):
        prefix = f"blk.{layer}."
        own = {
            name.removeprefix(prefix).removesuffix(".weight"): numbers
            for name, numbers in weights.items()
            if name.startswith(prefix)
        }
        for place, part in (("attn", _attention), ("ffn", _mixture)):
            x, post, comb = _read(streams, own, f"hc_{place}")
            given = part(_rms(x, own[f"{place}_norm"]), own, ratio, np.array(tokens))
            mixed = np.einsum("tjk,tjd->tkd", comb, streams)
            streams = post[..., None] * given[:, None] + mixed
    outer = {name.removesuffix(".weight"): numbers for name, numbers in weights.items()}
    weighed = _mixes(streams, outer, "output_hc") * outer["output_hc_scale"]
    pre = _sigmoid(weighed + outer["output_hc_base"]) + EPS
    x = _rms(np.einsum("ts,tsd->td", pre, streams), outer["output_norm"])
    found: Numbers = x @ outer["output"].T
    return found


def _rms(x: Numbers, weight: Numbers | float = 1.0) -> Numbers:
    found: Numbers = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
    return found


def _sigmoid(x: Numbers) -> Numbers:
    found: Numbers = 1 / (1 + np.exp(-x))
    return found


def _softmax(x: Numbers, axis: int = -1) -> Numbers:
    grown = np.exp(x - x.max(axis, keepdims=True))
    found: Numbers = grown / grown.sum(axis, keepdims=True)
    return found


def _mixes(streams: Numbers, own: Weights, name: str) -> Numbers:
    found: Numbers = _rms(streams.reshape(len(streams), -1)) @ own[f"{name}_fn"].T
    return found


def _read(streams: Numbers, own: Weights, name: str) -> tuple[Numbers, Numbers, Numbers]:
    mixes = _mixes(streams, own, name)
    parts = [STREAMS, 2 * STREAMS]
    weights, base = np.split(mixes, parts, axis=-1), np.split(own[f"{name}_base"], parts)
    pre, post, comb = (
        w * s + b for w, s, b in zip(weights, own[f"{name}_scale"], base, strict=True)
    )
    comb = _softmax(comb.reshape(-1, STREAMS, STREAMS)) + EPS
    comb = comb / (comb.sum(-2, keepdims=True) + EPS)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdims=True) + EPS)
        comb = comb / (comb.sum(-2, keepdims=True) + EPS)
    return np.einsum("ts,tsd->td", _sigmoid(pre) + EPS, streams), 2 * _sigmoid(post), comb


def _frequencies(ratio: int) -> Numbers:
    """Layers that have entries stretch positions (YaRN, arXiv:2309.00071)."""
    pairs = np.arange(TURNED // 2)
    if not ratio:
        return BASE ** (-2 * pairs / TURNED)
    plain = STRETCHED_BASE ** (-2 * pairs / TURNED)

    def turns(count: float) -> float:
        return TURNED * np.log(ORIGINAL / (count * 2 * np.pi)) / (2 * np.log(STRETCHED_BASE))

    low, high = max(np.floor(turns(32)), 0), min(np.ceil(turns(1)), TURNED - 1)
    ramp = np.clip((pairs - low) / (max(high, low + 0.001) - low), 0, 1)
    return plain / FACTOR * ramp + plain * (1 - ramp)


def _turned(x: Numbers, positions: Numbers, ratio: int, back: bool = False) -> Numbers:
    """The last numbers of x [tokens, ..., dim], pair by pair."""
    angles = positions[:, None] * _frequencies(ratio) * (-1 if back else 1)
    shape = (len(x), *[1] * (x.ndim - 2), TURNED // 2)
    cos, sin = np.cos(angles).reshape(shape), np.sin(angles).reshape(shape)
    found = x.copy()
    even, odd = x[..., -TURNED::2], x[..., -TURNED + 1 :: 2]
    found[..., -TURNED::2] = even * cos - odd * sin
    found[..., -TURNED + 1 :: 2] = odd * cos + even * sin
    return found


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
    mean = (kv * _softmax(gate, axis=1)).sum(1)
    normed = _rms(mean, own[f"{name}_compressor_norm"])
    return _turned(normed, np.arange(count) * ratio, ratio)


def _attention(x: Numbers, own: Weights, ratio: int, tokens: Numbers) -> Numbers:
    count = len(x)
    positions = np.arange(count)
    low = _rms(x @ own["attn_q_a"].T, own["attn_q_a_norm"])
    q = _rms((low @ own["attn_q_b"].T).reshape(count, HEADS, DIM))
    q = _turned(q, positions, ratio)
    keys = _turned(_rms(x @ own["attn_kv"].T, own["attn_kv_a_norm"]), positions, ratio)
    ago = positions[:, None] - positions
    seen = (ago >= 0) & (ago < WINDOW)
    if ratio and count >= ratio:
        entries = _entries(x, own, "attn", ratio)
        complete = ((positions + 1) // ratio)[:, None]
        there = np.arange(len(entries)) < complete
        if ratio == 4:
            there &= _chosen(x, low, own, ratio, there)
        keys, seen = np.concatenate([keys, entries]), np.concatenate([seen, there], axis=1)
    scores = np.einsum("thd,kd->thk", q, keys) * DIM**-0.5
    scores = np.where(seen[:, None], scores, -np.inf)
    sinks = np.broadcast_to(own["attn_sinks"][:, None], (count, HEADS, 1))
    weights = _softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
    mixed = _turned(np.einsum("thk,kd->thd", weights, keys), positions, ratio, back=True)
    parts = mixed.reshape(count, GROUPS, -1)
    through = own["attn_output_a"].reshape(GROUPS, RANK, -1)
    grouped = np.einsum("tgi,gri->tgr", parts, through).reshape(count, -1)
    found: Numbers = grouped @ own["attn_output_b"].T
    return found


def _chosen(x: Numbers, low: Numbers, own: Weights, ratio: int, there: Numbers) -> Numbers:
    keys = _entries(x, own, "indexer", ratio)
    q = (low @ own["indexer.attn_q_b"].T).reshape(len(x), INDEX_HEADS, INDEX_DIM)
    q = _turned(q, np.arange(len(x)), ratio)
    weights = x @ own["indexer.proj"].T
    scores = np.einsum("th,thk->tk", weights, np.maximum(np.einsum("thd,kd->thk", q, keys), 0))
    scores = np.where(there, scores, -np.inf)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :MOST]
    found = np.zeros_like(there)
    np.put_along_axis(found, best, True, axis=1)
    return found


def _mixture(x: Numbers, own: Weights, ratio: int, tokens: Numbers) -> Numbers:
    scores = np.sqrt(np.log1p(np.exp(x @ own["ffn_gate_inp"].T)))
    if (told := own.get("ffn_gate_tid2eid")) is not None:
        best = told[tokens]
    else:
        best = np.argsort(-(scores + own["exp_probs_b.bias"]), axis=1, kind="stable")[:, :TOP]
    shares = np.take_along_axis(scores, best, axis=1)
    shares = shares / shares.sum(1, keepdims=True) * SCALE
    found = _swiglu(x, *(own[f"ffn_{part}_shexp"] for part in ("gate", "up", "down")))
    for token, (experts, weights) in enumerate(zip(best, shares, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            parts = (own[f"ffn_{part}_exps"][expert] for part in ("gate", "up", "down"))
            found[token] += weight * _swiglu(x[token], *parts)
    return found


def _swiglu(x: Numbers, gate: Numbers, up: Numbers, down: Numbers) -> Numbers:
    read = np.minimum(x @ gate.T, LIMIT)
    found: Numbers = (read * _sigmoid(read) * np.clip(x @ up.T, -LIMIT, LIMIT)) @ down.T
    return found
