"""Which rows of Qwen3-Next's joined projections are whose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def qkvz_rows(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> tuple[Rows, Rows]:
    """Of `in_proj_qkvz`, which has for each key head its query, key, values and gates: all queries,
    then keys, then values; and the gates."""
    values = value_heads // key_heads * value_dim
    each = np.arange(key_heads * 2 * (key_dim + values)).reshape(key_heads, -1)
    q, k, v, z = np.split(each, [key_dim, 2 * key_dim, 2 * key_dim + values], axis=1)
    return np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)


def ba_rows(key_heads: int, value_heads: int) -> tuple[Rows, Rows]:
    """Of `in_proj_ba`, which has for each key head the betas of its value heads, then their
    alphas."""
    both = np.arange(2 * value_heads).reshape(key_heads, 2, -1)
    return both[:, 0].reshape(-1), both[:, 1].reshape(-1)
