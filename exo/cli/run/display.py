"""How an answer is shown as it comes: as it is in a pipe, as one JSON object for programs (as
Markdown in a terminal: markdown.py).

What is not the answer (what is waited for, thoughts, numbers) goes to stderr.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, Protocol

from exo.cli.run.answer import Answer
from exo.errors import ExoError


class Display(Protocol):
    """Told of one answer at a time."""

    def waiting(self, what: str) -> None: ...

    def thought(self, piece: str) -> None: ...

    def text(self, piece: str) -> None: ...

    def done(self, answer: Answer) -> None:
        """It is over, whole or as far as it came."""

    def failed(self, error: ExoError) -> None: ...


class Plain:
    """The text as it comes."""

    def __init__(self) -> None:
        self.line = _StatusLine()

    def waiting(self, what: str) -> None:
        self.line.show(what)

    def thought(self, piece: str) -> None:
        self.line.clear()
        say(_dim(piece))

    def text(self, piece: str) -> None:
        self.line.clear()
        print(piece, end="", flush=True)  # noqa: T201

    def done(self, answer: Answer) -> None:
        self.line.clear()
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)  # noqa: T201
        say(answer.numbers())

    def failed(self, error: ExoError) -> None:
        self.line.clear()
        say(f"exo: {error.message}\n")


class Json(Plain):
    """Nothing but one object on stdout, also of a failure."""

    def text(self, piece: str) -> None:
        self.line.clear()

    def thought(self, piece: str) -> None:
        self.line.clear()

    def done(self, answer: Answer) -> None:
        self.line.clear()
        self._print(answer.as_json())

    def failed(self, error: ExoError) -> None:
        self.line.clear()
        self._print({"error": {"code": error.code, "message": error.message}})

    def _print(self, value: dict[str, Any]) -> None:
        print(json.dumps(value, ensure_ascii=False), flush=True)  # noqa: T201


def say(text: str) -> None:
    """To the person, not into what is piped on."""
    sys.stderr.write(text)
    sys.stderr.flush()


class _StatusLine:
    """One line on stderr that is drawn over: what the answer waits for, with a bar."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        if not sys.stderr.isatty():
            if text != self._shown:
                say(text + "\n")
        else:
            percent = re.search(r" (\d+)%", text)
            bar = ""
            if percent:
                done = int(percent[1]) * 30 // 100
                bar = f" {'━' * done}{'╌' * (30 - done)}"
            say(f"\r\033[2K{text}{bar}")
        self._shown = text

    def clear(self) -> None:
        if self._shown and sys.stderr.isatty():
            say("\r\033[2K")
        self._shown = ""


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text
