"""Where a model's files can come from: one interface, tried in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import huggingface_hub

from exo.download.progress import OnProgress
from exo.errors import ModelNotFound
from exo.models.card import ModelCard


class ModelSource(ABC):
    """Brings a model's directory (config.json, safetensors, tokenizer) to this machine.

    Both methods block: the store calls them on a thread of its own.
    """

    name: str

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
            DownloadFailed: they could not be fetched whole.
        """
        raise ModelNotFound(f"{self.name} cannot fetch {card.model_id}")

    def close(self) -> None:  # noqa: B027 - most sources have nothing to stop
        """Stop a fetch that is under way; it raises DownloadFailed."""


class LocalDirectory(ModelSource):
    """A directory in mlx-lm's or Hugging Face's layout that the user names."""

    name = "local directory"

    def find(self, card: ModelCard) -> Path | None:
        if card.path is not None and (card.path / "config.json").is_file():
            return card.path
        return None


class HuggingFaceCache(ModelSource):
    """What other tools have downloaded already (HF_HOME, HF_HUB_CACHE)."""

    name = "Hugging Face cache"

    def find(self, card: ModelCard) -> Path | None:
        if card.repo is None:
            return None
        repo, _, revision = card.repo.partition("@")
        config = huggingface_hub.try_to_load_from_cache(
            repo, "config.json", revision=revision or None
        )
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        return folder if any(folder.glob("model*.safetensors")) else None

    def listed(self) -> list[ModelCard]:
        """Every repo in the cache whose files a chat needs are there."""
        folders = Path(huggingface_hub.constants.HF_HUB_CACHE).glob("models--*--*")
        repos = sorted(f.name.removeprefix("models--").replace("--", "/", 1) for f in folders)
        cards = [ModelCard(repo, repo, repo=repo) for repo in repos]
        return [c for c in cards if (here := self.find(c)) and (here / "tokenizer.json").is_file()]
