from __future__ import annotations

import time

import pytest

from exo.networking.discovery.base import Route
from exo.orchestration.membership.peer import ROUTE_LIFETIME_S
from exo.orchestration.membership.strangers import MOST_DISTRUSTED, Strangers
from exo.tasks import TaskOwner


def nothing(*args: object) -> None:
    raise AssertionError("nobody is asked")


def test_who_is_not_trusted_is_told_of_for_as_long_as_it_is_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many there were before, and of a crowd only so many."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    strangers = Strangers(nothing, nothing, nothing, nothing, TaskOwner("test"))  # type: ignore[arg-type]
    for crowd in range(3):
        for _ in range(2):
            for port in range(1, MOST_DISTRUSTED + 9):
                strangers.distrust(f"n{crowd}", Route("10.0.0.9", port), "has another key")
        assert len(strangers.problems()) == MOST_DISTRUSTED
        assert len(caplog.messages) == MOST_DISTRUSTED * (crowd + 1)
        assert all(f"n{crowd} at 10.0.0.9" in why for why in strangers.problems().values())
        now += ROUTE_LIFETIME_S + 1
        assert not strangers.problems()
