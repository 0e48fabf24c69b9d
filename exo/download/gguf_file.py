"""A GGUF file as a model source: converted once into the store, then used from there."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from exo.download.progress import OnProgress, Progress
from exo.download.source import ConvertedModel
from exo.models.card import ModelCard


class GGUFFile(ConvertedModel):
    """`quantize`: bits for weights that GGUF stores in a format MLX has not (K-quants, float16);
    None keeps them as float16."""

    name = "GGUF file"

    def __init__(self, models_dir: Path, quantize: int | None) -> None:
        self._models_dir = models_dir
        self._quantize = quantize

    def can_fetch(self, card: ModelCard) -> bool:
        return self.folder(card) is not None

    def fetch(self, card: ModelCard, on_progress: OnProgress) -> Path:
        from exo.download.gguf import convert_gguf  # late: imports MLX

        folder = self.folder(card)
        assert card.path is not None and folder is not None
        self._models_dir.mkdir(parents=True, exist_ok=True)
        on_progress(Progress("converting", card.path.name))
        with tempfile.TemporaryDirectory(dir=self._models_dir, prefix=".gguf-") as scratch:
            converted = Path(scratch) / "converted"
            convert_gguf(card.path, converted, self._quantize)
            shutil.rmtree(folder, ignore_errors=True)
            converted.rename(folder)
        return folder

    def folder(self, card: ModelCard) -> Path | None:
        """Named by the file's path, size and time, so a changed file is converted anew."""
        if card.path is None or not card.path.is_file():
            return None
        stat = card.path.stat()
        identity = f"{card.path}:{stat.st_size}:{stat.st_mtime_ns}:{self._quantize}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return self._models_dir / f"{card.path.stem}-{digest}"
