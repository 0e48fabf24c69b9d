"""Where a model's files can come from: one interface, tried in order."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from exo.download.hub_cache import RepoFile, RepoName
from exo.download.progress import OnProgress
from exo.errors import ModelNotFound
from exo.models.card import ModelCard
from exo.models.file_parts import Parts


class ModelSource(ABC):
    """Brings a model's directory (config.json, safetensors, tokenizer) to this machine.

    Its methods block: the store calls them on a thread of its own.
    """

    name: str
    renews = False
    """True if what it fetched may be newer there now."""
    is_local = False
    """True if what it brings lies on this machine already."""

    @abstractmethod
    def find(self, card: ModelCard) -> Path | None:
        """The directory if it is here already; touches no network."""

    def listed(self) -> list[ModelCard]:
        """Models here that the registry may not know."""
        return []

    def can_fetch(self, card: ModelCard) -> bool:
        """True if `fetch` could bring it."""
        return False

    def fetch(self, card: ModelCard, on_progress: OnProgress) -> Path:
        """Bring the files here.

        Raises:
            SourceUnreachable: it could not be asked.
            ModelNotFound: it has no such model.
            DownloadFailed: the files could not be fetched whole.
        """
        raise ModelNotFound(f"{self.name} cannot fetch {card.model_id}")

    def left_out(self, card: ModelCard) -> dict[str, list[RepoFile]]:
        """Files that the source has and exo does not want, by the reason; touches no network."""
        return {}

    def find_part(self, card: ModelCard, parts: Parts) -> Path | None:
        """The directory if all but its weight files is here, and of those `parts` and the headers;
        touches no network."""
        return self.find(card)

    def fetch_part(self, card: ModelCard, parts: Parts, on_progress: OnProgress) -> Path:
        """Bring as much, or all. Raises what `fetch` raises."""
        return self.fetch(card, on_progress)

    def remove(self, card: ModelCard) -> bool:
        """Delete the model's files; False if there are none of this source's making."""
        return False

    def cancel(self, card: ModelCard) -> bool:
        """Stop a fetch of this model, which raises DownloadCancelled; False if there is none."""
        return False

    def close(self) -> None:  # noqa: B027 - most sources have nothing to stop
        """Stop a fetch that is under way; it raises DownloadFailed."""


class ConvertedModel(ModelSource):
    """A source whose files are converted once, into a folder of exo's own."""

    @abstractmethod
    def folder(self, card: ModelCard) -> Path | None:
        """Where the converted model is, or would be; None if it is not for this source."""

    def find(self, card: ModelCard) -> Path | None:
        folder = self.folder(card)
        if folder is None or not (folder / "config.json").is_file():
            return None
        # Weights may be links to a file that has gone.
        return folder if all(file.exists() for file in folder.glob("model*")) else None

    def remove(self, card: ModelCard) -> bool:
        folder = self.folder(card)
        if folder is None or not folder.is_dir():
            return False
        shutil.rmtree(folder)
        return True


class LocalDirectory(ModelSource):
    """A directory in mlx-lm's or Hugging Face's layout that the user names."""

    name = "local directory"

    def find(self, card: ModelCard) -> Path | None:
        if card.path is not None and (card.path / "config.json").is_file():
            return card.path
        return None


class ModelsFolders(ModelSource):
    """Folders of the user's that hold a directory for each model; only read, so they may be
    another machine's disk. A repo org/name is looked for as org/name, org--name and name."""

    name = "models folder"

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def find(self, card: ModelCard) -> Path | None:
        repo = RepoName.of(card.repo or card.model_id).repo
        names = (repo, repo.replace("/", "--"), repo.rpartition("/")[2], card.model_id)
        for folder in self._folders:
            for name in names:
                found = folder / name
                if (found / "config.json").is_file() and any(found.glob("model*.safetensors")):
                    return found
        return None
