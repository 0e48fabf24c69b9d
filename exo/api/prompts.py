"""From a request to the tokens a model goes on from."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exo.api.request import ChatRequest, Message
from exo.errors import InvalidRequest
from exo.models.markup.tools import Tool
from exo.models.tokenizer import Tokenizer

ANSWER_ROOM = 512
"""Tokens that a truncated conversation leaves for the answer where the request names no number."""


@dataclass(frozen=True)
class Prompt:
    """`thinks` if it ends within a thought that the answer goes on with."""

    tokens: tuple[int, ...]
    thinks: bool = False


def prompt_of(tokenizer: Tokenizer, request: ChatRequest, context: int) -> Prompt:
    """Raises InvalidRequest: the template refuses it, or a token is none of the model's."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return Prompt(tuple(tokenizer.encode(prompt)))
    if isinstance(prompt, tuple):
        return Prompt(_checked(tokenizer, prompt))
    found = _conversation(tokenizer, request, prompt)
    if not request.truncates:
        return found
    limit = context - min(request.max_tokens or ANSWER_ROOM, context // 2)
    if len(found.tokens) <= limit:
        return found
    system = [message for message in prompt if message["role"] == "system"]
    starts = [i for i, message in enumerate(prompt) if message["role"] == "user"]

    def from_start(number: int) -> Prompt:
        rest = [message for message in prompt[starts[number] :] if message["role"] != "system"]
        return _conversation(tokenizer, request, [*system, *rest])

    # The later it begins the shorter it is: few have to be tried.
    first = bisect_left(
        range(len(starts)), True, key=lambda number: len(from_start(number).tokens) <= limit
    )
    return from_start(min(first, len(starts) - 1)) if starts else found


def _checked(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> tuple[int, ...]:
    unknown = [token for token in tokens if not 0 <= token < tokenizer.vocabulary_size]
    if unknown:
        raise InvalidRequest(
            f"token {unknown[0]} is none of this model's, which are 0 to "
            f"{tokenizer.vocabulary_size - 1}",
            param="prompt",
        )
    return tokens


def _conversation(tokenizer: Tokenizer, request: ChatRequest, messages: list[Message]) -> Prompt:
    options = dict(request.template)
    thinking = request.thinking
    if thinking.wanted is not None:
        names = ("enable_thinking", "thinking", "reasoning")  # the last of Cohere's templates
        options |= dict.fromkeys(names, thinking.wanted)
    if thinking.effort is not None:
        options["reasoning_effort"] = thinking.effort
    if tokenizer.markup.knows_tools:
        if request.tools:
            options["tools"] = [tool.for_template() for tool in request.tools]
    else:
        messages = without_tools(messages, request.tools)
    text = tokenizer.render(messages, continues=request.continues, **options)
    thinks = not request.continues and tokenizer.markup.opened(text)
    return Prompt(tuple(tokenizer.encode_rendered(text)), thinks)


_CONVENTION = """\
You may call tools to answer. Each is a function, described by a line of JSON:
{tools}
To call one, write nothing but a line of JSON with its name and arguments between tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
Results come back between <tool_response> tags."""


def without_tools(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation for a template that knows no tools: they are told of in the system message,
    calls and results are texts (documented in docs/clients.md)."""
    told = []
    for message in messages:
        content = str(message["content"])
        if message["role"] == "tool":
            told.append(
                {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
            )
        elif calls := message.get("tool_calls"):
            written = [f"<tool_call>\n{_written(call)}\n</tool_call>" for call in calls]
            text = "\n".join(filter(None, [content, *written]))
            told.append({"role": "assistant", "content": text})
        else:
            told.append(message)
    if not tools:
        return _joined(told)
    listed = "\n".join(
        json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools
    )
    how = _CONVENTION.format(tools=listed)
    if told and told[0]["role"] == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{how}"}
        return _joined([first, *told[1:]])
    return _joined([{"role": "system", "content": how}, *told])


def _joined(messages: list[Message]) -> list[Message]:
    """What follows each other from the user as one, as templates want roles to alternate."""
    found: list[Message] = []
    for message in messages:
        if found and message["role"] == "user" == found[-1]["role"]:
            both = f"{found[-1]['content']}\n{message['content']}"
            found[-1] = {**found[-1], "content": both}
        else:
            found.append(message)
    return found


def _written(call: dict[str, Any]) -> str:
    function = call["function"]
    wanted = {"name": function["name"], "arguments": function["arguments"]}
    return json.dumps(wanted, ensure_ascii=False)
