"""Fields of request bodies, checked: what is wrong is named, with what was expected."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from exo.api.request import ChatDefaults
from exo.errors import InvalidRequest
from exo.inference.sampling import MAX_TOP_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 16
MAX_CHOICES = 16

_EXPECTED = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    dict: "an object",
    list: "a list",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def body_of(body: Any) -> dict[str, Any]:
    """The fields that are given. Raises InvalidRequest if the body is no object."""
    if not isinstance(body, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return {key: value for key, value in body.items() if value is not None}


def check_known(
    given: Mapping[str, Any], honoured: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raises InvalidRequest for a field that is neither honoured nor has a value that asks for
    nothing."""
    for name, value in given.items():
        if name in neutral:
            if value not in neutral[name]:
                raise InvalidRequest(f"{name}={value!r} is not supported", param=name)
        elif name not in honoured:
            raise InvalidRequest(f"unknown parameter {name!r}", param=name)


def typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidRequest(f"{name} must be {_EXPECTED[kind]}, not {value!r}", param=name)
    return value


def required(given: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in given:
        raise InvalidRequest(f"{name} is missing", param=name)
    return typed(given, name, kind, None)


def at_least_one(given: Mapping[str, Any], name: str) -> int | None:
    """A count, None where it is not given."""
    value = typed(given, name, int, None)
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} is {value}; expected at least 1", param=name)
    return None if value is None else int(value)


def choices(given: Mapping[str, Any]) -> int:
    """How many answers are asked for."""
    count = at_least_one(given, "n") or 1
    if count > MAX_CHOICES:
        raise InvalidRequest(f"n is {count}; expected 1 to {MAX_CHOICES}", param="n")
    return count


def stop_strings(value: Any, name: str = "stop") -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(listed, list)
        or len(listed) > MAX_STOP_STRINGS
        or not all(isinstance(text, str) and text for text in listed)
    ):
        raise InvalidRequest(
            f"{name} must be a non-empty text or a list of up to {MAX_STOP_STRINGS}", param=name
        )
    return tuple(listed)


def sampling(
    given: Mapping[str, Any], defaults: ChatDefaults, *, logprobs: bool, top_logprobs: int
) -> tuple[SamplingParams, frozenset[str]]:
    """How to sample, and the names of what the request itself says of it."""
    if top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {top_logprobs}; expected 0 to {MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )
    seed = typed(given, "seed", int, None)
    found = SamplingParams(
        temperature=_number(given, "temperature", defaults.temperature or 0.0),
        top_p=_number(given, "top_p", 1.0),
        top_k=max(0, typed(given, "top_k", int, 0)),  # vLLM and others write "off" as -1
        min_p=_number(given, "min_p", 0.0),
        repetition_penalty=_number(given, "repetition_penalty", 1.0),
        presence_penalty=_number(given, "presence_penalty", 0.0),
        frequency_penalty=_number(given, "frequency_penalty", 0.0),
        logit_bias=_logit_bias(given),
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )
    return found, frozenset(name for name in _SAMPLING if name in given)


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    value = typed(given, "logit_bias", dict, {})
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
