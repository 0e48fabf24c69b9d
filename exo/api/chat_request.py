"""POST /v1/chat/completions: the body, every field honoured or refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exo.errors import InvalidRequest
from exo.inference.sampling import MAX_TOP_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 16
_ROLES = {"system", "developer", "user", "assistant"}

# Known to OpenAI's API, and what is served here is their neutral value only.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "store": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to do in parallel
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
_HONOURED = {
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "user",  # a label of the client's, written to the log with the request
    "metadata",
}


@dataclass(frozen=True)
class ChatDefaults:
    """What a request that does not say gets."""

    temperature: float = 0.0
    max_tokens: int | None = None
    system_prompt: str | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. `max_tokens` None means up to the end of the context."""

    model: str
    messages: list[dict[str, str]]
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...] = field(default=())
    stream: bool = False
    include_usage: bool = False
    user: str = ""


def parse_chat_request(body: Any, defaults: ChatDefaults) -> ChatRequest:
    """Check a JSON body.

    Raises:
        InvalidRequest: malformed, out of range, unknown or unsupported; `param` names the field.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the request body must be a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise InvalidRequest(f"{name}={value!r} is not supported", param=name)
        elif name not in _HONOURED:
            raise InvalidRequest(f"unknown parameter {name!r}", param=name)
    messages = _messages(given.get("messages"))
    if defaults.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": defaults.system_prompt})
    options = _typed(given, "stream_options", dict, {})
    return ChatRequest(
        model=_required(given, "model", str),
        messages=messages,
        sampling=_sampling(given, defaults),
        max_tokens=_max_tokens(given, defaults),
        stop=_stop(given.get("stop")),
        stream=_typed(given, "stream", bool, False),
        include_usage=_typed(options, "include_usage", bool, False),
        user=_typed(given, "user", str, ""),
    )


def _sampling(given: Mapping[str, Any], defaults: ChatDefaults) -> SamplingParams:
    logprobs = _typed(given, "logprobs", bool, False)
    top_logprobs = _typed(given, "top_logprobs", int, 0)
    if top_logprobs and not logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {top_logprobs}; expected 0 to {MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )
    seed = _typed(given, "seed", int, None)
    return SamplingParams(
        temperature=_number(given, "temperature", defaults.temperature),
        top_p=_number(given, "top_p", 1.0),
        top_k=max(0, _typed(given, "top_k", int, 0)),  # vLLM and others write "off" as -1
        min_p=_number(given, "min_p", 0.0),
        repetition_penalty=_number(given, "repetition_penalty", 1.0),
        presence_penalty=_number(given, "presence_penalty", 0.0),
        frequency_penalty=_number(given, "frequency_penalty", 0.0),
        logit_bias=_logit_bias(given),
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r}; expected one of {sorted(_ROLES)}", param=f"{where}.role"
        )
    for key, value in message.items():
        if key not in ("role", "content", "name", "refusal") and value not in (None, []):
            raise InvalidRequest(f"{where}.{key} is not supported", param=f"{where}.{key}")
    # Chat templates know "system"; OpenAI renamed it for newer models.
    return {
        "role": "system" if role == "developer" else role,
        "content": _content(f"{where}.content", message.get("content")),
    }


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a text or a list of text parts", param=where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequest(
                f"{where}[{index}] is {kind!r}; only text parts are supported", param=where
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{index}].text must be a text", param=where)
        texts.append(part["text"])
    return "".join(texts)


def _max_tokens(given: Mapping[str, Any], defaults: ChatDefaults) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _typed(given, name, int, None)
        if value is not None:
            if value < 1:
                raise InvalidRequest(f"{name} is {value}; expected at least 1", param=name)
            return int(value)
    return defaults.max_tokens


def _stop(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(listed, list)
        or len(listed) > MAX_STOP_STRINGS
        or not all(isinstance(text, str) and text for text in listed)
    ):
        raise InvalidRequest(
            f"stop must be a non-empty text or a list of up to {MAX_STOP_STRINGS}", param="stop"
        )
    return tuple(listed)


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    value = _typed(given, "logit_bias", dict, {})
    try:
        biases = {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError):
        biases = {-1: 0.0}
    if any(token < 0 or not -100 <= bias <= 100 for token, bias in biases.items()):
        raise InvalidRequest(
            "logit_bias must map token ids to numbers from -100 to 100", param="logit_bias"
        )
    return biases


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} must be a number, not {value!r}", param=name)
    return float(value)


def _required(given: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in given:
        raise InvalidRequest(f"{name} is missing", param=name)
    return _typed(given, name, kind, None)


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = {str: "a text", bool: "true or false", int: "a whole number", dict: "an object"}
        raise InvalidRequest(f"{name} must be {expected[kind]}, not {value!r}", param=name)
    return value
