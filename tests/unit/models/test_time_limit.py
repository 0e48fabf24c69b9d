"""What takes too long is ended, wherever it is."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref

import pytest

from exo.models.time_limit import within


class Thing:
    pass


def test_a_result_and_an_error_are_the_calls() -> None:
    assert within(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)


def test_no_except_of_its_own_stops_it() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                while True:
                    time.sleep(0)

    with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
        within(0.05, stubborn)
    assert not [t for t in threading.enumerate() if t.name == "time-limit"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_where_python_ignores_it_it_is_raised_again() -> None:
    deaf_until = time.monotonic() + 0.3

    def deaf(reference: weakref.ref[Thing]) -> None:
        while time.monotonic() < deaf_until:
            time.sleep(0)

    def call() -> None:
        thing = Thing()
        reference = weakref.ref(thing, deaf)
        del thing  # calls it; what is raised there is not seen by anybody
        assert reference() is None
        while True:
            time.sleep(0)

    with pytest.raises(TimeoutError):
        within(0.05, call)
