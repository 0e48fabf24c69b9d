"""Work that tells of itself: all of it in order, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable

import pytest

from exo import tasks
from exo.errors import EngineFailed
from exo.tasks import Done, TaskOwner, with_news, with_pulse

Tell = Callable[[str], None]


async def test_news_of_any_thread_come_in_order_and_the_result_is_last() -> None:
    async def work(tell: Tell) -> int:
        tell("begun")
        await asyncio.to_thread(lambda: [tell(str(i)) for i in range(100)])
        return 7

    heard = [news async for news in with_news(work)]
    assert heard == ["begun", *map(str, range(100)), Done(7)]


async def test_a_failure_comes_after_the_news() -> None:
    async def work(tell: Tell) -> int:
        tell("begun")
        raise EngineFailed("broken")

    heard = []
    with pytest.raises(EngineFailed, match="broken"):
        async for news in with_news(work):
            heard.append(news)
    assert heard == ["begun"]


@pytest.mark.parametrize("pulse_s", [0.001, 60])
async def test_who_stops_listening_leaves_nothing_behind(pulse_s: float) -> None:
    cancelled = threading.Event()

    async def work(tell: Tell) -> None:
        tell("begun")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def listen(heard: asyncio.Event) -> None:
        async with contextlib.aclosing(with_pulse(with_news(work), "pulse", pulse_s)) as events:
            async for _ in events:
                heard.set()

    gc.disable()  # it would find what was left
    try:
        before = asyncio.all_tasks()
        heard = asyncio.Event()
        listening = asyncio.ensure_future(listen(heard))
        await heard.wait()
        await asyncio.sleep(0)  # waits for the next
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        assert cancelled.is_set()
        assert asyncio.all_tasks() == before
    finally:
        gc.enable()


async def test_what_is_never_done_begins_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.001)
    owner, began, lives = TaskOwner("t"), 0, asyncio.Event()

    async def work() -> None:
        nonlocal began
        began += 1
        if began < 4:
            raise OSError("no more files")
        lives.set()
        await asyncio.Event().wait()

    task = owner.forever(work, "keep")
    async with asyncio.timeout(10):
        await lives.wait()
    assert began == 4 and caplog.text.count("task t:keep died and begins again") == 3
    await owner.close()
    assert task.cancelled()
