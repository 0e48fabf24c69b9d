"""Guesses at what comes next, from what has come before: prompt lookup (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from exo.orchestration.serving.drafts.chance import Chance

NGRAM = 3
"""Tokens at the end that have to have come before for what followed them to be guessed."""

MAX_DRAFTS = 16

_LONGER = (5, 9)
"""Where so many tokens are the same, more of what follows is."""

_PRIORS = (0.4, 0.6, 0.85)
_NEWS = 0.2
"""Of an estimate that what was just seen makes up."""

_HOPE = 0.02
"""So much of the way back to what is believed at first an estimate goes with each guess that was
not tried: text that begins to repeat itself is noticed."""


class PromptLookup:
    """Guesses for one sequence. `tokens` is read and may grow."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._after: dict[tuple[int, ...], int] = {}  # where a gram's latest occurrence ended
        self._indexed = 0
        # By the length of what is the same.
        self._chances = [Chance(prior, _NEWS, _HOPE) for prior in _PRIORS]
        self._kind = 0

    def draft(self, worth: float, limit: int) -> list[int]:
        """What may come next: guesses whose chance to be right, all before them being right, is at
        least `worth`, and no more than `limit`."""
        tokens = self._tokens
        size = len(tokens)
        for at in range(self._indexed, size - NGRAM):
            self._after[tuple(tokens[at : at + NGRAM])] = at + NGRAM
        self._indexed = max(self._indexed, size - NGRAM)
        start = self._after.get(tuple(tokens[-NGRAM:])) if size > NGRAM else None
        if start is None:
            return []
        same = NGRAM
        while same < _LONGER[-1] and same < start and tokens[start - 1 - same] == tokens[-1 - same]:
            same += 1
        self._kind = sum(same >= longer for longer in _LONGER)
        chance = self._chances[self._kind].value
        count = 0 if chance < worth else int(math.log(worth) / math.log(min(chance, 0.99)))
        if count < 1:
            self._chances[self._kind].not_tried()
            return []
        guessed: list[int] = []
        for i in range(min(count, limit, MAX_DRAFTS)):
            # Beyond the end what is guessed goes on by itself: a loop goes around.
            guessed.append(tokens[start + i] if start + i < size else guessed[start + i - size])
        return guessed

    def verified(self, right: int, drafted: int) -> None:
        """So many of the guesses made last were right."""
        self._chances[self._kind].verified(right, drafted)
