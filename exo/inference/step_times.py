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

SLOW_EXCESS_S: Final = 0.02
"""A step is late by so much at least: half a millisecond is late when anything else runs."""

WINDOW_S: Final = 4.0
"""What most steps of so many seconds took counts: a pause of the machine is but one of them."""

SURE_S: Final = 3.0
"""The first of them is so old."""

LEAST_STEPS: Final = 5

_FASTER_SHARE = 0.3
"""Of a step that took less than usual in what is usual from now on."""

_GETS_USUAL_S = 60.0
"""What is usual grows e-fold in so many seconds of steps that all take longer."""

_ODD = 8.0
"""Steps of so many times the usual time say nothing of what a machine can."""

_TOKEN_SHARE = 0.1
"""Of the newest step of one token in what such steps are said to take."""

_CONTEXT_UNIT = 1024


class StepTimes:
    """Steps of about as many tokens, cached ones and logits, of one shard, are compared with each
    other. `took` is called on the engine's thread, all else on any: what is read is copied
    first, which Python does in one go. `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._usual: dict[tuple[Shard, int, int, int], float] = {}
        self._ratios: deque[tuple[float, float]] = deque(maxlen=1024)  # when, times the usual
        self.token_s: dict[Shard, float] = {}
        """Seconds of a step of one token, by shard, while the machine is itself."""

    def took(self, shard: Shard, batch: ForwardBatch, computed_s: float, step_s: float) -> None:
        """A step took so long, without and with sampling, whose time is that of what was asked."""
        rows = len(batch.token_ids)
        cached = sum(part.start for part in batch.slices) // _CONTEXT_UNIT
        logits = sum(part.logits for part in batch.slices)
        key = (shard, rows.bit_length(), cached.bit_length(), logits.bit_length())
        usual = self._usual.get(key, computed_s)
        ratio = computed_s / max(usual, 1e-9) if computed_s - usual > SLOW_EXCESS_S else 1.0
        self._ratios.append((self._now(), ratio))
        if computed_s < usual:
            usual += _FASTER_SHARE * (computed_s - usual)
        else:
            usual *= 1 + min(computed_s / _GETS_USUAL_S, 1.0)
            usual = min(usual, computed_s)
        self._usual[key] = usual
        if rows == 1 and ratio < _ODD:
            known = self.token_s.get(shard, step_s)
            self.token_s[shard] = known + _TOKEN_SHARE * (step_s - known)

    @property
    def slowdown(self) -> float:
        """How many times as long as usual the steps of the last seconds took; 0 where that is not
        known, or not long enough to be sure of."""
        now = self._now()
        recent = [(at, ratio) for at, ratio in list(self._ratios) if now - at <= WINDOW_S]
        if len(recent) < LEAST_STEPS or now - recent[0][0] < SURE_S:
            return 0.0
        return statistics.median(ratio for _, ratio in recent)
