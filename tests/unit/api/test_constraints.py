"""What an answer is held to, by how the model writes."""

from __future__ import annotations

import numpy as np

from exo.api.constraints import constraint_of
from exo.api.prompts import Prompt
from exo.api.request import ChatRequest, Thinking
from exo.inference.constrained import ConstrainedAnswer
from exo.inference.sampling import Constraint, SamplingParams
from exo.models.grammar import of_choices
from exo.models.markup.markup import markup_of
from exo.models.tokenizer import ByteTokenizer


class GptOss(ByteTokenizer):
    """Its channels over bytes."""

    markup = markup_of("{{ tools }} <|channel|> <|message|>", {}, {})


def held(budget: int | None, grammar: str | None = None) -> Constraint | None:
    messages = [{"role": "user", "content": "hello"}]
    request = ChatRequest(
        "m", messages, SamplingParams(), grammar=grammar, thinking=Thinking(budget=budget)
    )
    return constraint_of(GptOss(), request, Prompt((1,)))


def test_thoughts_in_channels_have_a_budget() -> None:
    tokenizer = GptOss()

    def next_text(constraint: Constraint, said: str) -> str:
        logits = np.zeros(258, np.float32)
        logits[ord("m")] = 1
        answer = ConstrainedAnswer(constraint, lambda: tokenizer.vocabulary)
        history = [1, *said.encode()]
        token = answer.sample(logits, SamplingParams(temperature=0), history, 1)
        assert not token.refusal
        return tokenizer.decode([token.token_id, *token.forced])

    assert held(None) is None
    free = held(3)
    assert free is not None
    thought = "<|channel|>analysis<|message|>"
    assert next_text(free, thought + "hm") == "m"
    ended = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert next_text(free, thought + "hmm") == ended
    assert next_text(free, thought + "hmm" + ended + "so") == "m"
    assert next_text(free, "<|channel|>final<|message|>hello") == "m"  # it did not think
    schema = held(3, of_choices(["yes"]))
    assert schema is not None
    assert next_text(schema, thought + "hmm") == "<|end|>"
    assert next_text(schema, thought + "hmm<|end|><|start|>assistant") == ended[25:] + "yes"
