"""Layers next to a node's own, kept packed in memory that nobody needs.

Where a member of a ring is lost, those before and after it get layers of its: a plan that finds
them in memory reads nothing, and answers go on sooner (docs/decisions/020). They are read one at a
time, while nothing is computed here, and given back the moment a model needs the memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from exo.errors import ExoError
from exo.inference.engine import InferenceEngine
from exo.models.description import ModelDescription
from exo.orchestration.serving.rings import Rings
from exo.shard import RingPlan, Shard
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

SHARE = 0.25
"""Of the memory that is free so much may be taken. More holds more of what a loss would move; less
leaves more to KV caches, which may take half, and to the machine's other programs."""

LOOK_S = 2.0
"""So long must nothing have been computed here before a layer is read: a step waits for that."""

HOLD_OFF_S = 10.0
"""After another model wanted memory nothing is taken for so long."""

TRY_AGAIN_S = 600.0
"""A layer that could not be read, whose files are not here above all, is left alone for so long."""


class Standby:
    """`free_bytes`: what models may still take here."""

    def __init__(
        self,
        node_id: str,
        rings: Rings,
        engine: InferenceEngine,
        free_bytes: Callable[[], int],
    ) -> None:
        self._node_id = node_id
        self._rings = rings
        self._engine = engine
        self._free_bytes = free_bytes
        self._not_before = 0.0  # the event loop's clock
        self._unreadable: dict[Shard, float] = {}  # until when
        self._turn = asyncio.Lock()
        self._tasks = TaskOwner(f"standby of {node_id}")

    def start(self) -> None:
        self._tasks.forever(self._keep, "standby")

    async def close(self) -> None:
        await self._tasks.close()

    async def make_way(self, model_id: str) -> None:
        """A model is placed: what is kept for others is free memory. While a shard is loaded, which
        may take minutes, it stays: nobody waits for that here."""
        if all(plan.model_id != model_id for plan in self._rings.plans):
            self._not_before = asyncio.get_running_loop().time() + HOLD_OFF_S
        async with self._turn:  # a layer may be being read
            for shard in self._rings.standby:
                if shard.model_id != model_id and not self._rings.is_loading:
                    await self._rings.give_back(shard)

    async def _keep(self) -> None:
        while True:
            busy_s = self._engine.busy_s
            await asyncio.sleep(LOOK_S)
            while self._engine.busy_s == busy_s and await self._stepped():
                pass

    async def _stepped(self) -> bool:
        async with self._turn:
            return await self._step()

    async def _step(self) -> bool:
        """One layer more or fewer; False if all is as it should be."""
        if self._rings.is_loading:
            return False
        held = self._rings.standby
        serving = {plan.model_id: plan for plan in self._rings.plans if len(plan.members) > 1}
        # (Of a model whose ring has just broken all is kept: its next plan needs it.)
        wanted = [shard for plan in serving.values() for shard in self._wanted(plan)]
        for shard in held:
            plan = serving.get(shard.model_id)
            if plan is not None and shard not in wanted and not self._is_own(plan, shard):
                await self._rings.give_back(shard)
                return True
        now = asyncio.get_running_loop().time()
        if now < self._not_before:
            return False
        for shard in wanted:
            if shard not in held and self._unreadable.get(shard, now) <= now:
                await self._read(shard)
                return True
        return False

    async def _read(self, shard: Shard) -> None:
        try:
            await self._rings.stand_by(shard)
        except ExoError as error:
            logger.info("%s is not kept in reserve: %s", shard, error.message)
            self._unreadable[shard] = asyncio.get_running_loop().time() + TRY_AGAIN_S

    def _is_own(self, plan: RingPlan, layer: Shard) -> bool:
        """Whether a layer takes no memory besides: who has it in a plan shares it."""
        own = plan.shard_of(self._node_id)
        return own.start_layer <= layer.start_layer < own.end_layer

    def _wanted(self, plan: RingPlan) -> Iterator[Shard]:
        """Layers next to this node's own, the nearest first, as many as may be taken."""
        description = self._rings.description_of(plan.model_id)
        own = plan.shard_of(self._node_id)
        if own.expert_share < 1:
            return  # memory that is spare would do for its own experts
        budget = SHARE * (self._free_bytes() + self._taken(plan, description))
        taken = [own]
        for layer in _outward(own):
            shard = Shard(own.model_id, layer, layer + 1, own.n_layers)
            taken.append(shard)
            if description.bytes_of(taken) - description.bytes_of([own]) > budget:
                return
            yield shard

    def _taken(self, plan: RingPlan, description: ModelDescription) -> int:
        own = plan.shard_of(self._node_id)
        held = [shard for shard in self._rings.standby if shard.model_id == plan.model_id]
        return description.bytes_of([own, *held]) - description.bytes_of([own])


def _outward(own: Shard) -> Iterator[int]:
    """Layers after and before a shard, in turns."""
    for distance in range(own.n_layers):
        if own.end_layer + distance < own.n_layers:
            yield own.end_layer + distance
        if own.start_layer - 1 - distance >= 0:
            yield own.start_layer - 1 - distance
