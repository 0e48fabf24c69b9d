"""The bodies of Ollama's chat, generate and embed, and the core's request made of them.

Format: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from exo.api.dialects.openai_request import chosen_tools, made_call, tool_of
from exo.api.dialects.openai_types import CalledFunction, Function
from exo.api.dialects.sampling_fields import SAMPLING, Count, StopTexts, sampling_params, stop_texts
from exo.api.http.bodies import Body
from exo.api.request import ChatDefaults, ChatRequest, Message, Thinking
from exo.errors import InvalidRequest
from exo.models import grammar

Json = dict[str, Any]


class Options(msgspec.Struct):
    """Those that say how to sample. The others say how to load a model, which the cluster decides:
    they are not read."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: int | None = None
    stop: StopTexts | None = None


class OllamaCall(msgspec.Struct):
    function: CalledFunction
    id: str = ""


class OllamaMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[Any] | None = None


class OllamaTool(msgspec.Struct):
    function: Function
    type: str | None = None


def ends_at_once(keep_alive: Any) -> bool:
    """Whether the model is to go: 0, or a duration of nought ("0s"). exo gives memory back when it
    is needed, so other durations change nothing."""
    return str(keep_alive).rstrip("nuµmsh") in ("0", "0.0")


class AnswerBody(Body, kw_only=True):
    """What chat and generate have in common."""

    model: str = ""
    name: str | None = None
    stream: bool | None = None
    options: Options | None = None
    keep_alive: Any = None
    format: Literal["", "json"] | Json | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: Any = None
    shift: Any = None


class OllamaChatBody(AnswerBody, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class GenerateBody(AnswerBody, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    template: str | None = None
    context: list[int] | None = None
    width: Any = None
    height: Any = None
    steps: Any = None


class EmbedBody(Body, kw_only=True):
    """POST /api/embed."""

    model: str
    input: str | list[str]
    dimensions: Count | None = None
    truncate: Any = None
    options: Any = None
    keep_alive: Any = None


class EmbeddingsBody(Body, kw_only=True):
    """POST /api/embeddings, the older one."""

    model: str
    prompt: str
    options: Any = None
    keep_alive: Any = None


class ModelBody(Body, kw_only=True):
    """What names a model: show, pull, delete."""

    model: str = ""
    name: str | None = None
    stream: bool | None = None
    insecure: Any = None
    verbose: Any = None


def model_name(
    body: AnswerBody | ModelBody | EmbedBody | EmbeddingsBody, defaults: ChatDefaults
) -> str:
    """Clients add the tag ":latest" to names without one."""
    name = body.model or getattr(body, "name", None) or ""
    return defaults.model(name.removesuffix(":latest"))


def answer_request(
    body: AnswerBody, prompt: list[Message] | str, defaults: ChatDefaults
) -> ChatRequest:
    """Raises InvalidRequest for what is out of range or not served; `param` names it."""
    body.refuse(logprobs=(False,), top_logprobs=(0,))
    options = body.options or Options()
    limit = options.num_predict or -1
    asked = {name for name in SAMPLING if getattr(options, name, None) is not None}
    if options.repeat_penalty is not None:
        asked.add("repetition_penalty")
    wanted = None
    if body.format:
        is_schema = isinstance(body.format, dict)
        wanted = grammar.of_json_schema(body.format) if is_schema else grammar.of_any_json()
    think = body.think
    return ChatRequest(
        model=model_name(body, defaults),
        prompt=defaults.introduced(prompt) if isinstance(prompt, list) else prompt,
        sampling=sampling_params(
            defaults,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
        ),
        asked=frozenset(asked),
        max_tokens=limit if limit > 0 else defaults.max_tokens,  # -1 and -2: as long as it likes
        stop=stop_texts(options.stop),
        grammar=wanted,
        thinking=Thinking(
            think if isinstance(think, bool) or think is None else True,
            effort=think if isinstance(think, str) else None,
        ),
    )


def chat_request(body: OllamaChatBody, defaults: ChatDefaults) -> ChatRequest:
    """Of a conversation with at least one message. Raises as `answer_request` does."""
    messages = [_message(f"messages[{i}]", one) for i, one in enumerate(body.messages or ())]
    offered = [tool_of(tool.function) for tool in body.tools or ()]
    tools, choice = chosen_tools(offered, "auto", None, parallel=True)
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    request = answer_request(body, messages, defaults)
    return replace(request, tools=tools, tool_choice=choice, continues=continues)


def _message(where: str, message: OllamaMessage) -> Message:
    if message.images:
        raise InvalidRequest(f"{where}.images: images are not supported", param=f"{where}.images")
    found: Message = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            made_call(where, call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id or ""
        if message.tool_name:
            found["name"] = message.tool_name
    return found
