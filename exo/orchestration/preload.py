"""After a restart, the models used most are loaded before anybody asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from exo.download.progress import unheard
from exo.errors import ExoError, ModelTooLarge
from exo.orchestration.node import StandardNode

logger = logging.getLogger(__name__)

PRELOADED = 3
"""Models at most. They never push each other, or what is in use, out of memory."""

LOOK_AGAIN_S = 60.0
"""How soon a model for which there was too little memory is tried again where no node comes."""

QUIET_S = 2.0
"""How long no node may come or go before layers are placed: nodes start one after the other."""


async def preload_most_used(node: StandardNode) -> None:
    """Load what this node was asked for most, where its files are here. What the cluster is too
    small for is tried again when nodes come."""
    wanted = node.usage.most_used()[:PRELOADED]
    while wanted:
        await _quiet(node)
        alive = set(node.membership.alive)
        for model_id in list(wanted):
            if not await _is_too_large(node, model_id):
                wanted.remove(model_id)
        if wanted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await node.wait_for_members_other_than(alive)


async def _is_too_large(node: StandardNode, model_id: str) -> bool:
    try:
        if node.plans.of(model_id) is None and await node.files.are_here(model_id):
            await node.ensure_plan(model_id, "", unheard, make_room=False)
    except ModelTooLarge as error:
        logger.info("%s is not loaded beforehand yet: %s", model_id, error.message)
        return True
    except ExoError as error:
        # Whoever asks for it gets this error, or an answer.
        logger.warning("%s is not loaded beforehand: %s", model_id, error.message)
    return False


async def _quiet(node: StandardNode) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(QUIET_S):
                await node.wait_for_members_other_than(set(node.membership.alive))
