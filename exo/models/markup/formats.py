"""How families of models write calls of tools: told from the chat template, read, and as grammars.

Sources: the templates themselves, and mlx-lm's parsers for those named there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from exo.models.grammar import quoted, styled
from exo.models.markup.library import parse_with, parser_module
from exo.models.markup.tools import Tool, ToolCall, tool_call

Parse = Callable[[str, Sequence[Tool]], list[ToolCall]]


@dataclass(frozen=True)
class CallStyle:
    """What a call looks like between a format's markers, for grammars. The text is `lead`, then
    calls with `between` between them, then `trail`; a call is `before`, its name, `middle`, its
    arguments, `after`. Without `between` each call has markers of its own.

    Arguments are one JSON object, or written out one by one: `argument` before each value, with its
    name for {}, `argument_end` after it; texts raw if `raw_texts`, else as JSON, with
    `text_argument` before them where it is another.
    """

    before: str
    middle: str
    after: str = ""
    lead: str = ""
    trail: str = ""
    between: str | None = None
    argument: str | None = None
    text_argument: str | None = None
    argument_end: str = ""
    argument_between: str = ""
    raw_texts: tuple[str, str] | None = None

    @property
    def streams(self) -> bool:
        """Arguments are JSON that can be passed on as it comes."""
        return self.argument is None


@dataclass(frozen=True)
class CallFormat:
    """`opens` and `closes` are the markers around calls; without `closes` they go on to the end of
    the answer. `parse` reads what is between, `style` is what a grammar writes there."""

    name: str
    opens: str
    closes: str
    parse: Parse
    style: CallStyle


def _library(name: str, style: CallStyle, parse: Parse | None = None) -> Callable[[], CallFormat]:
    """One of mlx-lm's, with its markers, and its parser unless there is another."""

    def make() -> CallFormat:
        module = parser_module(name)
        opens, closes = module.tool_call_start, module.tool_call_end
        return CallFormat(name, opens, closes, parse or partial(parse_with, name), style)

    return make


def _json_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
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


def _deepseek_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    found = [
        tool_call(call["name"].strip(), call["arguments"], tools)
        for call in _DEEPSEEK_CALL.finditer(text)
    ]
    if not found:
        raise ValueError("there is no call in it")
    return found


