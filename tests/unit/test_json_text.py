"""JSON that others wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from exo import json_text

MAX = json_text.MAX_DEPTH


def nested(depth: int, opens: str, closes: str) -> str:
    return opens * depth + "1" + closes * depth


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a": ', "}")])
def test_what_is_nested_too_deep_is_no_json(opens: str, closes: str) -> None:
    assert json_text.parsed(nested(MAX, opens, closes))
    for depth in (MAX + 1, 600, 990, 100_000):  # in the middle Python reads what nothing walks
        with pytest.raises(ValueError, match="deeper than"):
            json_text.parsed(nested(depth, opens, closes))


def test_depth_is_that_of_one_branch() -> None:
    beside = "[" + ", ".join([nested(MAX - 1, "[", "]")] * 50) + "]"
    assert len(json_text.parsed(beside)) == 50


def test_an_object_is_asked_for(tmp_path: Path) -> None:
    for text in ("[]", "1", '"a"', "null", "", "{", "\xff"):
        with pytest.raises(ValueError):
            json_text.parsed_object(text.encode("latin-1"))
    file = tmp_path / "of_notepad.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}')
    assert json_text.object_in(file) == {"a": 1}
