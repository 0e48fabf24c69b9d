"""Tools as the Responses dialect offers them, as the core's functions, and calls of them as items.

A model is offered functions and no other kinds of tools: one that takes a text of its own making
("custom") becomes a function of one argument, one of a namespace a function named by both.
Format: https://platform.openai.com/docs/api-reference/responses/create, `tools`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from exo.api.dialects.openai_types import Name
from exo.errors import InvalidRequest
from exo.models.markup.tools import Tool, arguments_of

Json = dict[str, Any]

LEFT_OUT = ("web_search", "web_search_preview")
"""What a server of OpenAI's would do by itself, and Codex offers with every request. To the model
it is left out; other kinds are refused by name."""

INPUT = "input"
"""The argument of the function that stands for a custom tool."""


class CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct):
    type: str
    name: Name | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[ResponseTool] | None = None


@dataclass(frozen=True)
class Offered:
    """A tool as the client knows it, and the function a model is offered for it."""

    name: str
    namespace: str | None
    is_custom: bool
    function: Tool

    def begun(self, call_id: str) -> Json:
        """A call of it as an item, before its arguments."""
        item: Json = {"type": "custom_tool_call" if self.is_custom else "function_call"}
        item |= {"call_id": call_id, "name": self.name}
        item |= {"namespace": self.namespace} if self.namespace else {}
        return item | {"input" if self.is_custom else "arguments": ""}


def offered_tools(tools: Sequence[ResponseTool]) -> dict[str, Offered]:
    """By the names of the functions.

    Raises:
        InvalidRequest: a kind of tool that is not served, one without a name, or two of one name.
    """
    found: dict[str, Offered] = {}
    for where, namespace, tool in _flat(tools):
        if tool.type in LEFT_OUT and namespace is None:
            continue
        if tool.type not in ("function", "custom") or tool.name is None:
            raise InvalidRequest(
                f"{where} is of type {tool.type}; only functions, custom tools and namespaces of "
                "them, with a name, are supported",
                param=where,
            )
        name = function_name(namespace, tool.name)
        if name in found:
            raise InvalidRequest("two tools have the same name", param="tools")
        custom = tool.type == "custom"
        function = _custom(name, tool) if custom else _function(name, tool)
        found[name] = Offered(tool.name, namespace, custom, function)
    return found


def function_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def call_of(item: Json, where: str) -> tuple[str, str]:
    """The function and its arguments, as JSON, of an item that is a call.

    Raises:
        InvalidRequest: it says of nothing what is called.
    """
    if not item.get("name"):
        raise InvalidRequest(f"{where}.name is missing", param=f"{where}.name")
    name = function_name(item.get("namespace"), item["name"])
    if item["type"] == "custom_tool_call":
        return name, json.dumps({INPUT: item.get("input") or ""}, ensure_ascii=False)
    return name, item.get("arguments") or "{}"


def custom_input(arguments: str) -> str:
    """What a custom tool is called with, from the arguments of its function; as far as it came
    where the end of the answer has cut it, an escape perhaps."""
    ends = range(len(arguments), max(len(arguments) - len(r"\u0000"), 0), -1)
    whole = (arguments, *(arguments[:end] + '"}' for end in ends))
    found = next((one[INPUT] for one in map(arguments_of, whole) if INPUT in one), "")
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _flat(tools: Sequence[ResponseTool]) -> list[tuple[str, str | None, ResponseTool]]:
    found: list[tuple[str, str | None, ResponseTool]] = []
    for i, tool in enumerate(tools):
        if tool.type == "namespace" and tool.name is not None:
            inner = enumerate(tool.tools or ())
            found += [(f"tools[{i}].tools[{j}]", tool.name, one) for j, one in inner]
        else:
            found.append((f"tools[{i}]", None, tool))
    return found


def _function(name: str, tool: ResponseTool) -> Tool:
    return Tool(name, tool.description or "", tool.parameters or {}, bool(tool.strict))


def _custom(name: str, tool: ResponseTool) -> Tool:
    said, wanted = tool.description or "", tool.format or CustomFormat()
    if wanted.type == "grammar":
        # Inside a JSON string it cannot be held to; models read it.
        said += f"\n\nThe input follows this {wanted.syntax} grammar:\n{wanted.definition}"
    argument = {"type": "string", "description": "The tool's whole input."}
    parameters = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT]}
    return Tool(name, said.strip(), parameters)
