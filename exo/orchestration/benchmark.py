"""How fast a ring is, measured on one of its nodes through all of what a request goes through."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass

from exo.download.progress import OnProgress
from exo.inference.benchmark import GREEDY, random_tokens
from exo.models.description import read_config, vocabulary
from exo.networking.calls.messages import GenerationRequest
from exo.orchestration.node import StandardNode


@dataclass(frozen=True)
class Timing:
    """Seconds to the first token of the first sequence, and tokens a second, of all sequences
    together, while every one of them was decoding; None where only one token was asked for."""

    first_token_s: float
    decode_tok_s: float | None


async def measure(
    node: StandardNode,
    model_id: str,
    context: int,
    tokens: int,
    batch: int,
    on_progress: OnProgress,
) -> Timing:
    """Generate `tokens` tokens after each of `batch` prompts of `context` random tokens.

    Raises:
        ExoError: the model cannot be had, or a sequence failed.
    """
    await node.ensure_plan(model_id, "", on_progress)
    folder, _ = await node.describe(model_id, on_progress)
    ids = vocabulary(read_config(folder))
    started = time.perf_counter()

    async def one(number: int) -> list[float]:
        prompt = tuple(random_tokens(context, ids, number).tolist())
        name = f"bench-{uuid.uuid4().hex}"
        # Prompts of each run are the same: what is timed is to be computed.
        request = GenerationRequest(name, prompt, GREEDY, tokens, shortcuts=False)
        async with contextlib.aclosing(node.generate(model_id, request, on_progress)) as events:
            return [time.perf_counter() async for event in events if event.token is not None]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(batch)]
    times = [task.result() for task in tasks]
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    together = sum(begin < at <= end for t in times for at in t)
    return Timing(
        min(t[0] for t in times) - started, together / (end - begin) if end > begin else None
    )
