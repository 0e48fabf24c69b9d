"""What models written out in NumPy share, and random weights of theirs, by GGUF's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf_files import TOKENIZER, Quantize, add_metadata, finish, plain, quantized

Numbers = npt.NDArray[Any]
Weights = dict[str, Numbers]


class Random:
    """Of one seed, numbers such that what goes through keeps its size."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def matrix(self, *shape: int) -> Numbers:
        numbers = self._rng.standard_normal(shape) * 2 / shape[-1] ** 0.5
        return numbers.astype(np.float32)

    def norm(self, size: int) -> Numbers:
        return self._rng.uniform(0.5, 1.5, size).astype(np.float32)

    def order(self, count: int) -> Numbers:
        return self._rng.permutation(count)

    def connection(self, name: str, rows: int, width: int, scales: int) -> Weights:
        return {
            f"{name}_fn.weight": self.matrix(rows, width),
            f"{name}_base.weight": self.matrix(rows),
            f"{name}_scale.weight": self.norm(scales),
        }

    def mlp(self, hidden: int, width: int) -> Weights:
        return {
            "ffn_gate.weight": self.matrix(width, hidden),
            "ffn_up.weight": self.matrix(width, hidden),
            "ffn_down.weight": self.matrix(hidden, width),
        }

    def experts(self, count: int, hidden: int, width: int) -> Weights:
        """With one that every token goes through."""
        return {
            "ffn_gate_inp.weight": self.matrix(count, hidden),
            "ffn_gate_exps.weight": self.matrix(count, width, hidden),
            "ffn_up_exps.weight": self.matrix(count, width, hidden),
            "ffn_down_exps.weight": self.matrix(count, hidden, width),
            "ffn_gate_shexp.weight": self.matrix(width, hidden),
            "ffn_up_shexp.weight": self.matrix(width, hidden),
            "ffn_down_shexp.weight": self.matrix(hidden, width),
        }


def write_gguf(
    file: Path,
    architecture: str,
    metadata: dict[str, Any],
    weights: Weights,
    quantize: Quantize = plain,
) -> None:
    """`metadata` by key below the architecture; None leaves a key out."""
    writer = gguf.GGUFWriter(file, architecture)
    own = {f"{architecture}.{key}": value for key, value in metadata.items()}
    add_metadata(writer, {**TOKENIZER, **own})
    for name, numbers in weights.items():
        if numbers.dtype == np.int32:
            writer.add_tensor(name, numbers)
            continue
        kind = gguf.GGMLQuantizationType[quantize(name, numbers)]
        writer.add_tensor(name, quantized(numbers, kind), raw_dtype=kind)
    finish(writer)


def of_layer(weights: Weights, layer: int) -> Weights:
    prefix = f"blk.{layer}."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): numbers
        for name, numbers in weights.items()
        if name.startswith(prefix)
    }


def rms(x: Numbers, eps: float, weight: Numbers | float = 1.0) -> Numbers:
    found: Numbers = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return found


def layer_norm(x: Numbers, eps: float, weight: Numbers, bias: Numbers) -> Numbers:
    return rms(x - x.mean(-1, keepdims=True), eps, weight) + bias


def sigmoid(x: Numbers) -> Numbers:
    found: Numbers = 1 / (1 + np.exp(-x))
    return found


def softmax(x: Numbers, axis: int = -1) -> Numbers:
    grown = np.exp(x - x.max(axis, keepdims=True))
    found: Numbers = grown / grown.sum(axis, keepdims=True)
    return found


def turned(x: Numbers, angles: Numbers) -> Numbers:
    """The last numbers of x [tokens, ..., dim], neighbours as pairs, by angles [tokens, pairs]."""
    shape = (len(x), *[1] * (x.ndim - 2), angles.shape[1])
    cos, sin = np.cos(angles).reshape(shape), np.sin(angles).reshape(shape)
    found, width = x.copy(), 2 * angles.shape[1]
    even, odd = x[..., -width::2], x[..., -width + 1 :: 2]
    found[..., -width::2] = even * cos - odd * sin
    found[..., -width + 1 :: 2] = odd * cos + even * sin
    return found


def attended(
    q: Numbers, keys: Numbers, values: Numbers, seen: Numbers, sinks: Numbers, scale: float
) -> Numbers:
    """Heads q [tokens, heads, dim] with a key and a value for all of them, [tokens, heads, dim]."""
    scores = np.einsum("thd,kd->thk", q, keys) * scale
    scores = np.where(seen[:, None], scores, -np.inf)
    ends = np.broadcast_to(sinks[:, None], (*q.shape[:2], 1))
    weights = softmax(np.concatenate([scores, ends], axis=-1))[..., :-1]
    return np.einsum("thk,kd->thd", weights, values)


def best_of(scores: Numbers, seen: Numbers, most: int) -> Numbers:
    """Which keys are chosen, of scores [tokens, keys]; of equal ones the first."""
    order = np.argsort(-np.where(seen, scores, -np.inf), axis=1, kind="stable")[:, :most]
    found = np.zeros_like(seen)
    np.put_along_axis(found, order, True, axis=1)
    return found & seen


def mixture(
    x: Numbers, own: Weights, best: Numbers, shares: Numbers, limit: float, shared_limit: float
) -> Numbers:
    """Of experts `best` [tokens, experts of a token], by `shares`, and of the one for all."""
    named = ("gate", "up", "down")
    found = swiglu(x, *(own[f"ffn_{part}_shexp"] for part in named), shared_limit)
    for token, (experts, weights) in enumerate(zip(best, shares, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            parts = (own[f"ffn_{part}_exps"][expert] for part in named)
            found[token] += weight * swiglu(x[token], *parts, limit)
    return found


def by_sigmoid(x: Numbers, own: Weights, top: int, scale: float) -> tuple[Numbers, Numbers]:
    """The best experts and their shares, as DeepSeek V3 chooses them, [tokens, experts of one]."""
    return chosen_experts(sigmoid(x @ own["ffn_gate_inp"].T), own, top, scale)


def chosen_experts(
    scores: Numbers, own: Weights, top: int, scale: float, told: Numbers | None = None
) -> tuple[Numbers, Numbers]:
    """By scores [tokens, experts], or those that are `told`."""
    best = told
    if best is None:
        best = np.argsort(-(scores + own["exp_probs_b.bias"]), axis=1, kind="stable")[:, :top]
    shares = np.take_along_axis(scores, best, axis=1)
    return best, shares / shares.sum(1, keepdims=True) * scale


def swiglu(x: Numbers, gate: Numbers, up: Numbers, down: Numbers, limit: float) -> Numbers:
    read = np.minimum(x @ gate.T, limit)
    found: Numbers = (read * sigmoid(read) * np.clip(x @ up.T, -limit, limit)) @ down.T
    return found
