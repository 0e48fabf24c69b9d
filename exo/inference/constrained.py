"""Sampling under a constraint: a grammar, a limit to thoughts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from exo.errors import InvalidRequest
from exo.inference.sampling import Constraint, SampledToken, SamplingParams, sample
from exo.models.grammar import Follower, Vocabulary
from exo.models.tokenizer import Tokenizer

MAX_FORCED = 32
"""Tokens taken at once because a constraint allows no others; the rest follows in the next step."""


class ConstrainedAnswers:
    """Those under way on one engine's thread."""

    def __init__(self, tokenizer_of: Callable[[str], Tokenizer]) -> None:
        self._tokenizer_of = tokenizer_of
        self._answers: dict[str, ConstrainedAnswer] = {}

    def of(self, sequence_id: str, model_id: str, constraint: Constraint) -> ConstrainedAnswer:
        answer = self._answers.get(sequence_id)
        if answer is None:
            answer = ConstrainedAnswer(constraint, lambda: self._tokenizer_of(model_id).vocabulary)
            self._answers[sequence_id] = answer
        return answer

    def forget(self, sequence_id: str) -> None:
        self._answers.pop(sequence_id, None)


class ConstrainedAnswer:
    """One sequence. What it holds follows from the constraint and the tokens generated so far, so
    it can begin again anywhere."""

    def __init__(self, constraint: Constraint, vocabulary: Callable[[], Vocabulary]) -> None:
        self._constraint = constraint
        self._vocabulary = vocabulary
        self._begin()

    def _begin(self) -> None:
        self._seen: list[int] = []
        self._thinks = self._constraint.thinks
        self._thought = 0
        """Tokens of it."""
        self._follower: Follower | None = None
        self._must_think = False
        """What has come opens thoughts, and begins nothing of the grammar's."""

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        params: SamplingParams,
        history: Sequence[int],
        prompt_length: int,
    ) -> SampledToken:
        """As sampling.sample, of what the constraint allows. Raises what it raises; a constraint
        that cannot be kept is told in the token, as it is nobody else's fault in the step."""
        try:
            self._follow(history[prompt_length:])
            if closing := self._to_close():
                return SampledToken(closing[0], forced=tuple(closing[1:]))
            token = sample(logits, params, history, prompt_length, self._allowed(len(logits)))
            if params.logprobs:  # each token has its own, which only a step tells
                return token
            return SampledToken(token.token_id, forced=self._forced_after(token.token_id))
        except InvalidRequest as error:
            return SampledToken(0, refusal=error.message)

    def _follow(self, generated: Sequence[int]) -> None:
        """Come to where the answer is."""
        if list(generated[: len(self._seen)]) != self._seen:
            self._begin()
        for token_id in generated[len(self._seen) :]:
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        wanted = self._constraint
        may_open = self._may_open()
        self._seen.append(token_id)
        if may_open and tuple(self._seen) == wanted.opening:
            self._thinks, self._follower, self._must_think = True, None, False
        elif not self._thinks:
            if (follower := self._in_grammar()) is None or self._must_think:
                return
            if self._may_open() and not follower.allowed()[token_id]:
                self._must_think = True
            else:
                follower.take(token_id)
        else:
            self._thought += 1
            if tuple(self._seen[-len(wanted.closing) :]) == wanted.closing:
                self._thinks = False

    def _may_open(self) -> bool:
        """Whether what has come is the beginning of what opens thoughts."""
        opening = self._constraint.opening
        return len(self._seen) < len(opening) and tuple(self._seen) == opening[: len(self._seen)]

    def _in_grammar(self) -> Follower | None:
        if self._follower is None and self._constraint.grammar:
            self._follower = Follower(self._vocabulary(), self._constraint.grammar)
        return self._follower

    def _to_close(self) -> tuple[int, ...]:
        """The tokens that end thoughts which have become too long, from where they are at."""
        wanted = self._constraint
        if not self._thinks or wanted.budget < 0 or self._thought < wanted.budget:
            return ()
        for written in range(len(wanted.closing) - 1, 0, -1):
            if tuple(self._seen[-written:]) == wanted.closing[:written]:
                return wanted.closing[written:] + wanted.following
        return wanted.closing + wanted.following

    def _allowed(self, size: int) -> npt.NDArray[np.bool_] | None:
        if self._thinks or (follower := self._in_grammar()) is None:
            return None
        allowed = follower.allowed()
        if self._may_open():
            allowed = np.zeros_like(allowed) if self._must_think else allowed.copy()
            allowed[self._constraint.opening[len(self._seen)]] = True
        return allowed

    def _forced_after(self, token_id: int) -> tuple[int, ...]:
        self._take(token_id)
        if self._thinks or self._follower is None or self._may_open():
            return ()
        forced = self._follower.forced()[:MAX_FORCED]
        for each in forced:
            self._take(each)
        return tuple(forced)
