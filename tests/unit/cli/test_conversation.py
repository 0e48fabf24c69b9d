"""Conversations of `exo run` in files, which tinychat reads and writes too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exo.cli.run.conversation import FORMAT, Conversation
from exo.errors import InvalidRequest


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    one = Conversation("m", "Be brief.")
    one.ask("Why?" + " really" * 20)
    one.answer("Because.")
    one.save(tmp_path / "one.json")
    other = Conversation("n")
    other.load(tmp_path / "one.json")
    assert (other.messages, other.system, other.model) == (one.messages, one.system, "n")
    assert other.sent[0] == {"role": "system", "content": "Be brief."}


def test_of_an_export_the_branch_that_was_shown_last_is_loaded(tmp_path: Path) -> None:
    messages = {
        "m0": {"id": "m0", "parent": None, "role": "user", "content": "q"},
        "m1": {"id": "m1", "parent": "m0", "role": "assistant", "content": "one"},
        "m2": {"id": "m2", "parent": "m0", "role": "assistant", "content": "other"},
    }
    talks = [{"head": "m2", "messages": messages, "updated": 2}, {"head": None, "updated": 1}]
    (tmp_path / "f").write_text(json.dumps({"format": FORMAT, "conversations": talks}))
    found = Conversation("m")
    found.load(tmp_path / "f")
    assert [message["content"] for message in found.messages] == ["q", "other"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "no JSON"),
        ("[]", "format"),
        ('{"format": "other"}', "format"),
        (f'{{"format": "{FORMAT}", "conversations": []}}', "no whole conversation"),
        (f'{{"format": "{FORMAT}", "conversations": [{{"head": "a"}}]}}', "no whole"),
        (
            f'{{"format": "{FORMAT}", "conversations": [{{"head": "a", "messages": {{"a": '
            '{"role": "user", "content": "", "parent": "a"}}}]}',
            "no whole",
        ),
    ],
)
def test_a_damaged_file_changes_nothing(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    talk = Conversation("m", "s")
    talk.ask("kept")
    with pytest.raises(InvalidRequest, match=said):
        talk.load(tmp_path / "f")
    assert talk.system == "s" and talk.messages[0]["content"] == "kept"
