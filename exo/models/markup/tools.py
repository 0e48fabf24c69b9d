"""Tools that a request offers, and the calls an answer makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exo import json_text


@dataclass(frozen=True)
class Tool:
    """A function a model may call. `parameters`: JSON schema of its arguments, an object's; a
    `strict` one is called with arguments that follow it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description}
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function | {"parameters": parameters}}

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments, for a grammar: nothing that is not named, or models go on for ever."""
        named = {"type": "object", "properties": {}} | self.parameters
        return (
            named if named.get("additionalProperties") else named | {"additionalProperties": False}
        )


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may call: `mode` "auto" or "none", or "required" for at least one;
    `parallel` if several at once."""

    mode: str = "auto"
    parallel: bool = True


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is JSON, an object's."""

    name: str
    arguments: str


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments from its JSON; none of a call that the end of the answer has cut."""
    try:
        found = json_text.parsed(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def tool_call(name: Any, arguments: Any, tools: Sequence[Tool]) -> ToolCall:
    """A call as a model wrote it. Raises ValueError if it is none of a tool that was offered."""
    if name not in {tool.name for tool in tools}:
        raise ValueError(f"no tool is called {name!r}")
    if isinstance(arguments, str):  # some models write JSON in JSON
        arguments = json_text.parsed(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are {arguments!r}, not an object")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
