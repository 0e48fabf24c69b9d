"""When the event loop stays awake for a ring's next step, and when it sleeps."""

from __future__ import annotations

import asyncio

import pytest

from exo.orchestration.serving import busy_poll as module
from exo.orchestration.serving.busy_poll import REST_S, TAKEN_S, WINDOW_S, BusyPoll


class Clock:
    """Time, which passes when it is told to, and how often the loop has looked for a step. Others
    have the processor for `taken` of it after each look."""

    def __init__(self) -> None:
        self.now = 100.0
        self.computed = 0.0
        self.taken = 0.0
        self.looks = 0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.computed

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def sched_yield(self) -> None:
        self.looks += 1
        self.now += self.taken

    async def looks_now(self) -> bool:
        before = self.looks
        for _ in range(3):
            await asyncio.sleep(0)
        return self.looks > before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "os", clock)
    return clock


async def test_it_looks_until_the_step_comes(clock: Clock) -> None:
    poll = BusyPoll()
    assert not await clock.looks_now()
    poll.begin()
    assert await clock.looks_now()
    poll.end()
    assert not await clock.looks_now()


async def test_it_sleeps_when_the_step_is_late(clock: Clock) -> None:
    poll = BusyPoll()
    poll.begin()
    clock.compute(WINDOW_S / 2)
    assert await clock.looks_now()
    clock.compute(WINDOW_S)
    assert not await clock.looks_now()


async def test_it_sleeps_where_steps_take_long(clock: Clock) -> None:
    poll = BusyPoll()
    for wait_s, looks_next in ((10 * WINDOW_S, False), (WINDOW_S / 2, True)):
        poll.begin()
        clock.now += wait_s
        poll.end()
        poll.begin()
        assert await clock.looks_now() == looks_next


async def test_it_sleeps_for_a_while_where_others_take_the_processor(clock: Clock) -> None:
    poll = BusyPoll()
    clock.taken = 2 * TAKEN_S
    poll.begin()
    await asyncio.sleep(0)
    assert clock.looks == 1 and not await clock.looks_now()
    poll.end()
    clock.taken = TAKEN_S / 2
    for wait_s, looks in ((WINDOW_S / 4, False), (REST_S, True)):
        clock.compute(wait_s)
        poll.begin()
        assert await clock.looks_now() == looks
        poll.end()


async def test_a_step_passed_on_after_another_is_waited_for_once(clock: Clock) -> None:
    poll = BusyPoll()
    poll.begin()
    poll.end()
    clock.now += WINDOW_S / 4
    poll.begin()
    before = clock.looks
    await asyncio.sleep(0)
    assert clock.looks == before + 1
    poll.end()
