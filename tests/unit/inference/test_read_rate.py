"""Processes of one machine measure in turns, and tell each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from exo.inference import read_rate
from exo.inference.read_rate import once_a_machine


def never() -> float:
    raise AssertionError("measured again")


def test_what_was_measured_holds_for_its_kind_and_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache" / "rates.json"
    assert once_a_machine(file, "cpu 2", lambda: 2e9) == 2e9
    assert once_a_machine(file, "cpu 1", lambda: 1e9) == 1e9
    assert once_a_machine(file, "cpu 2", never) == 2e9
    monkeypatch.setattr(read_rate, "FRESH_S", 0.0)
    assert once_a_machine(file, "cpu 2", lambda: 3e9) == 3e9


def test_nobody_measures_beside_another(tmp_path: Path) -> None:
    inside = threading.Semaphore(1)

    def measure() -> float:
        assert inside.acquire(blocking=False), "two at once"
        inside.release()
        return 1e9

    with ThreadPoolExecutor(8) as pool:
        kinds = [f"cpu {n}" for n in range(16)]
        found = pool.map(lambda kind: once_a_machine(tmp_path / "rates.json", kind, measure), kinds)
        assert list(found) == [1e9] * 16


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '{"a": ["x", 2]}', "\x00"])
def test_what_cannot_be_read_is_measured(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(text)
    assert once_a_machine(file, "cpu", lambda: 1e9) == 1e9
    assert once_a_machine(file, "cpu", never) == 1e9


def test_who_cannot_write_or_waits_too_long_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert once_a_machine(tmp_path / "file" / "rates.json", "cpu", lambda: 1e9) == 1e9
    monkeypatch.setattr(read_rate, "TURN_S", 0.01)
    with FileLock(tmp_path / "rates.json.lock"):
        assert once_a_machine(tmp_path / "rates.json", "cpu", lambda: 2e9) == 2e9
