"""Long work never waits in silence: what it waits for is said, and one day it is given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from exo.download.progress import OnProgress, Progress
from exo.errors import Stalled

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

QUIET_S = 10.0
"""After so long without any progress people are told, and again each time it has passed."""

DEADLINES_S = {
    "checking": 120.0,
    "waiting": 3600.0,
    "downloading": 300.0,
    "verifying": 300.0,
    "converting": 1800.0,
    "loading": 600.0,
    "warming": 150.0,
}
"""Without any progress in a phase for so long, the work ends with an error. Each outlasts what the
phase itself bears: an outage of the hub, a converter or a disk that says nothing, a first token
that compiles kernels. `waiting` is for another process, which has deadlines of its own."""

_WAITS_FOR = {
    "checking": "an answer about the model's files",
    "downloading": "bytes from the hub or a peer",
    "verifying": "the disk",
    "converting": "the conversion",
    "loading": "the engine to load it",
    "warming": "the first token out of the ring",
}

_TICK_S = 1.0


async def watched(
    work: Callable[[OnProgress], Awaitable[Result]], on_progress: OnProgress, first: Progress
) -> Result:
    """The result of `work`, which reports its progress, from any thread, and begins with `first`.

    Raises:
        Stalled: nothing moved until the phase's deadline; the work is cancelled.
    """
    last, still_s = first, 0.0

    def heard(progress: Progress) -> None:
        nonlocal last, still_s
        # Who waits says so again and again, which is no progress.
        if progress.phase != "waiting" or progress != last:
            still_s = 0.0
        last = progress
        on_progress(progress)

    task = asyncio.ensure_future(work(heard))
    try:
        while not (await asyncio.wait([task], timeout=_TICK_S))[0]:
            # Ticks, not the clock: a machine that slept is not at fault.
            before, still_s = still_s, still_s + _TICK_S
            if still_s >= DEADLINES_S.get(last.phase, QUIET_S * 30):
                raise Stalled(f"{_what(last)} stalled: {_waits(last, still_s)}; it was given up")
            if still_s // QUIET_S > before // QUIET_S:
                logger.warning("%s: %s", _what(last), _waits(last, still_s))
                on_progress(replace(last, warning=_waits(last, still_s)))
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_TICK_S)


def _what(progress: Progress) -> str:
    return f"{progress.phase} {progress.file or progress.detail}".strip()


def _waits(progress: Progress, still_s: float) -> str:
    if progress.phase == "waiting":
        return f"nothing for {still_s:.0f} s"
    return f"nothing for {still_s:.0f} s, waits for {_WAITS_FOR.get(progress.phase, 'an answer')}"
