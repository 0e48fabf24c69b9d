"""Markdown in the terminal: what is printed is what the whole text would be, however it came."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown

from exo.cli.run.markdown import split_finished

TEXT = """# A title

Some *text* that goes on
over two lines.

- one
- two

  still two

1. first

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

> said

The end."""


def shown(*blocks: str) -> str:
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    for index, block in enumerate(blocks):
        if index:
            console.print()
        console.print(Markdown(block))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@given(st.lists(st.integers(1, len(TEXT) - 1)))
def test_blocks_are_finished_once_and_nothing_is_lost(cuts: list[int]) -> None:
    places = [0, *sorted(set(cuts)), len(TEXT)]
    finished, rest = [], ""
    for begin, end in itertools.pairwise(places):
        done, rest = split_finished(rest + TEXT[begin:end])
        if done.strip():
            finished.append(done)
    assert "".join([*finished, rest]) == TEXT
    assert shown(*finished, rest).split() == shown(TEXT).split()


@pytest.mark.parametrize("text", ["", "word", "```\nx = 1\n\n\n", "- a\n\n- b", "a | b\n"])
def test_what_may_go_on_stays_open(text: str) -> None:
    assert split_finished(text) == ("", text)
