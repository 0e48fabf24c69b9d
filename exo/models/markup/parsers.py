"""Readers of what models write between a format's markers, beside mlx-lm's (library.py).

All raise ValueError where there is no call that can be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from exo import json_text
from exo.models.markup.library import parse_with, some
from exo.models.markup.tools import Tool, ToolCall, tool_call


def json_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """One object, a list of them, or several with ; or line breaks between (Llama 3, Granite,
    Cohere, MiniMax M1)."""
    text = text.lstrip()
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict):
                raise ValueError(f"{call!r} is no call")
            arguments = call.get("arguments", call.get("parameters"))
            name = call.get("name", call.get("tool_name"))
            found.append(tool_call(name, arguments, tools))
        at += len(text[at:]) - len(text[at:].lstrip("; \n\t,"))
    return some(found)


_DEEPSEEK_CALL = re.compile(
    "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\\n<]+?)"
    "(?:<｜tool▁sep｜>|\\n```json\\n)(?P<arguments>.*?)(?:\\n```)?<｜tool▁call▁end｜>",
    re.DOTALL,
)


def deepseek_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    found = [
        tool_call(call["name"].strip(), call["arguments"], tools)
        for call in _DEEPSEEK_CALL.finditer(text)
    ]
    return some(found)


def named_arguments(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """A list of objects with one key, the tool's name (Apertus)."""
    calls = json_text.parsed(text)
    if not isinstance(calls, list) or not calls:
        raise ValueError("it is no list of calls")
    if not all(isinstance(call, dict) and len(call) == 1 for call in calls):
        raise ValueError("a call has one name")
    return [tool_call(name, own, tools) for call in calls for name, own in call.items()]


_HY3_CALL = re.compile(
    "<tool_call:opensource>(?P<name>.*?)<tool_sep:opensource>(?P<arguments>.*?)"
    "</tool_call:opensource>",
    re.DOTALL,
)
_HY3_MARKER = re.compile("(</?arg_(?:key|value)):opensource>")


def hy3_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """As GLM writes arguments, in markers that are named otherwise."""
    found = []
    for call in _HY3_CALL.finditer(text):
        name, arguments = call["name"].strip(), call["arguments"].strip()
        if arguments:
            as_glm = name + "\n" + _HY3_MARKER.sub(r"\1>", arguments)
            found += parse_with("glm47", as_glm, tools)
        else:
            found.append(tool_call(name, {}, tools))
    return some(found)


_DSML_CALL = re.compile('<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML_ARGUMENT = re.compile(
    '<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)


def dsml_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """DeepSeek V3.2's and V4's, which say of each argument whether it is a text or JSON."""
    found = []
    for name, inside in _DSML_CALL.findall(text):
        arguments = {
            key: value if is_text == "true" else json_text.parsed(value)
            for key, is_text, value in _DSML_ARGUMENT.findall(inside)
        }
        found.append(tool_call(name, arguments, tools))
    return some(found)


def longcat_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """With mlx-lm's parser, which knows no call without arguments."""
    bare = text.strip()
    if bare in {tool.name for tool in tools}:
        return [tool_call(bare, {}, tools)]
    return parse_with("longcat", text, tools)


M3 = "]<]minimax[>["
"""What stands before each tag that MiniMax M3 writes."""

_M3_CALL = re.compile(
    '@<invoke name="([^"]+)">(.*?)@</invoke>'.replace("@", re.escape(M3)), re.DOTALL
)
_M3_TAG = re.compile(r"<(/?)([^>]+)>(.*)", re.DOTALL)


def m3_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """Arguments as elements, what is in objects and lists (`item`) as elements in them."""
    schemas = {tool.name: tool.schema.get("properties", {}) for tool in tools}
    found = []
    for name, inside in _M3_CALL.findall(text):
        values = _elements(inside)
        own = schemas.get(name, {})
        arguments = {key: _typed(value, own.get(key)) for key, value in values}
        found.append(tool_call(name, arguments, tools))
    return some(found)


_Element = tuple[str, "str | list[_Element]"]


def _elements(text: str) -> list[_Element]:
    """The elements of a text, each a name and its text or the elements in it."""
    open_ones: list[tuple[str, str, list[_Element]]] = [("", "", [])]
    for piece in text.split(M3)[1:]:
        if (tag := _M3_TAG.match(piece)) is None:
            raise ValueError(f"{piece!r} is no tag")
        closes, name, after = tag.groups()
        if not closes:
            open_ones.append((name, after, []))
            continue
        opened, said, inner = open_ones.pop()
        if opened != name or not open_ones:
            raise ValueError(f"</{name}> closes nothing")
        open_ones[-1][2].append((name, inner or said))
    if len(open_ones) != 1:
        raise ValueError(f"<{open_ones[-1][0]}> is not closed")
    return open_ones[0][2]


def _typed(value: str | list[_Element], schema: Any) -> Any:
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, str):
        if schema.get("type") == "string":
            return value
        try:
            return json_text.parsed(value)
        except ValueError:
            return value
    if all(name == "item" for name, _ in value):
        return [_typed(one, schema.get("items")) for _, one in value]
    own = schema.get("properties", {})
    return {name: _typed(one, own.get(name)) for name, one in value}
