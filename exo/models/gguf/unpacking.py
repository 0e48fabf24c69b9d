"""Blocks of GGUF formats that no kernel reads as they are, taken apart.

Formats: block_tq1_0, block_tq2_0 and block_nvfp4 in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

TERNARY = {"TQ1_0": 54, "TQ2_0": 66}
"""Bytes of a block of 256 columns."""

NVFP4_COLS, NVFP4_BYTES = 64, 36
"""Of a block, which has a scale for 16 columns."""


def ternary(dtype: str, blocks: Bytes) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """Of blocks [n, bytes] the values 0, 1 or 2 [n, 256] and scales [n]: a number is
    scale * (value - 1)."""
    scales = blocks[:, -2:].copy().view(np.float16)[:, 0]
    if dtype == "TQ2_0":
        lanes = blocks[:, :64].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
        return np.bitwise_and(lanes, 3, dtype=np.uint8).reshape(-1, 256), scales
    # Five digits of base 3 stand in a byte as a fraction of 256, the first one highest.
    parts = []
    for start, end, width, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8)[:, None]
        rest = blocks[:, start:end].reshape(-1, 1, width) * powers  # of 256
        parts.append((rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1), scales


def nvfp4(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Of blocks [n, 36] pairs of E2M1 values [n, 32], the first of neighbours in the low half, and
    scales [n, 4] as E4M3 without a sign."""
    scales = np.bitwise_and(blocks[:, :4], 0x7F, dtype=np.uint8)
    scales[scales == 0x7F] = 0
    halves = blocks[:, 4:].reshape(-1, 4, 8)
    values = np.concatenate([halves & 15, halves >> 4], axis=2)
    return (values[..., ::2] | values[..., 1::2] << 4).reshape(len(blocks), 32), scales
