"""What scaling of positions a file's factors of frequencies came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from exo.errors import ModelUnsupported

_KNOWN = {"Llama 3": (8192, 4.0), "Llama 4": (8192, 1.0), "Step 3.5": (131072, 32.0)}
"""Positions that a model was first trained for, and how often what is not scaled turns in them;
Llama 4's has no ramp."""


def llama3_scaling(factors: npt.NDArray[np.float32], dims: int, theta: float) -> dict[str, Any]:
    """The scaling of Llama 3.1 and of who followed, for heads of which positions turn `dims`; GGUF
    stores the factor of each frequency [dims / 2].

    Formula: section 3.4.1 of https://arxiv.org/abs/2407.21783 as in Meta's reference code; the
    parameters are checked against the stored factors.

    Raises:
        ModelUnsupported: they are none that is known.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, dims, 2) / dims)
    for context, high in _KNOWN.values():
        turns = context / wavelengths
        smooth = np.clip((turns - 1.0) / (high - 1.0), 0, 1) if high > 1 else turns >= 1
        expected = 1 / ((1 - smooth) / factors.max() + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-2):
            return {
                "rope_type": "llama3",
                "factor": float(factors.max()),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise ModelUnsupported(f"the GGUF file's rope_freqs are not those of {', '.join(_KNOWN)}")
