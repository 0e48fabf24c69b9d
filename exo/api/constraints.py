"""What an answer is held to, from what the request asks and how the model writes."""

from __future__ import annotations

from exo.api.prompts import Prompt
from exo.api.request import ChatRequest
from exo.errors import InvalidRequest
from exo.inference.sampling import Constraint
from exo.models.markup.markup import answer_grammar
from exo.models.tokenizer import Tokenizer


def constraint_of(tokenizer: Tokenizer, request: ChatRequest, prompt: Prompt) -> Constraint | None:
    """None where nothing holds it.

    Raises:
        InvalidRequest: the grammar cannot be held to, or the model's thoughts cannot be limited.
    """
    if not isinstance(request.prompt, list) or request.continues:
        return _checked(tokenizer, request.grammar)
    markup, budget = tokenizer.markup, request.thinking.budget
    grammar = answer_grammar(markup, request.tools, request.tool_choice, request.grammar)
    if markup.thinking is None or (request.thinking.wanted is False and not prompt.thinks):
        if budget is not None and markup.harmony:
            raise InvalidRequest(
                "the thoughts of this model cannot be limited to a number of tokens; use "
                "reasoning_effort",
                param="max_reasoning_tokens",
            )
        return _checked(tokenizer, grammar)
    if grammar is None and budget is None:
        return None
    opens, closes = (tokenizer.encode_rendered(text) for text in markup.thinking)
    if not prompt.thinks and len(opens) != 1:
        return _checked(tokenizer, grammar)  # it cannot be told when it begins to think
    checked = _checked(tokenizer, grammar)
    return Constraint(
        checked.grammar if checked is not None else "",
        thinks=prompt.thinks,
        opening=-1 if prompt.thinks else opens[0],
        closing=tuple(closes),
        budget=-1 if budget is None else budget,
    )


def _checked(tokenizer: Tokenizer, grammar: str | None) -> Constraint | None:
    if grammar is None:
        return None
    tokenizer.vocabulary.check(grammar)
    return Constraint(grammar)
