"""Blocks of GGUF formats that no kernel reads as they are, taken apart.

Formats: block_tq1_0, block_tq2_0, block_q1_0, block_q2_0 and block_nvfp4 in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; PQ2_0 and PTQ1_0, which PrismML's
Bonsai models stand in: https://github.com/ggml-org/llama.cpp/issues/29058.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

TWO_BITS = {
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "Q1_0": (128, 18), "Q2_0": (64, 18),
    "PQ2_0": (128, 34), "PTQ1_0": (128, 28),
}  # fmt: skip
"""Columns, which share a scale, and bytes of a block of formats with 2 bits a number or fewer."""

_DIGITS = {
    "TQ1_0": ((0, 32, 5), (32, 48, 5), (48, 52, 4)),
    "PTQ1_0": ((0, 16, 5), (16, 24, 5), (24, 26, 4)),
}
"""Of bytes from, to: how many digits of base 3 each holds."""

MXFP4_BYTES = 17
NVFP4_COLS, NVFP4_BYTES = 64, 36
"""Of a block, which has a scale for 16 columns."""


def two_bits(dtype: str, blocks: Bytes) -> tuple[Bytes, npt.NDArray[np.float16]]:
    """Of blocks [n, bytes] the values 0 to 3 [n, columns] and scales [n]: a number is
    scale * (value - 1)."""
    scale_at = 0 if dtype in ("Q1_0", "Q2_0", "PQ2_0") else blocks.shape[1] - 2
    scales = blocks[:, scale_at : scale_at + 2].copy().view(np.float16)[:, 0]
    if dtype == "Q1_0":
        return np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") * np.uint8(2), scales
    if dtype in ("Q2_0", "PQ2_0"):
        four = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)
        return np.bitwise_and(four, 3, dtype=np.uint8).reshape(len(blocks), -1), scales
    if dtype == "TQ2_0":
        lanes = blocks[:, :64].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
        return np.bitwise_and(lanes, 3, dtype=np.uint8).reshape(-1, 256), scales
    # Five digits of base 3 stand in a byte as a fraction of 256, the first one highest.
    parts = []
    for start, end, digits in _DIGITS[dtype]:
        powers = np.array([1, 3, 9, 27, 81][:digits], np.uint8)[:, None]
        rest = blocks[:, start:end].reshape(-1, 1, end - start) * powers  # of 256
        parts.append((rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1), scales


def mxfp4_of_pairs(blocks: Bytes) -> Bytes:
    """Of blocks [n, 17] as gpt-oss' own checkpoint has them, neighbours in a byte, those of MXFP4:
    of each half a value in a byte."""
    pairs = blocks[:, 1:]
    values = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 2, 16)
    return np.concatenate([blocks[:, :1], values[:, 0] | values[:, 1] << 4], axis=1)


def nvfp4(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Of blocks [n, 36] pairs of E2M1 values [n, 32], the first of neighbours in the low half, and
    scales [n, 4] as E4M3 without a sign."""
    scales = np.bitwise_and(blocks[:, :4], 0x7F, dtype=np.uint8)
    scales[scales == 0x7F] = 0
    halves = blocks[:, 4:].reshape(-1, 4, 8)
    values = np.concatenate([halves & 15, halves >> 4], axis=2)
    return (values[..., ::2] | values[..., 1::2] << 4).reshape(len(blocks), 32), scales
