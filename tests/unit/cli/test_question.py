"""What `exo run` asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exo.cli.run import question
from exo.errors import InvalidRequest


def test_a_pipe_that_nobody_writes_to_is_not_waited_for_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr("exo.cli.run.question._SAY_S", 0.01)
    monkeypatch.setattr("exo.cli.run.question._WAIT_S", 0.02)
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w"):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(InvalidRequest, match="nothing was piped in"):
            question.asked("review", [])
    assert "waiting for what is piped in" in capsys.readouterr().err


def test_a_fence_does_not_end_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("```\ncode\n```\n", "utf-8-sig")
    assert question.attached(tmp_path / "a.md") == "a.md:\n~~~~\n```\ncode\n```\n~~~~"


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"a" * (question.LARGEST_FILE + 1))
    with pytest.raises(InvalidRequest, match="larger than 512 KB"):
        question.attached(tmp_path / "large")
