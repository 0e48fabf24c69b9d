"""Models for MLX that LM Studio keeps on this machine, as publisher/repo/. They are only read."""

from __future__ import annotations

from pathlib import Path

from exo.download.hub_cache import RepoName, looks_whole
from exo.download.other_programs import lm_studio_folders
from exo.download.source import ModelSource
from exo.errors import InvalidRequest
from exo.models.card import ModelCard


class LMStudio(ModelSource):
    """Folders of safetensors; GGUF files that it keeps are `GGUFFile`'s."""

    name = "LM Studio"
    is_local = True

    def find(self, card: ModelCard) -> Path | None:
        name = RepoName.of(card.repo or card.model_id)
        if name.quantization or name.revision != "main":
            return None
        for folder in lm_studio_folders():
            if _is_model(found := folder / name.repo):
                return found
        return None

    def listed(self) -> list[ModelCard]:
        return [
            ModelCard(repo, "of LM Studio", repo=repo, path=folder)
            for place in lm_studio_folders()
            for folder in sorted(place.glob("*/*/"))
            if _is_model(folder)
            for repo in ["/".join(folder.parts[-2:])]
        ]

    def remove(self, card: ModelCard) -> bool:
        """Raises InvalidRequest where the folder is LM Studio's."""
        if (found := self.find(card)) is not None:
            raise InvalidRequest(f"{found} belongs to LM Studio; delete it there")
        return False


def _is_model(folder: Path) -> bool:
    """Whether all of one is here."""
    return (folder / "config.json").is_file() and looks_whole(folder)
