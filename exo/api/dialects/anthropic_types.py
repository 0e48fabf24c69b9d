"""The body of Anthropic's Messages, as clients send it, and the core's request made of it.

Format: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from exo.api.dialects.openai_request import chosen_tools, made_call
from exo.api.dialects.sampling_fields import (
    SAMPLING,
    Count,
    Probability,
    StopText,
    Temperature,
    TopK,
    sampling_params,
)
from exo.api.http.bodies import Body
from exo.api.request import ChatDefaults, ChatRequest, Message, Thinking
from exo.errors import InvalidRequest
from exo.models import grammar
from exo.models.markup.tools import Tool, ToolChoice

Json = dict[str, Any]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    source: Any = None


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    source: Any = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str


class RedactedBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    data: Any = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Json


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUseBlock
    | ToolResultBlock
)


class AMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    name: str
    input_schema: Json | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


class JsonFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: Json


class OutputConfig(msgspec.Struct):
    format: JsonFormat | None = None
    effort: str | None = None


class CountBody(Body, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[AMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    mcp_servers: Any = None
    # What clients are known to send along and what changes nothing here.
    betas: Any = None
    context_management: Any = None
    speed: Any = None
    cache_control: Any = None


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[StopText] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    metadata: Json | None = None
    service_tier: Any = None
    container: Any = None
    inference_geo: Any = None


def message_request(body: CountBody, defaults: ChatDefaults) -> ChatRequest:
    """Raises InvalidRequest for what contradicts itself or is not served; `param` names it."""
    body.refuse(mcp_servers=([],))
    messages = [message for i, one in enumerate(body.messages) for message in _message(i, one)]
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": _text("system", body.system)})
    tools, choice = _tools(body)
    output = body.output_format or (body.output_config.format if body.output_config else None)
    request = ChatRequest(
        model=defaults.model(body.model),
        prompt=defaults.introduced(_alternating(messages)),
        sampling=sampling_params(defaults),
        tools=tools,
        tool_choice=choice,
        grammar=None if output is None else grammar.of_json_schema(output.schema),
        thinking=_thinking(body),
        # "If the final message uses the assistant role, the response continues from it."
        continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
    )
    if not isinstance(body, MessagesBody):
        return request
    user = (body.metadata or {}).get("user_id")
    return replace(
        request,
        sampling=sampling_params(
            defaults, temperature=body.temperature, top_k=body.top_k, top_p=body.top_p
        ),
        asked=body.given & frozenset(SAMPLING),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        user=user if isinstance(user, str) else "",
    )


def _message(index: int, message: AMessage) -> list[Message]:
    """One of Anthropic's may be several: results of tools are messages of their own."""
    where = f"messages[{index}].content"
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    found: Message = {"role": message.role}
    results: list[Message] = []
    for i, block in enumerate(message.content):
        at = f"{where}[{i}]"
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            found["reasoning_content"] = found.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            found.setdefault("tool_calls", []).append(
                made_call(at, block.id, block.name, block.input)
            )
        elif isinstance(block, ToolResultBlock):
            content = _text(at, block.content or "")
            if block.is_error:
                content = f"Error: {content}"
            results.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
        elif not isinstance(block, RedactedBlock):
            _refuse_kind(at, block)
    if texts or not results:
        results.append({**found, "content": "\n".join(texts)})
    return results


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if not isinstance(block, TextBlock):
            _refuse_kind(f"{where}[{i}]", block)
    return "\n".join(block.text for block in content)


def _refuse_kind(where: str, block: Any) -> None:
    kind = block.__struct_config__.tag
    raise InvalidRequest(f"{where} is of type {kind}, which is not supported", param=where)


def _alternating(messages: list[Message]) -> list[Message]:
    """Templates want the roles to alternate, this API joins what follows itself."""
    found: list[Message] = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] in ("user", "assistant"):
            both = f"{found[-1]['content']}\n{message['content']}"
            found[-1] = {**found[-1], **message, "content": both}
        else:
            found.append(message)
    return found


def _tools(body: CountBody) -> tuple[tuple[Tool, ...], ToolChoice]:
    offered = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise InvalidRequest(
                f"tools[{i}] is of type {tool.type}; only tools that the client runs are supported",
                param=f"tools[{i}]",
            )
        schema = tool.input_schema or {}
        offered.append(Tool(tool.name, tool.description or "", schema, bool(tool.strict)))
    choice = body.tool_choice or AnthropicChoice("auto")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
        return chosen_tools(offered, "required", [choice.name], parallel=False)
    mode = "required" if choice.type == "any" else choice.type
    return chosen_tools(offered, mode, None, parallel=parallel)


def _thinking(body: CountBody) -> Thinking:
    effort = body.output_config.effort if body.output_config else None
    said = body.thinking
    if said is None:
        return Thinking(None, None, effort)
    if said.type == "disabled":
        return Thinking(False)
    return Thinking(True, said.budget_tokens if said.type == "enabled" else None, effort)
