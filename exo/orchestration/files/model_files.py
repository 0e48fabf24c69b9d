"""A node's model files: brought, described, removed; what is done for them is everyone's to see."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from exo.download.progress import OnProgress, Progress
from exo.download.store import ModelStore
from exo.download.watch import watched
from exo.errors import DownloadCancelled, ExoError, Stalled
from exo.inference.engine import InferenceEngine
from exo.models.description import ModelDescription
from exo.models.file_parts import Parts
from exo.models.tensor_table import is_whole, parts_with
from exo.networking.calls.messages import HeldModel
from exo.orchestration.files.activity import Activity
from exo.shard import Shard

Result = TypeVar("Result")


class ModelFiles:
    """The store and what the engine says of what is in it."""

    def __init__(
        self, node_id: str, store: ModelStore, engine: InferenceEngine, activity: Activity
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._engine = engine
        self._activity = activity
        self._described: dict[str, tuple[Path, ModelDescription]] = {}

    async def are_here(self, model_id: str) -> bool:
        """Whether `describe` has to bring nothing. Raises ModelNotFound if no model can have that
        name."""
        return await asyncio.to_thread(self._store.find, model_id, {}) is not None

    async def describe(
        self, model_id: str, on_progress: OnProgress
    ) -> tuple[Path, ModelDescription]:
        """The model, and a folder with its configuration and tokenizer. Brought here first, with
        the headers of its weight files, if need be.

        Raises:
            ModelNotFound, DownloadFailed: no source has the files, or they did not come.
            ModelUnsupported: no engine here runs the model.
        """
        path = await self._bring(model_id, on_progress, parts={})
        known = self._described.get(model_id)
        if known is None or known[0] != path:
            described = await self._asked(
                self._engine.describe(model_id, path), model_id, on_progress
            )
            known = self._described[model_id] = path, described
        return known

    async def bring(self, model_id: str, on_progress: OnProgress) -> ModelDescription:
        """The model, all its files brought here, newer ones if there are. Raises as `describe`."""
        path = await self._bring(model_id, on_progress, renew=True)
        described = await self._asked(self._engine.describe(model_id, path), model_id, on_progress)
        self._described[model_id] = path, described
        return described

    async def bring_shard(self, shard: Shard, path: Path, on_progress: OnProgress) -> Path:
        """A folder with what a shard reads, brought here first if the one that `describe` gave has
        not all of it. Raises as `describe`."""
        if await asyncio.to_thread(is_whole, path):
            return path
        needed = self._engine.needed_tensors(shard, path)
        tensors = await self._asked(needed, shard.model_id, on_progress)
        parts = await asyncio.to_thread(parts_with, path, tensors)
        return await self._bring(shard.model_id, on_progress, parts=parts)

    def weights_bytes(self, shard: Shard) -> int:
        """Of a shard whose model was described: what a token reads; 0 of any other."""
        if shard.model_id not in self._described:
            return 0
        found = self._described[shard.model_id][1]
        own = found.layer_bytes[shard.start_layer : shard.end_layer]
        unread = found.unread_bytes[shard.start_layer : shard.end_layer]
        last = found.last_bytes if shard.is_last else 0
        return sum(own) - found.kv_bytes * len(own) - sum(unread) + last

    async def _asked(
        self, answer: Awaitable[Result], model_id: str, on_progress: OnProgress
    ) -> Result:
        """What the engine says of a model's files; it may be busy with another one."""
        return await watched(
            lambda heard: answer, on_progress, Progress("checking", f"{model_id} by the engine")
        )

    async def here(self, last_used: Mapping[str, float]) -> list[HeldModel]:
        """Models whose files, or some of them, are on this machine."""
        return await asyncio.to_thread(self._here, last_used)

    def _here(self, last_used: Mapping[str, float]) -> list[HeldModel]:
        names = [card.model_id for card in self._store.available()]
        found = ((name, self._store.find(name, {})) for name in names)
        return [
            HeldModel(name, self._store.size(path), is_whole(path), last_used.get(name, 0))
            for name, path in found
            if path is not None
        ]

    async def remove(self, model_id: str) -> int:
        """Delete a model's files; the bytes freed. Raises what `ModelStore.remove` raises."""
        freed = await asyncio.to_thread(self._store.remove, model_id)
        self._described.pop(model_id, None)
        return freed

    async def _bring(
        self,
        model_id: str,
        on_progress: OnProgress,
        *,
        parts: Parts | None = None,
        renew: bool = False,
    ) -> Path:
        moved = False

        def heard(progress: Progress) -> None:
            nonlocal moved
            moved = moved or progress.phase not in ("checking", "ready") or progress.warning != ""
            if moved:
                self._activity.note(model_id, progress)
                progress = self._activity.of(model_id)  # with its speed
            on_progress(replace(progress, node_id=self._node_id))

        try:
            path = await watched(
                lambda moves: self._store.ensure(model_id, moves, parts=parts, renew=renew),
                heard,
                Progress("checking", model_id),
            )
        except ExoError as error:
            if isinstance(error, Stalled):
                self._store.cancel(model_id)
            phase = "cancelled" if isinstance(error, DownloadCancelled) else "failed"
            self._activity.note(model_id, Progress(phase, model_id, warning=error.message))
            raise
        if moved:
            last = self._activity.of(model_id)
            self._activity.note(model_id, replace(last, phase="ready", done=last.total))
        return path