def _named_arguments(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
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


def _hy3_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
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


def _dsml_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
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


def _longcat_calls(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """With mlx-lm's parser, which knows no call without arguments."""
    bare = text.strip()
    if bare in {tool.name for tool in tools}:
        return [tool_call(bare, {}, tools)]
    return parse_with("longcat", text, tools)


def _simple(name: str, opens: str, closes: str, parse: Parse, style: CallStyle) -> Any:
    return lambda: CallFormat(name, opens, closes, parse, style)


_HERMES_STYLE = CallStyle('{"name": "', '", "arguments": ', "}", lead="\n", trail="\n")
_QWEN_CODER_STYLE = CallStyle(
    "<function=",
    ">\n",
    "</function>",
    lead="\n",
    trail="\n",
    argument="<parameter={}>\n",
    argument_end="\n</parameter>\n",
    raw_texts=("", ""),
)
_MINIMAX_STYLE = CallStyle(
    '<invoke name="',
    '">\n',
    "</invoke>",
    lead="\n",
    trail="\n",
    between="\n",
    argument='<parameter name="{}">',
    argument_end="</parameter>\n",
    raw_texts=("", ""),
)


def _keyed_style(prefix: str = "") -> CallStyle:
    return CallStyle(
        "",
        "\n",
        argument=f"<{prefix}arg_key>{{}}</{prefix}arg_key>\n<{prefix}arg_value>",
        argument_end=f"</{prefix}arg_value>\n",
        raw_texts=("", ""),
    )


_MINICPM_STYLE = CallStyle(
    '"',
    '">',
    argument='<param name="{}">',
    argument_end="</param>",
    raw_texts=("<![CDATA[", "]]>"),
)
_MUSE_STYLE = CallStyle(
    '<atem:invoke name="',
    '">\n',
    "</atem:invoke>",
    lead="\n",
    trail="\n",
    between="\n",
    argument='<atem:parameter name="{}">',
    argument_end="</atem:parameter>\n",
)
_KIMI_3_STYLE = CallStyle(
    '<|open|>call tool="',
    '" index="1"<|sep|><|open|>json type="object"<|sep|>',
    "<|close|>json<|sep|><|close|>call<|sep|>",
    between="",
)
_KIMI_STYLE = CallStyle(
    "<|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    between="",
)
_PYTHONIC_STYLE = CallStyle(
    "", "(", ")", lead="[", trail="]", between=", ", argument="{}=", argument_between=", "
)
_FUNCTION_GEMMA_STYLE = CallStyle(
    "call:", "{", "}", argument="{}:", argument_between=",", raw_texts=("<escape>", "<escape>")
)
_GEMMA_4_STYLE = CallStyle(
    "call:", "{", "}", argument="{}:", argument_between=",", raw_texts=('<|"|>', '<|"|>')
)
_DEEPSEEK_3_STYLE = CallStyle(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    between="\n",
)
_DEEPSEEK_31_STYLE = CallStyle(
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", between=""
)
_COHERE_STYLE = CallStyle(
    '{"tool_call_id": "0", "tool_name": "',
    '", "parameters": ',
    "}",
    lead="[\n    ",
    trail="\n]",
    between=",\n    ",
)
_APERTUS_STYLE = CallStyle('{"', '": ', "}", lead="[", trail="]", between=", ")
_SEED_STYLE = CallStyle(
    "<function=",
    ">\n",
    "</function>",
    lead="\n",
    trail="\n",
    argument="<parameter={}>",
    argument_end="</parameter>\n",
    raw_texts=("", ""),
)
_HY3_STYLE = CallStyle(
    "<tool_call:opensource>",
    "<tool_sep:opensource>\n",
    "</tool_call:opensource>\n",
    lead="\n",
    between="",
    argument="<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>",
    argument_end="</arg_value:opensource>\n",
    raw_texts=("", ""),
)
_DSML_STYLE = CallStyle(
    '<｜DSML｜invoke name="',
    '">\n',
    "</｜DSML｜invoke>\n",
    lead="\n",
    between="",
    argument='<｜DSML｜parameter name="{}" string="false">',
    text_argument='<｜DSML｜parameter name="{}" string="true">',
    argument_end="</｜DSML｜parameter>\n",
    raw_texts=("", ""),
)
_LIST_STYLE = CallStyle('{"name": "', '", "arguments": ', "}", lead="[", trail="]", between=", ")

_COHERE = _simple("cohere", "<|START_ACTION|>", "<|END_ACTION|>", _json_calls, _COHERE_STYLE)
_HY3 = _simple("hy3", "<tool_calls:opensource>", "</tool_calls:opensource>", _hy3_calls, _HY3_STYLE)


def _dsml(calls: str) -> Any:
    opens, closes = f"<｜DSML｜{calls}>", f"</｜DSML｜{calls}>"
    return _simple("deepseek_v32", opens, closes, _dsml_calls, _DSML_STYLE)


# Told by texts that stand in the template, the most telling first; all of a row must be there.
_TOLD_BY: tuple[tuple[tuple[str, ...], Callable[[], CallFormat]], ...] = (
    (("<|START_ACTION|>", '"tool_name":'), _COHERE),
    (("<tool_calls{}>", ":opensource"), _HY3),
    (("<tool_calls:opensource>",), _HY3),
    (("｜DSML｜", "function_calls>"), _dsml("function_calls")),
    (("｜DSML｜", "tool_calls>"), _dsml("tool_calls")),
    (
        ("<seed:tool_call>", "<function="),
        _simple(
            "seed_oss",
            "<seed:tool_call>",
            "</seed:tool_call>",
            partial(parse_with, "qwen3_coder"),
            _SEED_STYLE,
        ),
    ),
    (
        ("<|tools_prefix|>",),
        _simple(
            "apertus", "<|tools_prefix|>", "<|tools_suffix|>", _named_arguments, _APERTUS_STYLE
        ),
    ),
    (
        ("<TOOLCALL>",),
        _simple("nemotron", "<TOOLCALL>", "</TOOLCALL>", _json_calls, _LIST_STYLE),
    ),
    (("<minimax:tool_call>",), _library("minimax_m2", _MINIMAX_STYLE)),
    (("<|tool_call>", "<tool_call|>"), _library("gemma4", _GEMMA_4_STYLE)),
    (("<start_function_call>",), _library("function_gemma", _FUNCTION_GEMMA_STYLE)),
    (("<longcat_tool_call>",), _library("longcat", _keyed_style("longcat_"), _longcat_calls)),
    (("<arg_key>",), _library("glm47", _keyed_style())),
    (("<|tool_call_start|>",), _library("pythonic", _PYTHONIC_STYLE)),
    (("<|tool_list_start|>",), _library("pythonic", _PYTHONIC_STYLE)),
    (("<tool_call>", "<function="), _library("qwen3_coder", _QWEN_CODER_STYLE)),
    (("<|open|>", "<|sep|>", "<|close|>"), _library("kimi_k3", _KIMI_3_STYLE)),
    (("<|tool_calls_section_begin|>",), _library("kimi_k2", _KIMI_STYLE)),
    (('<function name="', '<param name="'), _library("minicpm5", _MINICPM_STYLE)),
    (("<atem:function_calls>",), _library("muse_spark", _MUSE_STYLE)),
    (
        ("<｜tool▁calls▁begin｜>", "```json"),
        _simple(
            "deepseek_v3",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            _deepseek_calls,
            _DEEPSEEK_3_STYLE,
        ),
    ),
    (
        ("<｜tool▁calls▁begin｜>",),
        _simple(
            "deepseek_v31",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            _deepseek_calls,
            _DEEPSEEK_31_STYLE,
        ),
    ),
    (("[TOOL_CALLS]", "[ARGS]"), _library("mistral", CallStyle("", "[ARGS]"))),
    (
        ("[TOOL_CALLS]",),
        _library(
            "mistral",
            CallStyle('{"name": "', '", "arguments": ', "}", " [", "]", between=", "),
        ),
    ),
    (("<tool_call>",), _library("json_tools", _HERMES_STYLE)),
    (("<|tool_call|>",), _simple("granite", "<|tool_call|>", "", _json_calls, _LIST_STYLE)),
    (
        ('{"name": "', '"parameters":', "tool_call"),
        _simple(
            "llama3",
            '{"name": ',
            "",
            lambda text, tools: _json_calls('{"name": ' + text, tools),
            CallStyle('"', '", "parameters": ', "}"),
        ),
    ),
)

hermes = _library("json_tools", _HERMES_STYLE)
"""What models are asked to write whose templates know no tools."""


def format_of(template: str) -> CallFormat | None:
    """The format a template's model writes calls in; None where that is not known."""
    for texts, make in _TOLD_BY:
        if all(text in template for text in texts):
            return make()
    return None


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
        value = _value(one, of, shared, style, special, rules)
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
