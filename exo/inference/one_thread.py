"""A thread that runs calls one after the other.

What ThreadPoolExecutor(1) does, with half the time between a call and its result: a step's
arithmetic may take a millisecond, and every step goes through here.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from exo.errors import EngineFailed
from exo.tasks import tell

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class OneThread:
    """Started with the first call; ends after `close` with the call it is in."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, call: Callable[[], None]) -> None:
        """Run `call`, which tells its outcome itself and raises nothing.

        Raises:
            EngineFailed: the thread is closed.
        """
        self.check_open()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name)
            self._thread.start()
        self._calls.put(call)

    def submit(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        """What `call` will return or raise. If it is cancelled before its turn, it is skipped.

        Raises:
            EngineFailed: the thread is closed; from the future: before the call's turn came.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self.post(partial(self._run, call, future, loop))
        return future

    def check_open(self) -> None:
        """Raises EngineFailed if it is not."""
        if self._closed:
            raise EngineFailed(f"{self._name} is closed")

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Refuse what waits and what comes; if the thread was started, it runs `last` and ends."""
        self._closed = True
        if last is not None:
            self._calls.put(last)
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:
                # The thread is the engine's only one.
                logger.exception("%s: a call that must not raise", self._name)
            # Not kept until the next call comes: it may hold something large.
            del call

    def _run(
        self,
        call: Callable[[], Result],
        future: asyncio.Future[Result],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        if future.cancelled():
            return
        result, error = None, None
        try:
            self.check_open()
            result = call()
        except BaseException as raised:  # noqa: BLE001  (it is the caller's)
            error = raised
        tell(loop, _settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
