"""When the event loop stays awake for a ring's next step, and when it sleeps."""

from __future__ import annotations

import asyncio

import pytest

from exo.orchestration.serving import busy_poll as module
from exo.orchestration.serving.busy_poll import WINDOW_S, BusyPoll


class Clock:
    """Time, which passes when it is told to, and how often the loop has looked for a step."""

    def __init__(self) -> None:
        self.now = 100.0
        self.looks = 0

    def monotonic(self) -> float:
        return self.now

    def sched_yield(self) -> None:
        self.looks += 1

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
    clock.now += WINDOW_S / 2
    assert await clock.looks_now()
    clock.now += WINDOW_S
    assert not await clock.looks_now()


async def test_it_sleeps_where_steps_take_long(clock: Clock) -> None:
    poll = BusyPoll()
    for wait_s, looks_next in ((10 * WINDOW_S, False), (WINDOW_S / 2, True)):
        poll.begin()
        clock.now += wait_s
        poll.end()
        poll.begin()
        assert await clock.looks_now() == looks_next


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
