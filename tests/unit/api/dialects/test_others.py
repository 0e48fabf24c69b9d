"""Bodies of the other dialects: honoured, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from exo.api.dialects.anthropic_types import MessagesBody, message_request
from exo.api.dialects.ollama_types import (
    GenerateBody,
    OllamaChatBody,
    answer_request,
    chat_request,
    ends_at_once,
)
from exo.api.dialects.openai_completions import CompletionBody, completion_requests
from exo.api.http.bodies import body_from
from exo.api.request import ChatDefaults, Thinking
from exo.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def completion(**body: Any) -> Any:
    read = body_from({"model": "m", "prompt": "Once"} | body, CompletionBody)
    return completion_requests(read, ChatDefaults())


def test_a_completion_is_a_request_for_each_prompt() -> None:
    (request,) = completion(n=2, logprobs=3)
    assert (request.prompt, request.choices, request.max_tokens) == ("Once", 2, 16)
    assert (request.sampling.logprobs, request.sampling.top_logprobs) == (True, 3)
    assert completion(n=2, best_of=3)[0].choices == 3
    assert [r.prompt for r in completion(prompt=["a", "b"])] == ["a", "b"]
    assert [r.prompt for r in completion(prompt=[1, 2])] == [(1, 2)]
    assert [r.prompt for r in completion(prompt=[[1], [2, 3]])] == [(1,), (2, 3)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": [USER]}, "messages"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**body)
    assert refused.value.param == param


def message(**body: Any) -> Any:
    read = body_from({"model": "m", "max_tokens": 5, "messages": [USER]} | body, MessagesBody)
    return message_request(read, ChatDefaults())


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
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        message(**body)
    assert refused.value.param == param


def test_results_of_tools_are_messages_of_their_own() -> None:
    used = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
    failed = result | {"is_error": True, "content": [{"type": "text", "text": "no"}]}
    said = {"type": "text", "text": "well"}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    request = message(
        messages=[
            USER,
            {"role": "assistant", "content": [thought, said, used]},
            {"role": "user", "content": [result, failed, said]},
        ],
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    roles = [one["role"] for one in request.prompt]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    assert request.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert (request.prompt[1]["content"], request.prompt[1]["reasoning_content"]) == ("well", "hm")
    assert request.prompt[3]["content"] == "Error: no"
    assert not request.continues
    assert request.thinking == Thinking(True, 1024)
    assert [tool.name for tool in request.tools] == ["f"]


def test_a_limit_is_what_the_request_says_or_what_fits() -> None:
    assert completion(max_tokens=-1)[0].max_tokens is None
    assert completion(n_predict=5)[0].max_tokens == 5
    with pytest.raises(InvalidRequest, match="max_tokens: expected int >= 1"):
        completion(max_tokens=0)


@pytest.mark.parametrize("value", [0, "0", "0s", "0m", 0.0])
def test_a_model_that_is_not_kept_goes(value: Any) -> None:
    assert ends_at_once(value)


@pytest.mark.parametrize("value", [None, -1, "5m", "10s", 300, "30s"])
def test_a_model_that_is_kept_stays(value: Any) -> None:
    assert not ends_at_once(value)


def ollama(**body: Any) -> Any:
    read = body_from({"model": "m", "messages": [USER]} | body, OllamaChatBody)
    return chat_request(read, ChatDefaults())


def test_ollamas_options_are_sampling() -> None:
    options = {"temperature": 0.5, "repeat_penalty": 1.2, "num_predict": 7, "num_ctx": 4096}
    options |= {"stop": ["x"], "seed": 1}
    read = body_from({"model": "m:latest", "prompt": "x", "options": options}, GenerateBody)
    request = answer_request(read, "raw", ChatDefaults())
    assert (request.model, request.max_tokens, request.stop) == ("m", 7, ("x",))
    assert (request.sampling.temperature, request.sampling.repetition_penalty) == (0.5, 1.2)
    assert request.asked == {"temperature", "repetition_penalty"}
    assert ollama(options={"num_predict": -1}).max_tokens is None


def test_ollamas_formats_tools_and_thoughts() -> None:
    assert ollama(format="json").grammar is not None
    assert ollama(format={"type": "object"}).grammar is not None
    assert ollama(format="").grammar is None
    assert ollama(think="high").thinking == Thinking(True, None, "high")
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    request = ollama(
        tools=[tool],
        messages=[
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "f", "content": "2"},
        ],
    )
    assert request.prompt[2]["name"] == "f" and not request.continues
    with pytest.raises(InvalidRequest, match="images are not supported"):
        ollama(messages=[USER | {"images": ["eA=="]}])
