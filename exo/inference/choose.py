"""Which engine this node runs."""

from __future__ import annotations

import logging
import platform
from pathlib import Path

from exo.errors import InvalidRequest
from exo.inference.cpu.available import why_not
from exo.inference.engine import InferenceEngine

logger = logging.getLogger(__name__)

ENGINES = ("auto", "cpu", "mlx", "dummy")


def make_engine(
    name: str,
    threads: int | None = None,
    *,
    precise: bool = False,
    kernels: Path | None = None,
) -> InferenceEngine:
    """The engine called `name`; "auto" is the best one this machine can run: MLX with a GPU, else
    exo's own kernels, else MLX on the CPU. `threads` are the cpu engine's; `precise`: float
    activations there, float32 in MLX; `kernels`: where those compiled for a GPU are kept.

    Raises:
        InvalidRequest: no engine has that name, or it cannot run here.
    """
    if name == "dummy":
        from exo.inference.dummy.engine import DummyEngine

        return DummyEngine()
    if name == "auto":
        name = "mlx" if _has_gpu() else _best_on_cpu()
    if name == "cpu":
        if reason := why_not():
            raise InvalidRequest(f"--inference-engine cpu: {reason}")
        from exo.inference.cpu.engine import CPUEngine

        return CPUEngine(threads, precise=precise)
    if name == "mlx":
        from exo.inference.mlx.engine import MLXEngine

        return MLXEngine(precise=precise, kernels=kernels)
    raise InvalidRequest(f"--inference-engine {name!r} is unknown; expected one of {ENGINES}")


def _best_on_cpu() -> str:
    if reason := why_not():
        logger.warning("%s", reason)
        return "mlx"
    return "cpu"


def _has_gpu() -> bool:
    """Whether MLX would compute on one. Asks MLX only where a GPU is likely: it takes a second."""
    if platform.system() == "Linux" and not Path("/proc/driver/nvidia/version").exists():
        return False
    import mlx.core as mx

    return bool(mx.default_device().type == mx.DeviceType.gpu)
