"""A thread that runs calls one after the other for an event loop.

What ThreadPoolExecutor(1) does, with half the time between a call and its result: a step's
arithmetic may take a millisecond, and every step goes through here.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from exo.errors import EngineFailed

Result = TypeVar("Result")
_Call = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class OneThread:
    """Started with the first call; ends after `close` with the call it is in."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        """What `call` will return or raise. If it is cancelled before its turn, it is skipped.

        Raises:
            EngineFailed: the thread is closed; from the future: before the call's turn came.
        """
        if self._closed:
            raise EngineFailed(f"{self._name} is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._calls.put((call, future, loop))
        return future

    def close(self) -> None:
        """Refuse what waits and what comes."""
        self._closed = True
        self._calls.put(None)

    def _serve(self) -> None:
        while (job := self._calls.get()) is not None:
            call, future, loop = job
            if future.cancelled():
                continue
            result, error = None, None
            try:
                if self._closed:
                    raise EngineFailed(f"{self._name} was closed")
                result = call()
            except BaseException as raised:  # noqa: BLE001  (it is the caller's)
                error = raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                # The loop is closed: nobody waits for this any more.
                return
            # Not kept until the next call comes: a result may be large.
            del job, call, future, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
