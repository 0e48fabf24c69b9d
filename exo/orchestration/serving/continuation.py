"""An answer goes on when its ring ends: its tokens so far begin it on the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from exo.errors import ExoError, ModelTooLarge, PeerUnavailable, PlanMismatch, StepTimeout
from exo.networking.calls.messages import GenerationEvent, GenerationRequest
from exo.shard import RingPlan

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""Rings that are tried, one after the other with no token between them, for an answer that has not
begun."""

SETTLE_S = 0.2
"""How long members have to find out who is gone before they are asked again, times the attempt."""

_RING_ENDED = (PlanMismatch, PeerUnavailable, StepTimeout)


async def generate_on_any_ring(
    request: GenerationRequest,
    ring: Callable[[str], Awaitable[RingPlan]],
    at_head: Callable[[RingPlan, GenerationRequest], AsyncGenerator[GenerationEvent, None]],
    rejoin_wait_s: float,
    lost_at: Callable[[], float],
    waits: Callable[[], None],
) -> AsyncGenerator[GenerationEvent, None]:
    """The tokens of one sequence, whichever rings they come from: none twice, none missing. What a
    ring had computed and not told is computed again by the next one, to the same tokens.

    `ring` gives one that serves, not the one whose hash it is told; `at_head` has it generate. A
    node that is needed may come back: an answer that has begun waits `rejoin_wait_s` for a ring
    that can go on with it, and one that has not, until that long after `lost_at`, when a node was
    last lost. `waits` is called before each new try of it.

    Raises:
        ExoError: no ring could be had, or the sequence failed.
    """
    clock = asyncio.get_running_loop().time
    begun, trouble_since, trouble = clock(), 0.0, ""
    given: list[int] = []
    dead_hash, attempt = "", 0
    while True:
        wanted = _resumed(request, given, attempt, clock() - begun)
        try:
            plan = await ring(dead_hash)
            dead_hash = plan.hash
            async with contextlib.aclosing(at_head(plan, wanted)) as events:
                async for event in events:
                    if not event.prompt_done:
                        attempt = 0
                    if event.token is not None:
                        given.append(event.token.token_id)
                    yield event
            return
        except ExoError as error:
            if not isinstance(error, (*_RING_ENDED, ModelTooLarge)):
                raise
            attempt += 1
            if attempt == 1:
                trouble_since, trouble = clock(), error.message
            waited = clock() - (trouble_since if given else lost_at()) > rejoin_wait_s
            if given and waited:
                raise type(error)(
                    f"{trouble}. For {rejoin_wait_s:.0f} s nobody could go on with the answer, of "
                    f"{len(given)} tokens: {error.message}"
                ) from error
            if waited and (attempt >= ATTEMPTS or isinstance(error, ModelTooLarge)):
                raise
            if isinstance(error, ModelTooLarge):
                waits()
            logger.info(
                "%s: %s; going on after %d tokens", request.sequence_id, error.message, len(given)
            )
            if not given or attempt > 1:
                await asyncio.sleep(min(attempt, ATTEMPTS) * SETTLE_S)


def _resumed(
    request: GenerationRequest, given: list[int], attempt: int, passed_s: float
) -> GenerationRequest:
    """What is left to ask for. Under a name of its own: what the ring before held under the old one
    is forgotten whenever that comes to it."""
    if not attempt:
        return request
    left_s = max(request.timeout_s - passed_s, 1e-3) if request.timeout_s else 0.0
    return replace(
        request,
        sequence_id=f"{request.sequence_id}~{len(given)}.{attempt}",
        generated=tuple(given),
        timeout_s=left_s,
    )
