"""How long an engine's steps take against what they took: a machine that swaps, overheats or works
for somebody else shows it here first."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from exo.inference.batch import ForwardBatch
from exo.shard import Shard

SLOW: Final = 8.0
"""So many times as long as usual is no longer chance, or other work on a shared machine."""

SLOW_EXCESS_S: Final = 0.02
"""And so much longer at least: a step of half a millisecond is late when anything else runs."""

WINDOW_S: Final = 3.0
"""Most steps of so many seconds were slow: a pause of the machine is but one of them."""

SURE_S: Final = 2.0
"""The first of them is so old."""

LEAST_STEPS: Final = 5

_FASTER_SHARE = 0.3
"""Of a step that took less than usual in what is usual from now on."""

_GETS_USUAL_S = 60.0
"""What is usual grows e-fold in so many seconds of steps that all take longer."""

_TOKEN_SHARE = 0.1
"""Of the newest step of one token in what such steps are said to take."""

_CONTEXT_UNIT = 1024


class StepTimes:
    """Steps of about as many tokens on about as many cached ones, of one shard, are compared with
    each other. `took` is called on the engine's thread, all else on any: what is read is copied
    first, which Python does in one go. `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._usual: dict[tuple[Shard, int, int], float] = {}
        self._ratios: deque[tuple[float, float]] = deque(maxlen=1024)  # when, times the usual
        self.token_s: dict[Shard, float] = {}
        """Seconds of a step of one token, by shard, while the machine is itself."""

    def took(self, shard: Shard, batch: ForwardBatch, seconds: float) -> None:
        """A step took so long."""
        rows = len(batch.token_ids)
        cached = sum(part.start for part in batch.slices) // _CONTEXT_UNIT
        key = (shard, rows.bit_length(), cached.bit_length())
        usual = self._usual.get(key, seconds)
        ratio = seconds / max(usual, 1e-9) if seconds - usual > SLOW_EXCESS_S else 1.0
        self._ratios.append((self._now(), ratio))
        if seconds < usual:
            usual += _FASTER_SHARE * (seconds - usual)
        else:
            usual *= 1 + min(seconds / _GETS_USUAL_S, 1.0)
            usual = min(usual, seconds)
        self._usual[key] = usual
        if rows == 1 and ratio < SLOW:
            known = self.token_s.get(shard, seconds)
            self.token_s[shard] = known + _TOKEN_SHARE * (seconds - known)

    @property
    def slowdown(self) -> float:
        """How many times as long as usual the steps of the last seconds took; 1 where that is not
        known, or not long enough to be sure of."""
        now = self._now()
        recent = [(at, ratio) for at, ratio in list(self._ratios) if now - at <= WINDOW_S]
        if len(recent) < LEAST_STEPS or now - recent[0][0] < SURE_S:
            return 1.0
        ratio = statistics.median(ratio for _, ratio in recent)
        return ratio if ratio >= SLOW else 1.0
