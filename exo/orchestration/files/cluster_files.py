"""Model files on all nodes: brought, told of, deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Protocol

from exo.download.progress import OnProgress, unheard
from exo.errors import ExoError, InvalidRequest
from exo.networking.calls.messages import HeldModel, Prepared
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.serving.rings import Rings
from exo.shard import Shard
from exo.topology.partitioning import largest_remainder

logger = logging.getLogger(__name__)


class FileHolder(Protocol):
    """What is asked of a node: this one, or a peer over gRPC."""

    async def prepare(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> Prepared: ...

    async def models_here(self) -> list[HeldModel]: ...


class ClusterFiles:
    """`members` gives every live node by id."""

    def __init__(
        self,
        node_id: str,
        files: ModelFiles,
        members: Callable[[], Mapping[str, FileHolder]],
        rings: Rings,
    ) -> None:
        self._node_id = node_id
        self._files = files
        self._members = members
        self._rings = rings

    async def download(self, model_id: str, *, everywhere: bool) -> dict[str, ExoError | None]:
        """Bring a model's files, or what a newer revision changed of them, to this node, and where
        asked to every live one; how it ended on each. What goes on meanwhile is in the activity."""
        members = self._members()
        if not everywhere:
            members = {self._node_id: members[self._node_id]}
        calls = (member.prepare(model_id, unheard, renew=True) for member in members.values())
        ends: dict[str, ExoError | None] = {}
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for node_id, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, ExoError):
                raise outcome
            ends[node_id] = outcome if isinstance(outcome, ExoError) else None
        return ends

    async def download_shard(self, model_id: str, part: int, parts: int) -> None:
        """Bring what the `part`th of `parts` equal shards reads to this node.

        Raises:
            InvalidRequest: there is no such part.
            ExoError: what `ModelFiles.describe` raises.
        """
        path, description = await self._files.describe(model_id, unheard)
        if not 1 <= part <= parts <= description.n_layers:
            raise InvalidRequest(
                f"shard {part}/{parts}: expected 1/n to n/n with n at most the "
                f"{description.n_layers} layers of {model_id}",
                param="shard",
            )
        bounds = [0, *accumulate(largest_remainder([1] * parts, description.n_layers))]
        shard = Shard(model_id, bounds[part - 1], bounds[part], description.n_layers)
        await self._files.bring_shard(shard, path, unheard)

    async def held(self) -> dict[str, list[HeldModel]]:
        """Models whose files, or some of them, are on each live node that answers."""
        members = self._members()
        calls = (member.models_here() for member in members.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = {}
        for node_id, answer in zip(members, answers, strict=True):
            if isinstance(answer, ExoError):
                logger.warning("%s does not say which models it has: %s", node_id, answer.message)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[node_id] = answer
        return found

    async def held_by_model(self) -> dict[str, dict[str, HeldModel]]:
        """The same, by model and node."""
        found: dict[str, dict[str, HeldModel]] = {}
        for node_id, models in (await self.held()).items():
            for model in models:
                found.setdefault(model.model_id, {})[node_id] = model
        return found

    async def remove(self, model_id: str) -> int:
        """Delete a model's files from this machine; the bytes freed.

        Raises:
            InvalidRequest: a ring here serves it, or its files are the user's own.
            ModelNotFound: it is not here.
        """
        if any(shard.model_id == model_id for shard in self._rings.shards):
            raise InvalidRequest(
                f"{model_id} is loaded on node {self._node_id}; stop the node to remove it"
            )
        return await self._files.remove(model_id)
