"""The dummy engine's answers by heart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exo.errors import InvalidRequest
from exo.inference.dummy.script import END_OF_TEXT, Script


def told(script: Script, prompt: str, sequence_id: str = "s") -> str:
    tokens = [*prompt.encode()]
    begins = len(tokens)
    while (token := script.next_token(sequence_id, tokens)) not in (None, END_OF_TEXT):
        assert token is not None
        tokens.append(token)
    return bytes(tokens[begins:]).decode()


def test_the_first_that_fits_is_said(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    lines = [{"after": "a (\\w+) ball.*found", "say": "\\1!"}, {"after": "ball", "say": "ä"}]
    file.write_text(json.dumps(lines))
    script = Script.read(str(file))
    assert told(script, "a red ball\nfound", "1") == "red!"
    assert told(script, "a ball", "2") == "ä"
    assert script.next_token("3", [*b"hello"]) is None
    assert told(script, "found another ball", "2") == ""  # its answer has ended
    script.forget(["2"])
    assert told(script, "found another ball", "2") == "ä"


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text('[{"after": "("}]')
    for name in (str(file), str(tmp_path / "none")):
        with pytest.raises(InvalidRequest, match=r"the script .* cannot be read"):
            Script.read(name)
    assert Script.read("").next_token("s", [1]) is None
