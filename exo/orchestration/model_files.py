"""A node's model files: brought, described, removed; what is done for them is everyone's to see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from exo.download.progress import OnProgress, Progress
from exo.download.store import ModelStore
from exo.errors import DownloadCancelled, ExoError
from exo.inference.engine import InferenceEngine
from exo.models.description import ModelDescription
from exo.orchestration.activity import Activity


class ModelFiles:
    """The store and what the engine says of what is in it."""

    def __init__(
        self, node_id: str, store: ModelStore, engine: InferenceEngine, activity: Activity
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._engine = engine
        self._activity = activity
        self._descriptions: dict[str, ModelDescription] = {}

    async def are_here(self, model_id: str) -> bool:
        """Touches no network. Raises ModelNotFound if no model can have that name."""
        return await asyncio.to_thread(self._store.find, model_id) is not None

    async def describe(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> ModelDescription:
        """The model, its files brought here first if need be; `renew` looks for newer ones.

        Raises:
            ModelNotFound, DownloadFailed: no source has the files, or they did not come.
            ModelUnsupported: no engine here runs the model.
        """
        path = await self._bring(model_id, on_progress, renew)
        if renew or model_id not in self._descriptions:
            self._descriptions[model_id] = await self._engine.describe(model_id, path)
        return self._descriptions[model_id]

    async def remove(self, model_id: str) -> int:
        """Delete a model's files; the bytes freed. Raises what `ModelStore.remove` raises."""
        freed = await asyncio.to_thread(self._store.remove, model_id)
        self._descriptions.pop(model_id, None)
        return freed

    async def _bring(self, model_id: str, on_progress: OnProgress, renew: bool) -> Path:
        moved = False

        def heard(progress: Progress) -> None:
            nonlocal moved
            moved = moved or progress.phase not in ("checking", "ready")
            if moved:
                self._activity.note(model_id, progress)
                progress = self._activity.of(model_id)  # with its speed
            on_progress(replace(progress, node_id=self._node_id))

        try:
            path = await self._store.ensure(model_id, heard, renew=renew)
        except ExoError as error:
            phase = "cancelled" if isinstance(error, DownloadCancelled) else "failed"
            self._activity.note(model_id, Progress(phase, model_id, warning=error.message))
            raise
        if moved:
            last = self._activity.of(model_id)
            self._activity.note(model_id, replace(last, phase="ready", done=last.total))
        return path
