"""A GGUF file of the user's as a model source: used where it is."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from exo.download.progress import OnProgress, Progress
from exo.download.source import ConvertedModel
from exo.models.card import ModelCard


class GGUFFile(ConvertedModel):
    """What a folder of exo's own holds is a link to the file, and the configuration and tokenizer
    that its metadata are elsewhere."""

    name = "GGUF file"

    def __init__(self, models_dir: Path) -> None:
        self._models_dir = models_dir

    def can_fetch(self, card: ModelCard) -> bool:
        return self.folder(card) is not None

    def fetch(self, card: ModelCard, on_progress: OnProgress) -> Path:
        from exo.models.gguf.folder import write_folder  # late: imports tokenizers

        folder = self.folder(card)
        assert card.path is not None and folder is not None
        self._models_dir.mkdir(parents=True, exist_ok=True)
        on_progress(Progress("converting", card.path.name))
        with tempfile.TemporaryDirectory(dir=self._models_dir, prefix=".gguf-") as scratch:
            made = Path(scratch) / "model"
            write_folder(card.path, made)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        return folder

    def folder(self, card: ModelCard) -> Path | None:
        """Named by the file's path, size and time, so a changed file is read anew."""
        if card.path is None or not card.path.is_file():
            return None
        stat = card.path.stat()
        identity = f"{card.path}:{stat.st_size}:{stat.st_mtime_ns}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return self._models_dir / f"{card.path.stem}-{digest}"
