"""What this node gives plans: memory, speed, and its shard of each."""

from __future__ import annotations

import time
from collections.abc import Callable

from exo.download.progress import OnProgress, Progress
from exo.download.watch import watched
from exo.errors import ExoError, PlanMismatch
from exo.inference.engine import InferenceEngine
from exo.networking.calls.messages import Prepared
from exo.orchestration.config import NodeConfig
from exo.orchestration.draft_model import DraftModel
from exo.orchestration.files.activity import Activity
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.membership.membership import Membership
from exo.orchestration.serving.rings import Rings
from exo.orchestration.serving.standby import Standby
from exo.shard import RingPlan
from exo.topology.capabilities import DeviceCapabilities, probe, refreshed
from exo.topology.placement import BARE_SHARE, NodePace, read_rate

MEMORY_PROBE_S = 2.0

MAY_BE_CACHED_BYTES = 64 << 20
"""Of weights that a processor's cache may hold: how fast these are read says little of more."""


class OwnShards:
    """`check_not_stale` raises PlanMismatch for plans that others have replaced."""

    def __init__(
        self,
        config: NodeConfig,
        engine: InferenceEngine,
        rings: Rings,
        files: ModelFiles,
        activity: Activity,
        membership: Membership,
        check_not_stale: Callable[[RingPlan], None],
        standby: Standby,
        draft: DraftModel,
    ) -> None:
        self._config = config
        self._engine = engine
        self._rings = rings
        self._files = files
        self._activity = activity
        self._membership = membership
        self._check_not_stale = check_not_stale
        self._standby = standby
        self._draft = draft
        self._capabilities = probe(config.memory_bytes)
        self._probed_at = time.monotonic()

    def capabilities(self) -> DeviceCapabilities:
        """With the memory that was free a moment ago."""
        now = time.monotonic()
        if self._config.memory_bytes is None and now - self._probed_at > MEMORY_PROBE_S:
            self._probed_at = now
            self._capabilities = refreshed(self._capabilities, self._engine.promised_bytes)
        return self._capabilities

    def free_bytes(self) -> int:
        """What models may still take here."""
        if self._config.memory_bytes is not None:
            held = sum(self._rings.held_bytes().values()) + self._draft.bytes
            return max(0, self._config.memory_bytes - held)
        return self.capabilities().memory_available_bytes

    async def prepare(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> Prepared:
        """Say what the model needs and what memory a shard may take, for which its configuration
        and the headers of its weight files are brought here; with `renew` all its files, newer ones
        if there are."""
        if renew:
            description = await self._files.bring(model_id, on_progress)
        else:
            _, description = await self._files.describe(model_id, on_progress)
        await self._standby.make_way(model_id)
        held = self._rings.held_bytes()
        own = held.pop(model_id, 0)
        if self._config.memory_bytes is not None:
            memory = max(0, self._config.memory_bytes - sum(held.values()) - self._draft.bytes)
        else:
            self._probed_at = 0.0  # what an unloaded model gave back counts at once
            memory = self.capabilities().memory_available_bytes + own
        return Prepared(description, memory, held, await self._pace())

    async def _pace(self) -> NodePace:
        """How fast this node decodes: as its steps say, of the largest shard that had any, else as
        its memory is read. A node that has heard no other measures nothing: it has no choice."""
        others, _ = self._membership.views()
        bare = BARE_SHARE * await self._engine.read_rate() if others else 0.0
        rate, largest = bare, 0
        for shard, seconds in list(self._engine.times.token_s.items()):
            weights = self._files.weights_bytes(shard)
            if weights > largest:
                rate, largest = read_rate(shard, weights, seconds), weights
        if bare and largest < MAY_BE_CACHED_BYTES:
            rate = min(rate, bare)
        return NodePace(
            rate / max(1.0, self._engine.times.slowdown), self._membership.round_trips_s()
        )

    async def load(self, plan: RingPlan, on_progress: OnProgress) -> None:
        """Bring the files of this node's shard of a plan, load it and take its place in the ring.

        Raises:
            PlanMismatch: the plan is stale, or means other files than this node has.
        """
        self._check_not_stale(plan)
        path, description = await self._files.describe(plan.model_id, on_progress)
        if description.checkpoint != plan.checkpoint:
            raise PlanMismatch(
                f"plan {plan.hash} is for files {plan.checkpoint} of {plan.model_id}; node "
                f"{self._config.node_id} has {description.checkpoint}"
            )

        def heard(progress: Progress) -> None:
            self._activity.note(plan.model_id, progress)
            on_progress(progress)

        shard = plan.shard_of(self._config.node_id)
        path = await self._files.bring_shard(shard, path, on_progress)
        if description.bytes_of((shard,)) > self.free_bytes():
            await self._rings.unload_what_no_plan_has(plan.model_id)
        try:
            await watched(
                lambda moves: self._rings.join(plan, description, path, moves),
                heard,
                Progress("loading", str(shard), node_id=self._config.node_id),
            )
        except ExoError as error:
            self._activity.note(plan.model_id, Progress("failed", warning=error.message))
            raise
        if plan.head_id == self._config.node_id:
            await self._draft.help(plan, path, heard)
        self._activity.note(plan.model_id, Progress("ready", str(shard)))
