"""A limit to the time that Python code of somebody else's may take."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

AGAIN_S = 0.1
"""Python ignores an exception that is raised in a weak reference's callback or a finalizer: then it
is raised again."""


class _Over(SystemExit):
    """Raised in the midst of the code: no `except Exception` of its own stops it."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """The result of a call, made on a thread of its own, which alone can be hit by what ends it.

    Raises:
        TimeoutError: it took longer. A call into C is waited for.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="time-limit", daemon=True)
    thread.start()
    thread.join(seconds)
    while thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_Over)
        )
        thread.join(AGAIN_S)
    if results:
        return results[0]
    if errors and not isinstance(errors[0], _Over):
        raise errors[0]
    raise TimeoutError(f"it took longer than {seconds} s") from None
