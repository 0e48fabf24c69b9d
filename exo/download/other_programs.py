"""GGUF files that other programs on this machine keep: LM Studio, Ollama. They are only read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from exo import json_text
from exo.download.gguf_repo import quantizations

_MODEL_LAYER = "application/vnd.ollama.image.model"
_OLLAMA = "registry.ollama.ai"
_OF_SERVICE = Path("/usr/share/ollama/.ollama/models")
_HUB = ("hf.co", "huggingface.co")


@dataclass(frozen=True)
class FoundGGUF:
    """`model_id` is what exo calls it, `program` whose it is."""

    model_id: str
    file: Path
    program: str


def lm_studio_folders() -> list[Path]:
    """Where LM Studio keeps models: publisher/repo/file.gguf."""
    home = Path.home()
    return [home / ".lmstudio/models", home / ".cache/lm-studio/models"]


def ollama_folders() -> list[Path]:
    """Where Ollama keeps models: manifests, and blobs by digest. As a service of Linux it has a
    home of its own, which its installer lets the user read."""
    if said := os.environ.get("OLLAMA_MODELS"):
        return [Path(said)]
    folders = [Path.home() / ".ollama/models", _OF_SERVICE]
    return [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK)]


def found_gguf(folders: Sequence[Path] = ()) -> Iterator[FoundGGUF]:
    """Every GGUF model of other programs, and of the user's `folders` with publisher/repo/file; of
    one in parts the first."""
    places = [(folder, "your folder") for folder in folders]
    places += [(folder, "LM Studio") for folder in lm_studio_folders()]
    for folder, program in places:
        for repo in sorted(folder.glob("*/*/")):
            by_name = {file.name: file for file in repo.glob("*.gguf")}
            for quantization, names in quantizations(by_name).items():
                name = f"{repo.parent.name}/{repo.name}:{quantization}"
                yield FoundGGUF(name, by_name[names[0]], program)
    for folder in ollama_folders():
        yield from _of_ollama(folder)


def _of_ollama(folder: Path) -> Iterator[FoundGGUF]:
    """Of Ollama's library models are ollama/name:tag here, of its users ollama/owner/name:tag, and
    those it has from the hub what they are there.
    Layout: https://github.com/ollama/ollama/blob/main/manifest/paths.go"""
    manifests = folder / "manifests"
    for manifest in sorted(manifests.glob("*/*/*/*")):
        host, owner, name, tag = manifest.relative_to(manifests).parts
        if host not in (*_HUB, _OLLAMA):
            continue
        try:
            layers = json_text.object_in(manifest)["layers"]
            digest = next(one["digest"] for one in layers if one["mediaType"] == _MODEL_LAYER)
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            continue  # not a model's, or half written by Ollama just now
        blob = folder / "blobs" / str(digest).replace(":", "-")
        if blob.is_file():
            repo = f"{owner}/{name}"
            if host == _OLLAMA:
                repo = f"ollama/{name}" if owner == "library" else f"ollama/{repo}"
            yield FoundGGUF(f"{repo}:{tag}", blob, "Ollama")
