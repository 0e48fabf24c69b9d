"""How families of models write calls of tools, told from the chat template.

Sources: the templates themselves, and mlx-lm's parsers for those named there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from exo.models.markup.call_format import CallFormat, CallStyle, Parse
from exo.models.markup.library import parse_with, parser_module
from exo.models.markup.parsers import (
    M3,
    deepseek_calls,
    dsml_calls,
    hy3_calls,
    json_calls,
    longcat_calls,
    m3_calls,
    named_arguments,
)


def _library(name: str, style: CallStyle, parse: Parse | None = None) -> Callable[[], CallFormat]:
    """One of mlx-lm's, with its markers, and its parser unless there is another."""

    def make() -> CallFormat:
        module = parser_module(name)
        opens, closes = module.tool_call_start, module.tool_call_end
        return CallFormat(name, opens, closes, parse or partial(parse_with, name), style)

    return make


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
_M3_STYLE = CallStyle(
    f'{M3}<invoke name="',
    '">',
    f"{M3}</invoke>\n",
    lead="\n",
    between="",
    argument=f"{M3}<{{}}>",
    argument_end=f"{M3}</{{}}>",
    raw_texts=("", ""),
)
_LINES_STYLE = CallStyle('{"name": "', '", "arguments": ', "}", lead="\n", trail="\n", between="\n")
_LIST_STYLE = CallStyle('{"name": "', '", "arguments": ', "}", lead="[", trail="]", between=", ")

_COHERE = _simple("cohere", "<|START_ACTION|>", "<|END_ACTION|>", json_calls, _COHERE_STYLE)
_HY3 = _simple("hy3", "<tool_calls:opensource>", "</tool_calls:opensource>", hy3_calls, _HY3_STYLE)


def _dsml(calls: str) -> Any:
    opens, closes = f"<｜DSML｜{calls}>", f"</｜DSML｜{calls}>"
    return _simple("deepseek_v32", opens, closes, dsml_calls, _DSML_STYLE)


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
        _simple("apertus", "<|tools_prefix|>", "<|tools_suffix|>", named_arguments, _APERTUS_STYLE),
    ),
    (
        ("<TOOLCALL>",),
        _simple("nemotron", "<TOOLCALL>", "</TOOLCALL>", json_calls, _LIST_STYLE),
    ),
    # Jamba, Apriel
    (
        ("<tool_calls>[",),
        _simple("tool_calls", "<tool_calls>", "</tool_calls>", json_calls, _LIST_STYLE),
    ),
    (
        (r"<tool_calls>\n{",),
        _simple("minimax_m1", "<tool_calls>", "</tool_calls>", json_calls, _LINES_STYLE),
    ),
    (
        ("<|function_call|>",),
        _simple(
            "gigachat",
            "<|function_call|>",
            "",
            json_calls,
            CallStyle('{"name": "', '", "arguments": ', "}"),
        ),
    ),
    (
        (M3, "<tool_call>"),
        _simple("minimax_m3", f"{M3}<tool_call>", f"{M3}</tool_call>", m3_calls, _M3_STYLE),
    ),
    (("<minimax:tool_call>",), _library("minimax_m2", _MINIMAX_STYLE)),
    (("<|tool_call>", "<tool_call|>"), _library("gemma4", _GEMMA_4_STYLE)),
    (("<start_function_call>",), _library("function_gemma", _FUNCTION_GEMMA_STYLE)),
    (("<longcat_tool_call>",), _library("longcat", _keyed_style("longcat_"), longcat_calls)),
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
            deepseek_calls,
            _DEEPSEEK_3_STYLE,
        ),
    ),
    (
        ("<｜tool▁calls▁begin｜>",),
        _simple(
            "deepseek_v31",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            deepseek_calls,
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
    (("<|tool_call|>",), _simple("granite", "<|tool_call|>", "", json_calls, _LIST_STYLE)),
    (
        ('{"name": "', '"parameters":', "tool_call"),
        _simple(
            "llama3",
            '{"name": ',
            "",
            lambda text, tools: json_calls('{"name": ' + text, tools),
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
