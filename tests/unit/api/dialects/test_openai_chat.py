from typing import Any

import pytest

from exo.api.dialects.openai_request import chat_request
from exo.api.dialects.openai_types import ChatBody
from exo.api.http.bodies import body_from
from exo.api.request import ChatDefaults, ChatRequest, Thinking
from exo.errors import InvalidRequest
from exo.models.markup.tools import ToolChoice

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
JSON = {"type": "json_object"}


def parse(**body: Any) -> ChatRequest:
    return parse_with(ChatDefaults(), **body)


def parse_with(defaults: ChatDefaults, **body: Any) -> ChatRequest:
    return chat_request(body_from({"model": "m", "messages": [USER]} | body, ChatBody), defaults)


def test_every_parameter_is_honoured() -> None:
    request = parse(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        seed=3,
        logprobs=True,
        top_logprobs=5,
        stop=["a", "b"],
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logit_bias, sampling.seed) == ({7: -100.0}, 3)
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 5)
    assert (request.stop, request.max_tokens) == (("a", "b"), 9)
    assert request.asked == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert parse(n=3).choices == 3
    last = {"role": "assistant", "content": "Once upon"}
    assert parse(messages=[USER, last], continue_final_message=True).continues
    assert parse(max_completion_tokens=4, max_tokens=9).max_tokens == 4
    assert parse(top_k=-1).sampling.top_k == 0
    assert parse(max_tokens=-1).max_tokens is None
    own = parse(n_predict=7, repeat_penalty=1.2, timings_per_token=True, id_slot=-1)  # llama.cpp's
    assert (own.max_tokens, own.sampling.repetition_penalty) == (7, 1.2)
    assert own.asked == {"repetition_penalty"}


def test_neutral_values_of_what_is_not_supported_are_fine() -> None:
    parse(n=1, tools=[], tool_choice="auto", response_format={"type": "text"}, store=False)
    parse(temperature=None, stop=None, unknown=None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"model": 3}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED | {"function": {"name": "g"}}}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": JSON, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"grammar": "root ::= ("}, None),
        ({"store": True}, "store"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"seed": "x"}, "seed"),
        ({"tempreature": 1}, "tempreature"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**body)
    assert refused.value.param == param


def test_a_body_that_is_no_object_or_has_no_model_is_refused() -> None:
    for body in ([], "x", None, 3):
        with pytest.raises(InvalidRequest, match="JSON object"):
            body_from(body, ChatBody)
    with pytest.raises(InvalidRequest, match="model is missing"):
        body_from({"messages": [USER]}, ChatBody)


def test_defaults_fill_what_is_not_said() -> None:
    defaults = ChatDefaults(temperature=0.2, max_tokens=7, system_prompt="Be brief.")
    request = parse_with(defaults)
    assert request.sampling.temperature == 0.2
    assert request.max_tokens == 7
    assert request.prompt[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "developer", "content": "Mine."}, USER]
    request = parse_with(defaults, messages=own)
    assert [m["content"] for m in request.prompt] == ["Mine.", "hi"]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(messages=[{"role": "user", "content": parts}])
    assert request.prompt[0]["content"] == "ab"


def test_tools_and_who_may_call_them() -> None:
    other = {"type": "function", "function": {"name": "g", "strict": True}}
    request = parse(tools=[TOOL, other])
    assert [tool.name for tool in request.tools] == ["f", "g"]
    assert request.tools[1].strict and request.tool_choice == ToolChoice("auto")
    assert parse(tools=[TOOL], parallel_tool_calls=False).tool_choice == ToolChoice("auto", False)
    assert parse(tools=[TOOL], tool_choice="none").tools == ()
    named = parse(tools=[TOOL, other], tool_choice=NAMED)
    assert [tool.name for tool in named.tools] == ["f"]
    assert named.tool_choice == ToolChoice("required", False)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    assert [tool.name for tool in parse(tools=[TOOL, other], tool_choice=allowed).tools] == ["f"]
    old = parse(functions=[{"name": "f"}], function_call={"name": "f"})
    assert old.tool_choice.mode == "required"


def test_a_conversation_with_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    prompt = parse(messages=messages).prompt
    assert prompt[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert prompt[2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    for arguments in ("x", '{"x":' * 100_000):
        broken = call | {"function": {"name": "f", "arguments": arguments}}
        with pytest.raises(InvalidRequest, match="must be a JSON object"):
            parse(messages=[USER, {"role": "assistant", "tool_calls": [broken]}])


def test_formats_become_grammars() -> None:
    for body in (
        {"response_format": JSON},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"response_format": {"type": "regex", "pattern": "a+"}},
        {"guided_json": {"type": "object"}},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": "start: /a/"},
        {"grammar": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a"}},
    ):
        assert parse(**body).grammar is not None
    assert parse(response_format={"type": "text"}).grammar is None


def test_thinking() -> None:
    assert parse().thinking == Thinking()
    assert parse(reasoning_effort="none").thinking == Thinking(False)
    assert parse(reasoning_effort="high").thinking == Thinking(None, None, "high")
    assert parse(chat_template_kwargs={"enable_thinking": False}).thinking.wanted is False
    assert parse(max_reasoning_tokens=5).thinking.budget == 5
