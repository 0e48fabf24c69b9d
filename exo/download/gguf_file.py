"""GGUF files on this machine as a model source: used where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from exo.download.other_programs import FoundGGUF, found_gguf
from exo.download.progress import OnProgress, Progress
from exo.download.source import ConvertedModel
from exo.errors import InvalidRequest
from exo.models.card import ModelCard


class GGUFFile(ConvertedModel):
    """A file that the user names, or one that another program keeps. What a folder of exo's own
    holds is a link to it, and the configuration and tokenizer that its metadata are elsewhere.

    `folders` are the user's, with publisher/repo/file.gguf below."""

    name = "GGUF file"
    is_local = True

    def __init__(self, models_dir: Path, folders: Sequence[Path] = ()) -> None:
        self._models_dir = models_dir
        self._folders = folders

    def listed(self) -> list[ModelCard]:
        return [
            ModelCard(one.model_id, f"of {one.program}", repo=one.model_id, path=one.file)
            for one in found_gguf(self._folders)
        ]

    def can_fetch(self, card: ModelCard) -> bool:
        return self.folder(card) is not None

    def fetch(self, card: ModelCard, on_progress: OnProgress) -> Path:
        from exo.models.gguf.folder import make_folder, parts_of  # late: imports tokenizers

        file, folder = self._file(card), self.folder(card)
        assert file is not None and folder is not None
        on_progress(Progress("checking", f"header and tokenizer of {file.name}"))
        make_folder(parts_of(file), folder)
        return folder

    def folder(self, card: ModelCard) -> Path | None:
        """Named by the file's path, size and time, so a changed file is read anew."""
        if (file := self._file(card)) is None:
            return None
        stat = file.stat()
        identity = f"{file}:{stat.st_size}:{stat.st_mtime_ns}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return self._models_dir / f"{file.stem}-{digest}"

    def remove(self, card: ModelCard) -> bool:
        """Raises InvalidRequest where the file is another program's."""
        if (found := self._found(card)) is not None:
            super().remove(card)
            raise InvalidRequest(f"{found.file} belongs to {found.program}; delete it there")
        return super().remove(card)

    def _file(self, card: ModelCard) -> Path | None:
        if card.path is not None:
            return card.path if card.path.is_file() else None
        found = self._found(card)
        return found.file if found is not None else None

    def _found(self, card: ModelCard) -> FoundGGUF | None:
        if card.repo is None or ":" not in card.repo:
            return None
        return next((one for one in found_gguf(self._folders) if one.model_id == card.repo), None)
