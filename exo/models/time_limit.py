"""A limit to the time that Python code of somebody else's may take."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class _Over(BaseException):
    """Raised in the midst of the code: no `except Exception` of its own stops it."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """The result of a call, on this thread. Not for the main thread.

    Raises:
        TimeoutError: it took longer. A call into C is waited for.
    """
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock, done = threading.Lock(), False

    def stop() -> None:
        with lock:
            if not done:
                raise_in(thread, ctypes.py_object(_Over))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        try:
            return call()
        finally:
            with lock:
                done = True
                raise_in(thread, None)  # one that is on its way hits nobody else
            timer.cancel()
    except _Over:
        raise TimeoutError(f"it took longer than {seconds} s") from None
