"""Sampling under a constraint: the grammar's tokens only, and thoughts that end in time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from exo.inference.constrained import ConstrainedAnswer
from exo.inference.sampling import Constraint, SampledToken, SamplingParams
from exo.models import grammar
from exo.models.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
PROMPT = [256, 104, 105]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
GREEDY = SamplingParams(temperature=0)


def answer(constraint: Constraint) -> ConstrainedAnswer:
    return ConstrainedAnswer(constraint, lambda: TOKENIZER.vocabulary)


def logits(position: int, seed: int = 0) -> np.ndarray:
    """A model without sense, the same at the same place. (Digits end soon: 7 is rare.)"""
    found = np.random.default_rng((seed, position)).normal(size=300).astype(np.float32)
    found[48:58] -= 5
    return found


def generate(
    held: ConstrainedAnswer, params: SamplingParams = GREEDY, limit: int = 200, seed: int = 0
) -> list[SampledToken]:
    history, tokens = list(PROMPT), []
    while len(history) < limit:
        token = held.sample(logits(len(history), seed), params, history, len(PROMPT))
        assert not token.refusal
        tokens.append(token)
        if token.token_id == 257:
            break
        history += [token.token_id, *token.forced]
    return tokens


def text_of(tokens: list[SampledToken]) -> str:
    ids = [i for token in tokens for i in (token.token_id, *token.forced)]
    return TOKENIZER.decode(ids)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(top_p=0.5)])
def test_every_answer_follows_the_schema(params: SamplingParams) -> None:
    for seed in range(20):
        held = answer(Constraint(grammar.of_json_schema(SCHEMA)))
        found = json.loads(text_of(generate(held, params, seed=seed)))
        assert len(found["name"]) <= 4 and isinstance(found["age"], int)


def test_forced_tokens_are_those_that_single_steps_choose() -> None:
    constraint = Constraint(grammar.of_json_schema(SCHEMA))
    forced = generate(answer(constraint))
    assert any(token.forced for token in forced)
    history, ids = list(PROMPT), [i for t in forced for i in (t.token_id, *t.forced)]
    for token_id in ids:  # each step by a state made anew from what is there
        token = answer(constraint).sample(logits(len(history)), GREEDY, history, len(PROMPT))
        assert token.token_id == token_id
        history.append(token_id)


def test_with_logprobs_every_token_is_computed() -> None:
    constraint = Constraint(grammar.of_json_schema(SCHEMA))
    tokens = generate(answer(constraint), SamplingParams(temperature=0, logprobs=True))
    assert not any(token.forced for token in tokens)
    assert text_of(tokens) == text_of(generate(answer(constraint)))
    assert all(token.logprob < 0 for token in tokens)


def test_it_can_be_cut_back_and_begin_again() -> None:
    held = answer(Constraint(grammar.of_json_schema(SCHEMA)))
    first = generate(held)
    assert text_of(generate(held)) == text_of(first)


CLOSING = tuple(b"</think>")


def test_the_grammar_waits_for_the_end_of_thoughts() -> None:
    held = answer(Constraint(grammar.of_choices(["yes"]), thinks=True, closing=CLOSING))
    free = held.sample(logits(3), GREEDY, PROMPT, 3)
    assert free.token_id == int(logits(3).argmax())
    after = held.sample(logits(9), GREEDY, [*PROMPT, *b"hm", *CLOSING], 3)
    assert bytes([after.token_id, *after.forced]) == b"yes"


def test_thoughts_that_are_too_long_are_closed() -> None:
    held = answer(Constraint(thinks=True, closing=CLOSING, budget=4))
    history = [*PROMPT, *b"hmmm"]
    token = held.sample(logits(9), GREEDY, history, 3)
    assert (token.token_id, *token.forced) == CLOSING
    begun = [*PROMPT, *b"hm</"]  # already at it
    token = held.sample(logits(9), GREEDY, begun, 3)
    assert (token.token_id, *token.forced) == CLOSING[2:]
    free = held.sample(logits(20), GREEDY, [*history, *CLOSING, *b"so"], 3)
    assert free.token_id == int(logits(20).argmax())


def test_a_first_token_may_open_a_thought() -> None:
    constraint = Constraint(grammar.of_choices(["yes"]), opening=(33,), closing=(34,))
    likes_it = logits(3)
    likes_it[33] = 99
    assert answer(constraint).sample(likes_it, GREEDY, PROMPT, 3).token_id == 33
    assert answer(constraint).sample(likes_it, GREEDY, [*PROMPT, 121], 3).token_id == 101
    inside = answer(constraint).sample(likes_it, GREEDY, [*PROMPT, 33], 3)
    assert inside.token_id == 33


def test_several_tokens_may_open_a_thought() -> None:
    """As in gpt-oss's channels, of which one is for thoughts."""
    said = Constraint(
        grammar.of_choices(["<a>yes"]), opening=tuple(b"<b>"), closing=tuple(b"</b>"), budget=2
    )
    history = list(PROMPT)
    for letter in b"<b>hm":
        likes = logits(3)
        likes[letter] = 99
        token = answer(said).sample(likes, GREEDY, history, 3)
        assert (token.token_id, token.forced) == (letter, ()), bytes(history[3:])
        history.append(letter)
    token = answer(said).sample(logits(3), GREEDY, history, 3)
    assert bytes([token.token_id, *token.forced]) == b"</b>"
    token = answer(said).sample(logits(3), GREEDY, [*history, *b"</b>"], 3)
    assert bytes([token.token_id, *token.forced]) == b"<a>yes"
    likes[ord("a")] = 100  # the other channel
    token = answer(said).sample(likes, GREEDY, [*PROMPT, *b"<"], 3)
    assert bytes([token.token_id, *token.forced]) == b"a>yes"
    # Neither: what began as none of the grammar's goes on to be a thought.
    stray = Constraint(grammar.of_choices(["yes"]), opening=tuple(b"<b>"), closing=(34,))
    assert answer(stray).sample(likes, GREEDY, [*PROMPT, *b"<"], 3).token_id == ord("b")


def test_what_follows_thoughts_is_written_too() -> None:
    held = Constraint(
        opening=tuple(b"<b>"), closing=tuple(b"</b>"), budget=1, following=tuple(b"<a>")
    )
    token = answer(held).sample(logits(3), GREEDY, [*PROMPT, *b"<b>h"], 3)
    assert bytes([token.token_id, *token.forced]) == b"</b><a>"
    free = answer(held).sample(logits(3), GREEDY, [*PROMPT, *b"<a>h"], 3)
    assert free.token_id == int(logits(3).argmax())


def test_a_grammar_that_fails_is_told_in_the_token() -> None:
    token = answer(Constraint("start: nobody")).sample(logits(3), GREEDY, PROMPT, 3)
    assert "nobody" in token.refusal
