"""An event loop that stays awake while the next step of a ring is about to come."""

from __future__ import annotations

import asyncio
import os
import time

WINDOW_S = 0.05
"""For longer the loop does not stay awake: what a wake-up costs does not count there."""


class BusyPoll:
    """A processor that has gone to sleep takes 0.05 to 0.2 ms to wake, and its caches are another's
    by then: half of a hop (docs/benchmarks.md). So a member that has passed a step on looks again
    and again whether the next has come. Each time it offers the processor to others, who are not
    slowed by it. It sleeps where the last step took longer than the window to come.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._last_wait_s = 0.0

    def begin(self) -> None:
        """A step was passed on, and nothing is to be done until the next."""
        self._began = time.monotonic()
        if self._last_wait_s <= WINDOW_S:
            self._poll(self._began)

    def end(self) -> None:
        """The next step has come."""
        if self._began is not None:
            self._last_wait_s = time.monotonic() - self._began
            self._began = None

    def _poll(self, began: float) -> None:
        if self._began == began and time.monotonic() - began <= WINDOW_S:
            os.sched_yield()
            self._loop.call_soon(self._poll, began)
