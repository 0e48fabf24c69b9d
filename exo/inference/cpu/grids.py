"""The codebooks of GGUF's IQ formats, which PyPI's gguf has, as the kernels take them."""

from __future__ import annotations

from functools import cache

import numpy as np

from exo.inference.cpu import _native as native

FORMATS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
"""Those whose tensors are read with one."""


@cache
def load_grids() -> None:
    """Give the kernels all of them; a few milliseconds, once."""
    from gguf import quants  # late: takes a moment

    for name in set(FORMATS) - {"IQ1_M"}:  # which has IQ1_S's
        kind = getattr(quants, name)
        kind.init_grid()
        places = np.searchsorted(np.sort(kind.grid_map), kind.grid.reshape(-1))
        native.set_grid(native.Grid[name], places.astype(np.uint8))
