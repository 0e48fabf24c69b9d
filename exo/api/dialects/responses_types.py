"""The body of OpenAI's Responses, as clients send it, and the core's request made of it.

Format: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from exo.api.dialects.openai_request import chosen_tools, made_call
from exo.api.dialects.openai_types import Effort, ObjectFormat, TextFormat
from exo.api.dialects.responses_tools import Offered, ResponseTool, call_of
from exo.api.dialects.sampling_fields import (
    SAMPLING,
    Count,
    Probability,
    Temperature,
    TopLogprobs,
    sampling_params,
)
from exo.api.http.bodies import Body
from exo.api.request import ChatDefaults, ChatRequest, Message, Thinking
from exo.errors import InvalidRequest
from exo.models import grammar
from exo.models.markup.tools import Tool, ToolChoice

Json = dict[str, Any]


class InputPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message, a call, its result, or thoughts; which one says `type`, "message" if left out."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    summary: Any = None


class ChoiceOfOne(msgspec.Struct, tag_field="type", tag="function"):
    name: str


class ChoiceOfCustom(msgspec.Struct, tag_field="type", tag="custom"):
    name: str


class ChoiceOfSome(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[ChoiceOfOne | ChoiceOfCustom]


ToolChoiceField = Literal["none", "auto", "required"] | ChoiceOfOne | ChoiceOfCustom | ChoiceOfSome


class SchemaTextFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: Json
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | ObjectFormat | SchemaTextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Body, kw_only=True):
    """POST /v1/responses."""

    model: str
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Json | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    # What clients are known to send along and what changes nothing here.
    include: list[str] | None = None
    stream_options: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    max_tool_calls: Any = None
    client_metadata: Any = None


def response_request(
    body: ResponsesBody,
    before: Sequence[Message],
    offered: Mapping[str, Offered],
    defaults: ChatDefaults,
) -> tuple[ChatRequest, list[Message]]:
    """The request, and the conversation it ends (without instructions, which are not kept);
    `before` is the one of the response it follows.

    Raises:
        InvalidRequest: what contradicts itself or is not served; `param` names it.
    """
    body.refuse(background=(False,), conversation=(), prompt=())
    conversation = [*before, *messages_of(body.input)]
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    tools, choice = _chosen(body, offered)
    effort = body.reasoning.effort if body.reasoning else None
    asked = {name for name in SAMPLING if getattr(body, name, None) is not None}
    request = ChatRequest(
        model=defaults.model(body.model),
        prompt=defaults.introduced([*system, *conversation]),
        sampling=sampling_params(
            defaults,
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=body.top_logprobs is not None,
            top_logprobs=body.top_logprobs,
        ),
        asked=frozenset(asked),
        max_tokens=body.max_output_tokens or defaults.max_tokens,
        tools=tools,
        tool_choice=choice,
        grammar=_format(body.text),
        thinking=Thinking(False) if effort == "none" else Thinking(effort=effort),
        truncates=body.truncation == "auto",
        user=body.user or "",
    )
    return request, conversation


def messages_of(given: str | list[InputItem]) -> list[Message]:
    """Items as messages: thoughts and calls belong to the message of the assistant's around them.

    Raises:
        InvalidRequest: an item of a kind that is not served.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[Message] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if item.type == "message":
            if item.role is None:
                raise InvalidRequest(f"{where}.role is missing", param=f"{where}.role")
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": _text(where, item.content)})
        elif item.type in ("function_call", "custom_tool_call"):
            name, arguments = call_of(msgspec.structs.asdict(item), where)
            call = made_call(where, item.call_id or "", name, arguments)
            _assistants(found).setdefault("tool_calls", []).append(call)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            content = _text(where, item.output)
            found.append({"role": "tool", "content": content, "tool_call_id": item.call_id or ""})
        elif item.type == "reasoning":
            if item.content is not None:
                found.append({"role": "assistant", "content": ""})
                found[-1]["reasoning_content"] = _text(where, item.content)
        else:
            raise InvalidRequest(
                f"{where} is of type {item.type}, which is not supported", param=f"{where}.type"
            )
    return _merged(found)


def _assistants(found: list[Message]) -> Message:
    """The message that a call belongs to."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _merged(found: list[Message]) -> list[Message]:
    """Thoughts go with what was said after them."""
    merged: list[Message] = []
    for message in found:
        last = merged[-1] if merged else {}
        if message["role"] == "assistant" == last.get("role") and not last["content"]:
            merged[-1] = {**last, **message}
        else:
            merged.append(message)
    return merged


def _text(where: str, content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.text if part.text is not None else part.refusal
        if text is None or not part.type.endswith(("text", "refusal")):
            raise InvalidRequest(
                f"{where}.content[{i}] is of type {part.type}; only text is supported",
                param=f"{where}.content[{i}]",
            )
        texts.append(text)
    return "".join(texts)


def _chosen(
    body: ResponsesBody, offered: Mapping[str, Offered]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = [one.function for one in offered.values()]
    parallel, wanted = body.parallel_tool_calls is not False, body.tool_choice
    if wanted is None or isinstance(wanted, str):
        return chosen_tools(tools, wanted or "auto", None, parallel=parallel)
    functions = {one.name: name for name, one in offered.items()} | {name: name for name in offered}
    if isinstance(wanted, ChoiceOfSome):
        names = [functions.get(one.name, one.name) for one in wanted.tools]
        return chosen_tools(tools, wanted.mode, names, parallel=parallel)
    name = functions.get(wanted.name, wanted.name)
    return chosen_tools(tools, "required", [name], parallel=False)


def _format(text: TextConfig | None) -> str | None:
    wanted = text.format if text is not None else None
    if isinstance(wanted, SchemaTextFormat):
        return grammar.of_json_schema(wanted.schema)
    return grammar.of_any_json() if isinstance(wanted, ObjectFormat) else None
