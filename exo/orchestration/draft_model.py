"""The smaller model that guesses on this node for the rings it heads (`--draft-model`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from exo.download.progress import OnProgress, Progress
from exo.download.watch import watched
from exo.errors import ExoError, InvalidRequest, ModelTooLarge
from exo.models.tokenizer import load_tokenizer
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.serving.rings import Rings
from exo.shard import RingPlan, Shard

logger = logging.getLogger(__name__)


class DraftModel:
    """`model_id` is empty where none is wished. `free_bytes`: what models may still take here."""

    def __init__(
        self,
        model_id: str,
        files: ModelFiles,
        rings: Rings,
        free_bytes: Callable[[], int],
    ) -> None:
        self._model_id = model_id
        self._files = files
        self._rings = rings
        self._free_bytes = free_bytes
        self._loaded: tuple[Shard, Path, str] | None = None
        self._turn = asyncio.Lock()
        self.bytes = 0
        """That it takes here."""

    async def help(self, plan: RingPlan, path: Path, on_progress: OnProgress) -> None:
        """Have it guess for a plan that this node heads, whose files are at `path`. Where it
        cannot, the plan serves without."""
        if self._model_id in ("", plan.model_id):
            return
        try:
            async with self._turn:
                shard, own_path, own_type = self._loaded or await self._load(on_progress)
            _, description = await self._files.describe(plan.model_id, on_progress)
            size = await asyncio.to_thread(
                _common_size, path, description.model_type, own_path, own_type
            )
            if not size:
                raise InvalidRequest("it has another vocabulary")
        except ExoError as error:
            logger.warning(
                "%s does not guess for %s: %s", self._model_id, plan.model_id, error.message
            )
            return
        self._rings.draft_with(plan.hash, shard, size)

    async def _load(self, on_progress: OnProgress) -> tuple[Shard, Path, str]:
        path, description = await self._files.describe(self._model_id, on_progress)
        shard = Shard(self._model_id, 0, description.n_layers, description.n_layers)
        size, free = description.bytes_of((shard,)), self._free_bytes()
        if size > free:
            raise ModelTooLarge(f"it takes {size / 1e9:.2f} GB, and {free / 1e9:.2f} are free")
        path = await self._files.bring_shard(shard, path, on_progress)
        await watched(
            lambda moves: self._rings.load_small(shard, path, moves),
            on_progress,
            Progress("loading", str(shard)),
        )
        logger.info("%s guesses for what this node heads", self._model_id)
        self._loaded, self.bytes = (shard, path, description.model_type), size
        return self._loaded


def _common_size(path: Path, model_type: str, other: Path, other_type: str) -> int:
    """Of two models' vocabulary; 0 if they have not one."""
    one, two = load_tokenizer(model_type, path), load_tokenizer(other_type, other)
    return one.vocabulary_size if one.tokens() == two.tokens() else 0
