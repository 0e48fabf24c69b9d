"""Readers of what models write between a format's markers, beside mlx-lm's (library.py).

All raise ValueError where there is no call that can be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from exo.models.markup.library import parse_with
from exo.models.markup.tools import Tool, ToolCall, tool_call


def json_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """One object, a list of them, or several with ; or line breaks between (Llama 3, Granite,
    Cohere)."""
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
    if not found:
        raise ValueError("there is no call in it")
    return found


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
    if not found:
        raise ValueError("there is no call in it")
    return found


def named_arguments(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """A list of objects with one key, the tool's name (Apertus)."""
    calls = json.loads(text)
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
    if not found:
        raise ValueError("there is no call in it")
    return found


_DSML_CALL = re.compile('<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML_ARGUMENT = re.compile(
    '<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)


def dsml_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """DeepSeek V3.2's and V4's, which say of each argument whether it is a text or JSON."""
    found = []
    for name, inside in _DSML_CALL.findall(text):
        arguments = {
            key: value if is_text == "true" else json.loads(value)
            for key, is_text, value in _DSML_ARGUMENT.findall(inside)
        }
        found.append(tool_call(name, arguments, tools))
    if not found:
        raise ValueError("there is no call in it")
    return found


def longcat_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """With mlx-lm's parser, which knows no call without arguments."""
    bare = text.strip()
    if bare in {tool.name for tool in tools}:
        return [tool_call(bare, {}, tools)]
    return parse_with("longcat", text, tools)
