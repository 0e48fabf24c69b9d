"""Calls of tools as grammars: what a model is held to where it has to call one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from exo.models.grammar import quoted, styled
from exo.models.markup.call_format import CallFormat, CallStyle
from exo.models.markup.tools import Tool


def calls_grammar(
    found: CallFormat, tools: Sequence[Tool], special: Mapping[str, int], *, parallel: bool
) -> str:
    """Lark rules of `calls`, one or more of the tools; `rest` is them without the first `opens`.

    `special`: ids of the tokens that stand for themselves and not for text.
    """
    style = found.style
    several = style.between is not None and parallel
    inner = ["call"] + ([f"({lark_text(style.between or '', special)} call)*"] if several else [])
    block = [lark_text(style.lead, special), *inner, lark_text(style.trail + found.closes, special)]
    opens = lark_text(found.opens, special)
    again = (
        f' ("\\n" {opens} block)*' if parallel and style.between is None and found.closes else ""
    )
    rules = [f"calls: {opens} rest", f"rest: block{again}"]
    rules.append(f"block: {' '.join(filter(None, block))}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        parts = [lark_text(style.before + tool.name + style.middle, special), f"arguments_{i}"]
        parts.append(lark_text(style.after, special))
        rules.append(f"call_{i}: {' '.join(filter(None, parts))}")
        rules += _arguments(f"arguments_{i}", tool.schema, style, special)
    return "\n".join(rules)


def _arguments(
    rule: str, schema: dict[str, Any], style: CallStyle, special: Mapping[str, int]
) -> list[str]:
    if style.argument is None:
        return [f"{rule}: %json {json.dumps(styled(schema))}"]
    needed = set(schema.get("required", ()))
    shared = {str(key): schema[key] for key in ("$defs", "definitions") if key in schema}
    rules: list[str] = []
    names: list[tuple[str, bool]] = []
    for i, (name, of) in enumerate(schema.get("properties", {}).items()):
        one = f"{rule}_{i}"
        names.append((one, name in needed))
        ended = replace(style, argument_end=style.argument_end.replace("{}", name))
        value = _value(one, of, shared, ended, special, rules)
        is_text = isinstance(of, dict) and of.get("type") == "string"
        begins = style.text_argument if is_text and style.text_argument else style.argument
        before = lark_text(begins.replace("{}", name), special)
        rules.append(f"{one}: {before} {value}")
    # In the order of the schema, with `argument_between` between those that are there.
    if not style.argument_between:
        wanted = " ".join(one if need else f"{one}?" for one, need in names)
        return [f"{rule}: {wanted or quoted('')}", *rules]
    return [*_listed(rule, names, style.argument_between), *rules]


def _value(
    rule: str,
    schema: Any,
    shared: dict[str, Any],
    style: CallStyle,
    special: Mapping[str, int],
    rules: list[str],
) -> str:
    """What stands for one argument's value, with what ends it; may add `rules`."""
    ends = lark_text(style.argument_end, special)
    is_text = isinstance(schema, dict) and schema.get("type") == "string"
    if style.raw_texts is not None and is_text:
        if choices := schema.get("enum"):
            listed = " | ".join(quoted(str(choice)) for choice in choices)
            opens, closes = (lark_text(quote, special) for quote in style.raw_texts)
            return f"{opens} ({listed}) {closes} {ends}"
        opens, end = style.raw_texts[0], style.raw_texts[1] + style.argument_end
        if special.get(end) is not None:
            return f"{lark_text(opens, special)} /(?s:.*)/ {lark_text(end, special)}"
        rules.append(f"{rule}_text[suffix={quoted(end)}]: /(?s:.*)/")
        return f"{lark_text(opens, special)} {rule}_text"
    rules.append(f"{rule}_json: %json {json.dumps(styled(_with(schema, shared)))}")
    return f"{rule}_json {ends}"


def _with(schema: Any, shared: dict[str, Any]) -> Any:
    return {**shared, **schema} if isinstance(schema, dict) else schema


def _listed(rule: str, names: list[tuple[str, bool]], between: str) -> list[str]:
    """Rules for a list of parts of which some may be missing."""
    rules = [
        f"{rule}: {rule}_from_0 | {quoted('')}"
        if not any(need for _, need in names)
        else f"{rule}: {rule}_from_0"
    ]
    if not names:
        return [f"{rule}: {quoted('')}"]
    for i, (one, need) in enumerate(names):
        rest = names[i + 1 :]
        forms = []
        if rest:
            forms.append(f"{one} {quoted(between)} {rule}_from_{i + 1}")
        if not any(needed for _, needed in rest):
            forms.append(one)
        if not need and rest:
            forms.append(f"{rule}_from_{i + 1}")
        rules.append(f"{rule}_from_{i}: {' | '.join(forms)}")
    return rules


def lark_text(text: str, special: Mapping[str, int]) -> str:
    """A text as Lark has it, the special tokens in it by their ids; "" for nothing."""
    if not text:
        return ""
    names = sorted((name for name in special if name in text), key=len, reverse=True)
    if not names:
        return quoted(text)
    pattern = "(" + "|".join(re.escape(name) for name in names) + ")"
    parts = [part for part in re.split(pattern, text) if part]
    return " ".join(f"<[{special[part]}]>" if part in special else quoted(part) for part in parts)
