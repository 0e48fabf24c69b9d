"""Several hidden states of a token, and the matrix that mixes them (arXiv:2512.24880)."""

from __future__ import annotations

import numpy as np

from in_numpy.parts import Numbers, Weights, rms, sigmoid, softmax


def collapsed(streams: Numbers, own: Weights, name: str, eps: float) -> tuple[Numbers, Numbers]:
    """Of streams [tokens, streams, hidden] what a layer's part reads, [tokens, hidden], and the
    rows of the connection, as far as they are for what it gives."""
    count, parts = streams.shape[1], len(own[f"{name}_scale"])
    rows = rms(streams.reshape(len(streams), -1), eps) @ own[f"{name}_fn"].T
    scales = np.repeat(own[f"{name}_scale"], [count, count, count * count][:parts])
    rows = rows * scales + own[f"{name}_base"]
    pre = sigmoid(rows[:, :count]) + eps
    return np.einsum("ts,tsd->td", pre, streams), rows[:, count:]


def expanded(streams: Numbers, given: Numbers, rows: Numbers, eps: float) -> Numbers:
    count = streams.shape[1]
    comb = softmax(rows[:, count:].reshape(-1, count, count)) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    mixed = np.einsum("tjk,tjd->tkd", comb, streams)
    found: Numbers = 2 * sigmoid(rows[:, :count])[..., None] * given[:, None] + mixed
    return found
