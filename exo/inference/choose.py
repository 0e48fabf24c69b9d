"""Which engine this node runs."""

from __future__ import annotations

from exo.errors import InvalidRequest
from exo.inference.engine import InferenceEngine

ENGINES = ("auto", "mlx", "dummy")


def make_engine(name: str) -> InferenceEngine:
    """The engine called `name`; "auto" is the best one this machine can run.

    Raises:
        InvalidRequest: no engine has that name.
    """
    if name == "dummy":
        from exo.inference.dummy.engine import DummyEngine

        return DummyEngine()
    if name in ("auto", "mlx"):
        from exo.inference.mlx.engine import MLXEngine

        return MLXEngine()
    raise InvalidRequest(f"--inference-engine {name!r} is unknown; expected one of {ENGINES}")
