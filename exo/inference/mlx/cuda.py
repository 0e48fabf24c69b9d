"""Kernels of MLX's CUDA backend are compiled when they are first asked for: so that is done while a
model is loaded, and they are kept from then on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

logger = logging.getLogger(__name__)

COMPILED_ROWS = (8, 32, 64)
"""A prompt of each of these lengths asks for other kernels, longer ones for none: of ours, and
where a mixture's experts are multiplied of MLX's (`make_cta_tiler` in its qmm_sm80.cu)."""

TELL_AFTER_S = 5.0
"""Kernels that are kept are there sooner."""

_CACHE = "MLX_PTX_CACHE_DIR"


def is_used() -> bool:
    """Whether arrays are computed on an NVIDIA card."""
    return bool(mx.cuda.is_available()) and mx.default_device().type == mx.DeviceType.gpu


def keep_kernels(folder: Path) -> None:
    """Keep what is compiled from now on in `folder`, for each version of MLX and kind of card: by
    itself MLX forgets it when the machine starts anew, and takes one kind's for another's."""
    kind = mx.device_info().get("architecture", "any")
    os.environ.setdefault(_CACHE, str(folder / f"{version('mlx')}-{kind}"))


@contextmanager
def who_waits_is_told() -> Iterator[None]:
    """Kernels are compiled in here. Nobody can ask MLX whether any are: time tells."""
    what = "compiling kernels for this GPU, once for each format of weights: up to two minutes"
    tells = threading.Timer(TELL_AFTER_S, logger.warning, (what,))
    tells.start()
    try:
        yield
    finally:
        tells.cancel()
