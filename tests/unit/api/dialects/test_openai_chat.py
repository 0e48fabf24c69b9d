from typing import Any

import pytest

from exo.api.dialects.openai_chat import Streaming, parse_chat
from exo.api.request import ChatDefaults, ChatRequest
from exo.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def parse(**body: Any) -> ChatRequest:
    return parse_chat({"model": "m", "messages": [USER]} | body, ChatDefaults())[0]


def test_every_parameter_is_honoured() -> None:
    body = {"model": "m", "messages": [USER], "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    assert parse_chat(body, ChatDefaults())[1] == Streaming(stream=True, include_usage=True)
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
            "messages[0].content",
        ),
        ({"messages": [USER | {"tool_calls": [1]}]}, "messages[0].tool_calls"),
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
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"seed": "x"}, "seed"),
        ({"tempreature": 1}, "tempreature"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**body)
    assert refused.value.param == param


def test_a_body_that_is_no_object_or_has_no_model_is_refused() -> None:
    for body in ([], "x", None, 3):
        with pytest.raises(InvalidRequest, match="JSON object"):
            parse_chat(body, ChatDefaults())
    with pytest.raises(InvalidRequest, match="model is missing"):
        parse_chat({"messages": [USER]}, ChatDefaults())


def test_defaults_fill_what_is_not_said() -> None:
    defaults = ChatDefaults(temperature=0.2, max_tokens=7, system_prompt="Be brief.")
    request, _ = parse_chat({"model": "m", "messages": [USER]}, defaults)
    assert request.sampling.temperature == 0.2
    assert request.max_tokens == 7
    assert request.prompt[0] == {"role": "system", "content": "Be brief."}
    own = [{"role": "developer", "content": "Mine."}, USER]
    request, _ = parse_chat({"model": "m", "messages": own}, defaults)
    assert [m["content"] for m in request.prompt] == ["Mine.", "hi"]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(messages=[{"role": "user", "content": parts}])
    assert request.prompt[0]["content"] == "ab"
