"""An event loop that stays awake while the next step of a ring is about to come."""

from __future__ import annotations

import asyncio
import os
import time

WINDOW_S = 0.05
"""For longer the loop does not stay awake: what a wake-up costs does not count there."""


TAKEN_S = 0.001
"""Who was off its processor for so long between two looks shares it: a processor that others use
does not fall asleep, and they would be slowed by the looking."""

REST_S = 1.0
"""After that the loop sleeps as any for so long."""


class BusyPoll:
    """A processor that has gone to sleep takes 0.05 to 0.2 ms to wake, and its caches are another's
    by then: half of a hop (docs/benchmarks.md). So a member that has passed a step on looks again
    and again whether the next has come. Each time it offers the processor to others, and where they
    take it, it looks no more. It sleeps as well where the last step took longer than the window to
    come.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._last_wait_s = 0.0
        self._rests_until = 0.0

    def begin(self) -> None:
        """A step was passed on, and nothing is to be done until the next."""
        self._began = time.monotonic()
        if self._last_wait_s <= WINDOW_S and self._began >= self._rests_until:
            self._poll(self._began, self._off_processor_s())

    def end(self) -> None:
        """The next step has come."""
        if self._began is not None:
            self._last_wait_s = time.monotonic() - self._began
            self._began = None

    def _poll(self, began: float, off_s: float) -> None:
        if self._began != began or (now := time.monotonic()) - began > WINDOW_S:
            return
        if self._off_processor_s() - off_s > TAKEN_S:
            self._rests_until = now + REST_S
            return
        off_s = self._off_processor_s()
        os.sched_yield()
        self._loop.call_soon(self._poll, began, off_s)

    @staticmethod
    def _off_processor_s() -> float:
        """Of all time, what this thread did not compute in."""
        return time.monotonic() - time.thread_time()
