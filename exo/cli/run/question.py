"""What `exo run` asks: the prompt with what was piped in and the files that go with it."""

from __future__ import annotations

import select
import sys
from pathlib import Path
from typing import BinaryIO

from exo.errors import InvalidRequest

_SAY_S, _WAIT_S = 10.0, 60.0
"""For the first byte: a pipe nobody writes to, as services have it, looks like a slow one."""

LARGEST_FILE = 512 << 10
"""Bytes of text, as in tinychat."""


def asked(prompt: str | None, files: list[Path]) -> str | None:
    """The one question of this command, or None where a conversation is wanted.

    Raises:
        InvalidRequest: a file or stdin cannot be read, or nothing is asked.
    """
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _of_stdin()
    if prompt is None and not piped.strip():
        if sys.stdin is None or not sys.stdin.isatty():
            raise InvalidRequest("nothing is asked: stdin is empty, and there is no --prompt")
        return None
    parts = [part for part in (prompt, piped.rstrip()) if part]
    return "\n\n".join([*parts, *map(attached, files)])


def attached(path: Path) -> str:
    """A text file as part of a question, as tinychat writes it.

    Raises:
        InvalidRequest: it cannot be read, is too large or is no text.
    """
    try:
        with path.expanduser().open("rb") as file:
            text = _text(file, str(path))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    return f"{path.name}:\n{_fenced(text)}"


def _of_stdin() -> str:
    if not select.select([sys.stdin], [], [], _SAY_S)[0]:
        sys.stderr.write("exo: waiting for what is piped in (</dev/null if nothing is)\n")
        if not select.select([sys.stdin], [], [], _WAIT_S - _SAY_S)[0]:
            raise InvalidRequest(
                f"nothing was piped in for {_WAIT_S:.0f} s; if nothing is to be, add </dev/null"
            )
    return _text(sys.stdin.buffer, "stdin")


def _text(file: BinaryIO, name: str) -> str:
    data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise InvalidRequest(f"{name} is larger than {LARGEST_FILE >> 10} KB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is no UTF-8 text: {error.reason}") from error
    if "\0" in text:
        raise InvalidRequest(f"{name} is no text")
    return text


def _fenced(text: str) -> str:
    fence = "~~~~" if "```" in text else "```"
    return f"{fence}\n{text.rstrip()}\n{fence}"
