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
    is_chat = isinstance(request.prompt, list) and not request.continues
    markup, budget = tokenizer.markup, request.thinking.budget
    grammar = request.grammar
    if is_chat:
        grammar = answer_grammar(markup, request.tools, request.tool_choice, grammar)
    if grammar is not None:
        tokenizer.vocabulary.check(grammar)
    held = Constraint(grammar) if grammar is not None else None
    if not is_chat:
        return held
    if markup.harmony and budget is not None:
        raise InvalidRequest(
            "the thoughts of this model cannot be limited to a number of tokens; use "
            "reasoning_effort",
            param="max_reasoning_tokens",
        )
    may_think = prompt.thinks or request.thinking.wanted is not False
    if markup.thinking is None or not may_think or (held is None and budget is None):
        return held
    opens, closes = (tokenizer.encode_rendered(text) for text in markup.thinking)
    if not prompt.thinks and len(opens) != 1:
        return held  # it cannot be told when it begins to think
    return Constraint(
        grammar or "",
        thinks=prompt.thinks,
        opening=-1 if prompt.thinks else opens[0],
        closing=tuple(closes),
        budget=-1 if budget is None else budget,
    )
