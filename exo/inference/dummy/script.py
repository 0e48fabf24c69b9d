"""Answers by heart, for programs that only go on when a model says the right thing: agents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from exo import json_text
from exo.errors import InvalidRequest

END_OF_TEXT = 257


class Script:
    """Whoever asks something that the regular expression `after` is found in, is told `say`, where
    `\\1` is its first group; the first of those that fit. Anybody else gets letters."""

    def __init__(self, lines: Sequence[tuple[str, str]]) -> None:
        self._lines = [(re.compile(after, re.DOTALL), say) for after, say in lines]
        self._answers: dict[str, tuple[int, bytes] | None] = {}  # by sequence; where it begins

    @classmethod
    def read(cls, file: str) -> Script:
        """A JSON list of {"after", "say"}; of no file an empty one.

        Raises:
            InvalidRequest: it is something else.
        """
        if not file:
            return cls([])
        try:
            lines = json_text.parsed(Path(file).read_bytes())
            return cls([(line["after"], line["say"]) for line in lines])
        except (OSError, ValueError, TypeError, KeyError, re.error) as error:
            raise InvalidRequest(f"the script {file} cannot be read: {error!r}") from error

    def next_token(self, sequence_id: str, token_ids: Sequence[int]) -> int | None:
        """The byte of the answer that follows these tokens, which the first time are the prompt;
        None where nothing is known by heart."""
        if not self._lines:
            return None
        if sequence_id not in self._answers:
            self._answers[sequence_id] = self._answer(token_ids)
        answer = self._answers[sequence_id]
        if answer is None:
            return None
        begins, text = answer
        index = len(token_ids) - begins
        return text[index] if index < len(text) else END_OF_TEXT

    def forget(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self._answers.pop(sequence_id, None)

    def _answer(self, token_ids: Sequence[int]) -> tuple[int, bytes] | None:
        prompt = bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")
        for after, say in self._lines:
            if found := after.search(prompt):
                return len(token_ids), found.expand(say).encode()
        return None
