"""Bodies of the other dialects: honoured, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from exo.api import fields
from exo.api.dialects.anthropic import parse_message
from exo.api.dialects.ollama import parse_ollama
from exo.api.dialects.openai_completions import parse_completion
from exo.api.request import ChatDefaults
from exo.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def completion(**body: Any) -> Any:
    return parse_completion({"model": "m", "prompt": "Once"} | body, ChatDefaults())


def test_a_completion_is_a_request_for_each_prompt() -> None:
    (request,), echo, how = completion(n=2, logprobs=3, stream=True)
    assert (request.prompt, request.choices, request.max_tokens) == ("Once", 2, 16)
    assert (request.sampling.logprobs, request.sampling.top_logprobs) == (True, 3)
    assert not echo and how.stream
    assert [r.prompt for r in completion(prompt=["a", "b"])[0]] == ["a", "b"]
    assert [r.prompt for r in completion(prompt=[1, 2])[0]] == [(1, 2)]
    assert [r.prompt for r in completion(prompt=[[1], [2, 3]])[0]] == [(1,), (2, 3)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"messages": [USER]}, "messages"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**body)
    assert refused.value.param == param


def message(**body: Any) -> Any:
    return parse_message({"model": "m", "max_tokens": 5, "messages": [USER]} | body, ChatDefaults())


def test_a_message() -> None:
    request = message(
        system=[{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
    )
    assert request.prompt == [{"role": "system", "content": "Be"}, USER]
    request = message(messages=[USER, USER, {"role": "assistant", "content": "Well"}])
    assert [m["content"] for m in request.prompt] == ["hi\nhi", "Well"]
    assert request.continues
    assert message(stop_sequences=["a"], metadata={"user_id": "u"}).stop == ("a",)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        message(**body)
    assert refused.value.param == param


def test_ollamas_options_are_sampling() -> None:
    options = {"temperature": 0.5, "repeat_penalty": 1.2, "num_predict": 7, "num_ctx": 4096}
    given = fields.body_of({"model": "m:latest", "options": options | {"stop": ["x"], "seed": 1}})
    request = parse_ollama(given, "raw", ChatDefaults())
    assert (request.model, request.max_tokens, request.stop) == ("m", 7, ("x",))
    assert (request.sampling.temperature, request.sampling.repetition_penalty) == (0.5, 1.2)
    assert request.asked == {"temperature", "repetition_penalty"}
    assert (
        parse_ollama({"model": "m", "options": {"num_predict": -1}}, "x", ChatDefaults()).max_tokens
        is None
    )
