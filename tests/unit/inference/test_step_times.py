"""When an engine says that its machine computes slower than it did."""

from __future__ import annotations

import numpy as np

from exo.inference.batch import ForwardBatch, Slice
from exo.inference.step_times import StepTimes
from exo.shard import Shard

SHARD = Shard("model", 0, 4, 8)


class Machine:
    def __init__(self) -> None:
        self.now = 100.0
        self.times = StepTimes(lambda: self.now)

    def compute(self, seconds: float, step_s: float, tokens: int = 1, start: int = 0) -> None:
        batch = ForwardBatch((Slice("s", start, tokens, None),), np.zeros(tokens, np.int32))
        until = self.now + seconds
        while self.now < until:
            self.now += step_s
            self.times.took(SHARD, batch, step_s, step_s)


def test_ten_times_slower_is_known_within_seconds_and_by_how_much() -> None:
    machine = Machine()
    machine.compute(5, 0.01)
    assert machine.times.slowdown == 1.0
    machine.compute(5, 0.1)
    assert 9 < machine.times.slowdown < 11
    assert machine.times.token_s[SHARD] < 0.011  # as it is when it is itself
    machine.compute(5, 0.01)
    assert machine.times.slowdown == 1.0


def test_a_pause_of_the_machine_is_none() -> None:
    machine = Machine()
    machine.compute(5, 0.01)
    machine.compute(2, 2.0)
    assert machine.times.slowdown == 1.0
    for _ in range(20):
        machine.compute(0.1, 0.01)
        machine.compute(0.2, 0.2)
        assert machine.times.slowdown <= 1.0


def test_neither_are_longer_prompts_and_contexts() -> None:
    machine = Machine()
    machine.compute(5, 0.01)
    machine.compute(5, 0.5, tokens=256)
    assert machine.times.slowdown == 1.0
    machine.compute(5, 0.2, start=100_000)
    assert machine.times.slowdown == 1.0


def test_half_a_millisecond_may_be_late() -> None:
    machine = Machine()
    machine.compute(5, 0.0005)
    machine.compute(5, 0.015)
    assert machine.times.slowdown == 1.0


def test_nothing_is_said_of_one_that_rests_or_has_just_begun() -> None:
    machine = Machine()
    machine.compute(5, 0.01)
    machine.now += 60
    machine.compute(1, 0.2)
    assert machine.times.slowdown == 0.0
    machine.compute(3, 0.2)
    assert machine.times.slowdown > 15
    machine.now += 10
    assert machine.times.slowdown == 0.0


def test_what_stays_slow_is_usual_in_the_end() -> None:
    machine = Machine()
    machine.compute(5, 0.01)
    machine.compute(200, 0.1)
    assert machine.times.slowdown < 2
    assert 0.05 < machine.times.token_s[SHARD] < 0.11
