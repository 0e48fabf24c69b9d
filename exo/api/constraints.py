"""What an answer is held to, from what the request asks and how the model writes."""

from __future__ import annotations

from exo.api.prompts import Prompt
from exo.api.request import ChatRequest
from exo.inference.sampling import Constraint
from exo.models.markup.markup import (
    HARMONY_AGAIN,
    HARMONY_END,
    HARMONY_FINAL,
    HARMONY_THOUGHT,
    answer_grammar,
)
from exo.models.tokenizer import Tokenizer


def constraint_of(tokenizer: Tokenizer, request: ChatRequest, prompt: Prompt) -> Constraint | None:
    """None where nothing holds it.

    Raises:
        InvalidRequest: the grammar cannot be held to.
    """
    is_chat = isinstance(request.prompt, list) and not request.continues
    markup, budget = tokenizer.markup, request.thinking.budget
    limit = -1 if budget is None else budget
    limits_channels = is_chat and markup.harmony and limit >= 0
    grammar = request.grammar
    if is_chat:
        grammar = answer_grammar(
            markup, request.tools, request.tool_choice, grammar, after_thoughts=limits_channels
        )
    if grammar is not None:
        tokenizer.vocabulary.check(grammar)
    held = Constraint(grammar) if grammar is not None else None

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode_rendered(text))

    if limits_channels:
        return Constraint(
            grammar or "",
            opening=tokens(HARMONY_THOUGHT),
            closing=tokens(HARMONY_END),
            budget=limit,
            # A grammar says itself what comes then: the final message, or a call.
            following=() if grammar else tokens(HARMONY_AGAIN + HARMONY_FINAL),
        )
    may_think = prompt.thinks or request.thinking.wanted is not False
    if not is_chat or markup.thinking is None or not may_think or (not held and budget is None):
        return held
    opens, closes = map(tokens, markup.thinking)
    if not prompt.thinks and len(opens) != 1:
        return held  # a text that a tool's or a schema's grammar may begin with as well
    return Constraint(
        grammar or "",
        thinks=prompt.thinks,
        opening=() if prompt.thinks else opens,
        closing=closes,
        budget=limit,
    )
