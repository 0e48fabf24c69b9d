"""How a node leaves so that nobody notices: others take over before it goes.

A node that is drained lives on and has no part in rings: plans are made without it, and answers
that run through it go on on the new ones. One that ends does the same first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from exo.download.progress import unheard
from exo.errors import ExoError, PeerUnavailable
from exo.orchestration.membership.membership import Membership
from exo.orchestration.planning.keeper import PlanKeeper
from exo.orchestration.planning.planner import Member
from exo.orchestration.serving.rings import Rings
from exo.shard import RingPlan
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

LOOK_S = 0.05

TOLD_S = 1.0
"""How long peers may take to answer that they know."""


class Leaving:
    """Whether this node has a part in rings, and how it gives that up. `members` gives every live
    node by id."""

    def __init__(
        self,
        node_id: str,
        rings: Rings,
        membership: Membership,
        keeper: PlanKeeper,
        members: Callable[[], Mapping[str, Member]],
    ) -> None:
        self._node_id = node_id
        self._rings = rings
        self._membership = membership
        self._keeper = keeper
        self._members = members
        self._handing: asyncio.Task[None] | None = None
        self._tasks = TaskOwner(f"leaving of {node_id}")
        self.draining = False
        self.problems: dict[str, str] = {}
        """Why models cannot be served without this node."""

    @property
    def everyone(self) -> frozenset[str]:
        """All live nodes that drain, this one too."""
        return self._membership.draining | ({self._node_id} if self.draining else frozenset())

    @property
    def _others_stay(self) -> bool:
        return not self._membership.draining.issuperset(self._membership.alive)

    @property
    def models(self) -> list[str]:
        """Of which this node still has something: a part in their rings, or layers in memory."""
        return sorted(self._in_rings | {shard.model_id for shard in self._rings.shards})

    @property
    def _in_rings(self) -> set[str]:
        return {plan.model_id for plan in self._rings.plans}

    def drain(self) -> None:
        """Begin to hand over; `models` and `problems` tell how far it is."""
        if self.draining and self._handing is not None and not self._handing.done():
            return
        self.draining = True
        self._handing = self._tasks.background(self._hand_over(), "hand over")

    def undo(self) -> None:
        """Have a part in rings again, where plans want that."""
        self.draining = False
        self.problems.clear()
        if self._handing is not None:
            self._handing.cancel()

    async def leave(
        self, limit_s: float, is_needed: Callable[[], str], say: Callable[[str], None]
    ) -> None:
        """Hand over and wait for what else goes on here, `limit_s` seconds at most. `is_needed`
        names that, or nothing. What is waited for is told through `say`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                if self._others_stay and self._rings.plans:
                    self.drain()
                    assert self._handing is not None
                    say(f"handing over {', '.join(self.models)}")
                    await asyncio.wait([self._handing])
                said = ""
                while needed := is_needed():
                    if needed != said:
                        say(needed)
                    said = needed
                    await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        await self._tasks.close()

    async def _hand_over(self) -> None:
        """Until this node has no place in a ring, or only in some that nobody can take over and
        on which nothing runs; then give back what no ring uses."""
        await self._membership.told(TOLD_S)
        self.problems.clear()
        await asyncio.gather(*map(self._replace, self._in_rings))
        while plans := self._rings.plans:
            stuck = [plan for plan in plans if plan.model_id in self.problems]
            if len(stuck) == len(plans) and all([await self._is_idle(plan) for plan in stuck]):
                break
            await asyncio.sleep(LOOK_S)
        for model_id in {shard.model_id for shard in self._rings.shards}:
            await self._rings.unload_unused(model_id)

    async def _replace(self, model_id: str) -> None:
        try:
            if not self._others_stay:
                raise PeerUnavailable("there is no other node")
            plan = await self._keeper.ensure_plan(
                model_id, "", unheard, make_room=False, renew=True
            )
        except ExoError as error:
            self.problems[model_id] = error.message
            logger.warning("%s needs this node: %s", model_id, error.message)
        else:
            logger.info("%s is served by %s from now on", model_id, plan.node_ids)

    async def _is_idle(self, plan: RingPlan) -> bool:
        head = self._members().get(plan.head_id)
        try:
            return head is None or await head.idle_s(plan.hash) is not None
        except ExoError:
            return True  # nothing runs without its head
