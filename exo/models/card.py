"""Which model a name means: the registry's short names, any Hugging Face repo, any local path."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from exo.errors import ModelNotFound

OLLAMA = "ollama/"
"""How names of Ollama's models begin, which are on no hub."""

_REPO_ID = re.compile(rf"({OLLAMA})?\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?(@[\w.-]+)?")
"""Ollama's models are in its library (ollama/name:tag), or somebody's (ollama/owner/name:tag)."""


_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 3.9, "Q2_K": 3.2}
"""Of a weight in a whole file, about: some of its tensors have more."""


@dataclass(frozen=True)
class WheelMirror:
    """A GGUF file inside a wheel on PyPI."""

    package: str
    version: str
    sha256: str
    size_bytes: int
    member: str


@dataclass(frozen=True)
class ModelCard:
    """One model: where its files can come from. `path` is set for a local directory or file."""

    model_id: str
    name: str
    repo: str | None = None
    wheel: WheelMirror | None = None
    path: Path | None = None
    size_bytes: int = 0
    """About; 0 where it is not known before its files are."""

    expert_bytes: int = 0
    """About, of these: a mixture's experts, which need not all be in memory."""

    context: int = 0
    """Tokens; 0 where it is not known before its files are, as are licence and kinds."""

    licence: str = ""
    kinds: tuple[str, ...] = ()
    """Of "chat", "code", "reasoning" and "vision", which is run as text."""

    gguf: str | None = None
    """A repo that has it as GGUF in several quantizations."""

    billions: float = 0.0
    """Of weights."""

    def quantizations(self) -> dict[str, int]:
        """What its GGUF repo can be asked for, the best first, and about how many bytes each has;
        nothing where there is none to choose."""
        if not (self.gguf and self.billions):
            return {}
        return {kind: int(self.billions * 1e9 * bits / 8) for kind, bits in _BITS.items()}


DUMMY = ModelCard("dummy", "A model without arithmetic, for tests", path=Path())


@cache
def registry() -> dict[str, ModelCard]:
    """The well-known models by short name."""
    return {
        model_id: ModelCard(
            model_id,
            entry["name"],
            entry["repo"],
            WheelMirror(**entry["wheel"]) if "wheel" in entry else None,
            size_bytes=int(entry["gb"] * 1e9),
            expert_bytes=int(entry.get("expert_gb", 0) * 1e9),
            context=entry["context"],
            licence=entry["licence"],
            kinds=tuple(entry["kinds"]),
            gguf=entry.get("gguf"),
            billions=entry.get("billions", 0.0),
        )
        for model_id, entry in _toml()["models"].items()
    }


def default_model() -> str:
    """The model that is used when nobody names one."""
    return str(_toml()["default"])


def resolve(model_id: str) -> ModelCard:
    """The card a model id means; says nothing yet on whether its files are here.

    Raises:
        ModelNotFound: not in the registry, not a repo id, not a path that exists.
    """
    if model_id == DUMMY.model_id:
        return DUMMY
    if model_id in registry():
        return registry()[model_id]
    if (path := _model_path(model_id)) is not None:
        return ModelCard(model_id, path.stem, path=path)
    if _REPO_ID.fullmatch(model_id):
        return ModelCard(model_id, model_id, repo=model_id)
    close = difflib.get_close_matches(model_id, registry(), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`exo models` lists what there is"
    raise ModelNotFound(
        f"unknown model {model_id!r}: expected a name of the registry, a Hugging Face repo id, "
        f"optionally with a quantization (org/name:Q4_K_M), a directory with a config.json, or a "
        f".gguf file; {hint}",
        param="model",
    )


def _model_path(text: str) -> Path | None:
    """A folder or file that may be a model; None for what is no path of one."""
    try:
        path = Path(text).expanduser()
        if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
            return path.resolve()
    except (OSError, RuntimeError, ValueError):  # too long, nobody's home, a zero byte
        pass
    return None


@cache
def _toml() -> dict[str, dict[str, dict]]:  # type: ignore[type-arg]
    return tomllib.loads((files("exo.models") / "registry.toml").read_text("utf-8"))
