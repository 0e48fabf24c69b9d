"""Bodies of OpenAI's Responses: tools of every kind, and calls of them told before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exo.api.dialects.responses_tools import custom_input, offered_tools
from exo.api.dialects.responses_types import ResponsesBody, response_request
from exo.api.http.bodies import body_from
from exo.api.request import ChatDefaults, ChatRequest
from exo.errors import InvalidRequest

FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: PATCH"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [FUNCTION, PATCH]}
CODEX = [FUNCTION, PATCH, AGENTS, {"type": "web_search", "external_web_access": True}]


def asked(**body: Any) -> ChatRequest:
    read = body_from({"model": "m", "input": "hi"} | body, ResponsesBody)
    offered = offered_tools(read.tools or ())
    return response_request(read, [], offered, ChatDefaults())[0]


def test_what_codex_offers_is_functions() -> None:
    request = asked(tools=CODEX, tool_choice="auto", client_metadata={"x": "y"})
    names = [tool.name for tool in request.tools]
    assert names == ["look", "apply_patch", "agents__look", "agents__apply_patch"]
    patch = request.tools[1]
    assert patch.parameters["required"] == ["input"]
    assert "Patches." in patch.description and "start: PATCH" in patch.description


def test_a_tool_is_chosen_by_the_name_the_client_knows() -> None:
    request = asked(tools=CODEX, tool_choice={"type": "custom", "name": "apply_patch"})
    assert [tool.name for tool in request.tools] == ["apply_patch"]
    request = asked(tools=[AGENTS], tool_choice={"type": "custom", "name": "apply_patch"})
    assert [tool.name for tool in request.tools] == ["agents__apply_patch"]
    request = asked(tools=[FUNCTION, PATCH], tool_choice={"type": "function", "name": "look"})
    assert [tool.name for tool in request.tools] == ["look"]
    assert request.tool_choice.mode == "required"


def test_calls_told_before_are_of_the_functions() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** x"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    other = {"type": "function_call", "call_id": "c2", "name": "look", "namespace": "agents"}
    request = asked(input=[call, result, other])
    assert isinstance(request.prompt, list)
    assert [one["role"] for one in request.prompt] == ["assistant", "tool", "assistant"]
    (function,) = (one["function"] for one in request.prompt[0]["tool_calls"])
    assert function == {"name": "apply_patch", "arguments": {"input": "*** x"}}
    assert request.prompt[1] == {"role": "tool", "content": "done", "tool_call_id": "c1"}
    assert request.prompt[2]["tool_calls"][0]["function"]["name"] == "agents__look"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tools": [AGENTS | {"tools": [{"type": "mcp"}]}]}, "tools[0].tools[0]"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": CODEX, "tool_choice": {"type": "custom", "name": "no"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c"}]}, "input[0].name"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**body)
    assert refused.value.param == param


def test_a_custom_call_gives_its_input() -> None:
    assert custom_input(json.dumps({"input": "a\nb"})) == "a\nb"
    assert custom_input('{"input": {"a": 1}}') == '{"a": 1}'
    for cut in ("", "\\", "\\u00e"):  # by the end of the answer
        assert custom_input('{"input": "as far' + cut) == "as far"
    assert custom_input('{"inp') == custom_input("") == ""
