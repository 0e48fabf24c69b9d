"""Every language of tinychat has all that the page says, and nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

TINYCHAT = Path(__file__).parents[3] / "tinychat"
LANGUAGES = sorted((TINYCHAT / "languages").glob("*.json"))

_CALL = re.compile(r"""\bt\(\s*(?:"([^"]+)"|'([^']+)')""")
_HOLE = re.compile(r"\{(\w+)\}")
_SAME = {"exo", "tinychat · exo"}  # names
_SIGNS = re.compile(r"[\W_]*")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: set[str] = set()

    def handle_data(self, data: str) -> None:
        self.words.add(data.strip())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {"aria-label", "placeholder", "title"}
        self.words |= {value for name, value in attrs if name in said and value}


def english() -> set[str]:
    """What modules give to `t`, and what stands in the page."""
    page = _Page()
    page.feed((TINYCHAT / "index.html").read_text("utf-8"))
    words = {word for word in page.words if not _SIGNS.fullmatch(word)} - _SAME
    for module in TINYCHAT.glob("*.js"):
        words |= {a or b for a, b in _CALL.findall(module.read_text("utf-8"))}
    return words


@pytest.mark.parametrize("file", LANGUAGES, ids=lambda file: file.stem)
def test_a_language_has_all_words_and_their_facts(file: Path) -> None:
    words: dict[str, str] = json.loads(file.read_text("utf-8"))
    assert sorted(words) == sorted(english())
    for key, value in words.items():
        assert value.strip()
        assert sorted(_HOLE.findall(value)) == sorted(_HOLE.findall(key)), key


def test_the_page_offers_the_languages_that_are_there() -> None:
    source = (TINYCHAT / "words.js").read_text("utf-8")
    found = re.search(r"const LANGUAGES = (\[.*\]);", source)
    assert found and json.loads(found[1]) == [file.stem for file in LANGUAGES]
