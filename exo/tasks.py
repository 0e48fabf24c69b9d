"""Owned asynchronous work: tasks whose death is seen, iterators that are never silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from exo.errors import ExoError

Item = TypeVar("Item")
News = TypeVar("News")
Pulse = TypeVar("Pulse")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

AGAIN_S, SELDOM_S = 0.5, 60.0
"""Until what died begins again: twice as long each time, unless it lived that long meanwhile."""


class TaskOwner:
    """Starts tasks, logs any that die of an exception, and cancels the rest on `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    def background(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` until it ends or this owner closes; an exception in it is logged as an error.

        Work that must tell somebody of its failure does so itself: this is the last net.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def forever(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None]:
        """As `background`, of work that is never done and compares what is with what should be:
        whatever it dies of, such as files that the system has no more of, it begins again."""
        return self.background(self._again_and_again(work, name), name)

    async def _again_and_again(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> None:
        pause_s, loop = AGAIN_S, asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                return await work()
            except Exception:
                logger.exception("task %s:%s died and begins again", self._name, name)
            if loop.time() - began > SELDOM_S:
                pause_s = AGAIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, SELDOM_S)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ExoError):  # says by itself what is wrong
            logger.warning("task %s: %s", task.get_name(), error.message)
        else:
            logger.error("task %s died", task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def on_own_thread(call: Callable[..., Item], *args: Any) -> Item:
    """The result of a call that may take long or wait for others, from a thread of its own.

    The event loop's pool has few places (5 on one core), and calls that hold one while they wait
    for what another call brings wait for ever once they hold all of them: `asyncio.to_thread` is
    for what ends by itself.
    """
    threads = ThreadPoolExecutor(1, getattr(call, "__name__", "call"))
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, call, *args)
    finally:
        threads.shutdown(wait=False)


def tell(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: Any) -> None:
    """Have a loop call it, from any thread. If the loop is closed nobody waits for it any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


async def merged(
    sources: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """What several iterators give, as it comes, with the number of the one it is from. The first
    that fails ends all."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    upcoming = {asyncio.ensure_future(anext(source)): i for i, source in enumerate(sources)}
    try:
        while upcoming:
            done, _ = await asyncio.wait(upcoming, return_when=asyncio.FIRST_COMPLETED)
            for one in sorted(done, key=upcoming.__getitem__):
                number = upcoming.pop(one)
                try:
                    item = one.result()
                except StopAsyncIteration:
                    continue
                upcoming[asyncio.ensure_future(anext(sources[number]))] = number
                yield number, item
    finally:
        for one in upcoming:
            one.cancel()
        await asyncio.gather(*upcoming, return_exceptions=True)
        for source in sources:
            await source.aclose()


@dataclass(frozen=True)
class Done(Generic[Result]):
    value: Result


async def with_news(
    work: Callable[[Callable[[News], None]], Awaitable[Result]],
) -> AsyncGenerator[News | Done[Result], None]:
    """What `work` tells of itself, on any thread, and its result as the last. Raises what it
    raises; who stops listening cancels it."""
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[News | None] = asyncio.Queue()
    task = asyncio.ensure_future(work(lambda news: tell(loop, told.put_nowait, news)))
    task.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (news := await told.get()) is not None:
            yield news
        yield Done(task.result())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def with_pulse(
    events: AsyncIterator[Item], pulse: Pulse, interval_s: float
) -> AsyncGenerator[Item | Pulse, None]:
    """`events`, and `pulse` whenever the next one takes longer than `interval_s`."""
    upcoming = asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait([upcoming], timeout=interval_s)
            if not upcoming.done():
                yield pulse
                continue
            try:
                event = upcoming.result()
            except StopAsyncIteration:
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events))
    finally:
        upcoming.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, ExoError):
            await upcoming
        if isinstance(events, AsyncGenerator):
            await events.aclose()
