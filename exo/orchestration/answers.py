"""Answers that this node gives its own clients, whichever node heads the ring."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from exo.download.progress import OnProgress, Progress
from exo.errors import PeerUnavailable
from exo.inference.sampling import SamplingParams
from exo.networking.calls.messages import GenerationEvent, GenerationRequest
from exo.orchestration.config import ServingRules
from exo.orchestration.files.usage import Usage
from exo.orchestration.membership.membership import Membership
from exo.orchestration.serving.continuation import generate_on_any_ring
from exo.orchestration.serving.rings import Rings
from exo.shard import RingPlan

logger = logging.getLogger(__name__)


class EnsurePlan(Protocol):
    """`PlanKeeper.ensure_plan`."""

    async def __call__(
        self, model_id: str, dead_hash: str, on_progress: OnProgress
    ) -> RingPlan: ...


class Answers:
    """`running` counts sequences of this node's clients that have, or had, a ring."""

    def __init__(
        self,
        node_id: str,
        rules: ServingRules,
        rings: Rings,
        membership: Membership,
        ensure_plan: EnsurePlan,
        usage: Usage,
    ) -> None:
        self._node_id = node_id
        self._rules = rules
        self._rings = rings
        self._membership = membership
        self._ensure_plan = ensure_plan
        self._usage = usage
        self._is_ending = False
        self.running = 0
        self._heads: Counter[str] = Counter()  # of them, by who decides their steps

    @property
    def heads(self) -> frozenset[str]:
        """Nodes that decide the steps of what is running."""
        return frozenset(+self._heads)

    def end(self) -> None:
        """None begins any more."""
        self._is_ending = True

    async def generate(
        self, model_id: str, request: GenerationRequest, on_progress: OnProgress
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Tokens of one sequence on the model's ring, which is made first if there is none, and
        again if it ends. Closing the iterator cancels the sequence on every member.

        Raises:
            ExoError: no plan could be made, or the sequence failed.
        """
        if self._is_ending:
            raise PeerUnavailable(f"node {self._node_id} is shutting down; ask another one")
        request = replace(request, timeout_s=self._rules.request_timeout_s)

        has_ring = False

        async def ring(dead_hash: str) -> RingPlan:
            nonlocal has_ring
            plan = await self._ensure_plan(model_id, dead_hash, on_progress)
            self.running += not has_ring
            has_ring = True
            return plan

        def waits() -> None:
            away = self._membership.away[:1] or ["the ring"]
            on_progress(Progress("waiting", f"for {away[0]} to come back"))

        answer = generate_on_any_ring(
            request,
            ring,
            self._at_head,
            self._rules.rejoin_wait_s,
            lambda: self._membership.lost_at,
            waits,
        )
        is_first = True
        try:
            async with contextlib.aclosing(answer):
                async for event in answer:
                    if event.prompt_done:
                        total = len(request.prompt)
                        done = min(event.prompt_done, total)
                        cached = (("cache", event.cached_tokens),)
                        on_progress(
                            Progress("reading", "the prompt", done, total, by_source=cached)
                        )
                        continue
                    if is_first:
                        self._usage.note(model_id)
                    is_first = False
                    yield event
        finally:
            self.running -= has_ring

    async def _at_head(
        self, plan: RingPlan, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        if plan.head_id == self._node_id:
            events = self._rings.generate(plan.hash, request)
        else:
            events = self._membership.handle_of(plan.head_id).generate(plan.hash, request)
            self._membership.beat_soon(plan.head_id)
        self._heads[plan.head_id] += 1
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.token is not None or event.finish_reason or event.prompt_done:
                        yield event
        finally:
            self._heads[plan.head_id] -= 1

    async def warm_up(self, plan: RingPlan) -> None:
        """Prove the ring with one token, before the plan is published."""
        request = GenerationRequest(
            f"warm-up-{plan.hash}",
            (0,),
            SamplingParams(temperature=0),
            max_tokens=1,
            shortcuts=False,
        )
        async with contextlib.aclosing(self._at_head(plan, request)) as events:
            async for _ in events:
                logger.info("plan %s of %s is ready", plan.hash, plan.model_id)
