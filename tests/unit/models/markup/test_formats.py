"""Every format of tool calls, written by its own grammar and read again."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from exo.models.grammar import Follower
from exo.models.markup.call_format import CallFormat
from exo.models.markup.formats import _TOLD_BY
from exo.models.markup.markup import Markup, answer_grammar, markup_of
from exo.models.markup.parsers import M3, m3_calls
from exo.models.markup.reader import CallArguments, CallBegun, Said, Thought
from exo.models.markup.tools import Tool, ToolChoice
from exo.models.tokenizer import ByteTokenizer

TOOLS = [
    Tool(
        "get_weather",
        "Of a city",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bern", 'O"x', "São Paulo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
                "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
            },
            "required": ["city"],
        },
    ),
    Tool("stop"),
]
VOCABULARY = ByteTokenizer().vocabulary


FORMATS = [pytest.param(make(), id=f"{make().name}-{texts[-1]}") for texts, make in _TOLD_BY]


def written(grammar: str, seed: int) -> str:
    """A text that a grammar allows, by a model without sense."""
    VOCABULARY.check(grammar)
    chance, follower, text = random.Random(seed), Follower(VOCABULARY, grammar), bytearray()
    while len(text) < 2000:
        token = int(chance.choice(np.flatnonzero(follower.allowed())))
        if token == 257:
            return text.decode()
        follower.take(token)
        text.append(token)
    raise AssertionError(f"it never ends: {text.decode()}")


def read(
    markup: Markup, text: str, *, enforced: bool, step: int = 3, thinks: bool = False
) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = markup.reader(TOOLS, enforced=enforced, thinks=thinks)
    said, thought, calls = "", "", []
    parts = [part for i in range(0, len(text), step) for part in reader.add(text[i : i + step])]
    for part in parts + reader.finish():
        if isinstance(part, CallBegun):
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[-1][1] += part.text
        elif isinstance(part, Thought):
            thought += part.text
        else:
            said += part.text
    return said, thought, [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("found", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_a_grammar_writes_is_read_again(found: CallFormat, parallel: bool) -> None:
    markup = Markup(None, found, True)
    choice = ToolChoice("required", parallel)
    grammar = answer_grammar(markup, TOOLS, choice, None)
    assert grammar is not None
    names = set()
    for seed in range(12):
        text = written(grammar, seed)
        said, _, calls = read(markup, text, enforced=False, step=seed + 1)
        assert not said.strip() and calls, text
        assert read(markup, text, enforced=True, step=seed + 1)[2] == calls, text
        assert parallel or len(calls) == 1
        for name, arguments in calls:
            names.add(name)
            if name == "get_weather":
                assert arguments["city"] in ("Bern", 'O"x', "São Paulo"), text
                assert 1 <= arguments.get("days", 1) <= 5
            else:
                assert arguments == {}
    assert names == {"get_weather", "stop"}


HERMES = markup_of("{{ tools }} <tool_call> <think> </think>", {}, {})


def test_text_thoughts_and_calls_are_parted() -> None:
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\nWell <b>\n{call}\n{call}"
    for step in range(1, 40):
        assert read(HERMES, text, enforced=False, step=step) == (
            "Well <b>",
            "hm",
            [("stop", {}), ("stop", {})],
        )
    assert read(HERMES, "hm</think>so", enforced=False, thinks=True) == ("so", "hm", [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot JSON</tool_call>",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "stop", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "stop", "arg',
        "<tool_call>" + "[" * 5000,
    ],
)
def test_a_call_that_cannot_be_read_stays_text(text: str) -> None:
    assert read(HERMES, text, enforced=False) == (text, "", [])


@pytest.mark.parametrize("found", FORMATS)
def test_no_text_breaks_a_reader(found: CallFormat) -> None:
    chance = random.Random(0)
    style = found.style
    pieces = [found.opens, found.closes, "x", "\n", '"', "{", "}", "stop", ":", "[", "<"]
    pieces += [style.before, style.middle, style.after]
    markup = Markup(("<think>", "</think>"), found, True)
    for _ in range(300):
        text = "".join(chance.choice(pieces) for _ in range(chance.randrange(12)))
        read(markup, text, enforced=False, step=chance.randrange(1, 9))


def test_strict_tools_hold_a_call_once_it_begins() -> None:
    strict = [Tool("stop", strict=True)]
    grammar = answer_grammar(HERMES, strict, ToolChoice("auto"), None)
    assert grammar is not None
    for text, fits in (
        ("Just text", True),
        ('So <tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', True),
        ("So <tool_call>\n{}", False),
    ):
        VOCABULARY.check(grammar)
        follower = Follower(VOCABULARY, grammar)
        may = True
        for byte in text.encode():
            may = bool(follower.allowed()[byte])
            if not may:
                break
            follower.take(byte)
        assert may == fits, text
        assert not fits or follower.allowed()[257]


def test_a_format_beside_tools_is_either() -> None:
    answer = '{"grammars": [{"lark_grammar": "start: \\"yes\\""}]}'
    grammar = answer_grammar(HERMES, TOOLS, ToolChoice("auto"), answer)
    assert grammar is not None
    texts = {written(grammar, seed)[:5] for seed in range(20)}
    assert texts == {"yes", "<tool"}


def test_gpt_oss_speaks_in_channels() -> None:
    markup = markup_of("{{ tools }} <|channel|> <|message|>", {}, {})
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}'
    )
    final = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So"
    for step in range(1, 30):
        weather = ("get_weather", {"city": "Bern"})
        assert read(markup, text, enforced=False, step=step) == ("", "hm", [weather])
        assert read(markup, final, enforced=False, step=step) == ("So", "hm", [])
    for answer in (None, '{"grammars": [{"lark_grammar": "start: \\"yes\\""}]}'):
        mode = "required" if answer is None else "auto"
        grammar = answer_grammar(markup, TOOLS, ToolChoice(mode), answer)
        assert grammar is not None
        VOCABULARY.check(grammar)
        follower = Follower(VOCABULARY, grammar)
        for byte in (text if answer is None else final[:-2] + "yes").encode():
            assert follower.allowed()[byte]
            follower.take(byte)


@pytest.mark.parametrize("thought", ["", "<|start|>assistant"])
def test_gpt_oss_after_its_thoughts(thought: str) -> None:
    markup = markup_of("{{ tools }} <|channel|> <|message|>", {}, {})
    answer = '{"grammars": [{"lark_grammar": "start: \\"yes\\""}]}'
    grammar = answer_grammar(markup, (), ToolChoice(), answer, after_thoughts=True)
    assert grammar is not None
    VOCABULARY.check(grammar)
    follower = Follower(VOCABULARY, grammar)
    for byte in f"{thought}<|channel|>final<|message|>yes".encode():
        assert follower.allowed()[byte]
        follower.take(byte)
    assert follower.allowed()[257]


def test_special_tokens_are_named_by_their_ids() -> None:
    markup = markup_of("{{ tools }}<tool_call>", {"<tool_call>": 5, "</tool_call>": 6}, {})
    grammar = answer_grammar(markup, TOOLS, ToolChoice("required"), None)
    assert grammar is not None and "<[5]>" in grammar and "<[6]>" in grammar
    assert markup.shown_tokens == {5: "<tool_call>", 6: "</tool_call>"}


def test_a_prompt_that_opens_a_thought() -> None:
    assert HERMES.opened("...<think>\n")
    assert not HERMES.opened("...<think>\n\n</think>\n\n")
    assert not HERMES.opened("...assistant\n")


def test_said_is_said_as_soon_as_it_is_certain() -> None:
    reader = HERMES.reader(TOOLS)
    assert reader.add("Well ") == [Said("Well")]
    assert reader.add("<to") == []
    assert reader.add("day") == [Said(" <today")]


WEATHER = ("get_weather", {"city": "Bern", "days": 2})
AS_WRITTEN = {
    # What a family's template says of calls, in short; and an answer, as its models write one.
    "cohere": (
        '{{ tools }}{"name": "", "parameters": } {% for tc in '
        'message.tool_calls %}<|START_THINKING|><|END_THINKING|><|START_ACTION|>[{"tool_call_id": '
        '"{{ tc.id }}", "tool_name": "{{ tc.name }}"',
        "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    "
        '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Bern", '
        '"days": 2}}\n]<|END_ACTION|>',
    ),
    "hy3": (
        "{%- set HYTK = ':opensource' %}{%- set toolcalls_begin_token = "
        "'<tool_calls{}>'.format(HYTK) %}{{ tools }}",
        "<think:opensource>hm</think:opensource><tool_calls:opensource>\n"
        "<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n"
        "<arg_value:opensource>Bern</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>2</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
    ),
    "deepseek_v32": (
        "{% set dsml_token = '｜DSML｜' %}<think></think>{{ tools }}'<' + dsml_token + "
        "'function_calls>'",
        "<think>hm</think>\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "seed_oss": (
        "{{ tools }}<seed:think></seed:think><seed:tool_call>\n<function=name>\n",
        "<seed:think>hm</seed:think>\n<seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Bern</parameter>\n<parameter=days>2</parameter>\n</function>\n"
        "</seed:tool_call>",
    ),
    "apertus": (
        "{{ tools }}{%- set inner_token = '<|inner_prefix|>' %}{% set outer_token = "
        "'<|inner_suffix|>' %}{%- set tool_calls_token = '<|tools_prefix|>' %}",
        '<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>[{"get_weather": {"city": "Bern", '
        '"days": 2}}]<|tools_suffix|>',
    ),
    "nemotron": (
        '{{ tools }}<think></think><TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]',
        '<think>\nhm\n</think>\n\n<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Bern", '
        '"days": 2}}]</TOOLCALL>',
    ),
    "tool_calls": (
        "{%- set turn = 'Here are my reasoning steps:\\n' -%}{{ tools }} after [BEGIN FINAL "
        "RESPONSE] within <tool_call></tool_call> {{ '\\n<tool_calls>[' }}",
        "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\n<tool_calls>[\n    "
        '{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}, "id": "7"}\n]'
        "</tool_calls>",
    ),
    "minimax_m1": (
        "{{ tools }}{{ 'with <tool_calls></tool_calls> tags:\\n<tool_calls>\\n{\"name\"' }}",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}\n'
        "</tool_calls>",
    ),
    "gigachat": (
        '{{ tools }}{%- set add_tokens = namespace(function_call="<|function_call|>") -%}',
        '<|function_call|>{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}',
    ),
    "minimax_m3": (
        "{{ tools }}{%- set ns_token = ']<]minimax[>[' -%}{%- set toolcall_begin_token = "
        "ns_token ~ '<tool_call>' -%}<mm:think></mm:think>",
        '<mm:think>hm</mm:think>]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">'
        "]<]minimax[>[<city>Bern]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>"
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ),
    "llama3": (
        '{{ tools }} Respond in the format {"name": function name, "parameters": dictionary}. '
        "{{ '{\"name\": \"' + tool_call.name + '\", ' }} {{ '\"parameters\": ' }}",
        '{"name": "get_weather", "parameters": {"city": "Bern", "days": 2}}',
    ),
}


@pytest.mark.parametrize("family", AS_WRITTEN)
def test_families_are_told_by_their_templates(family: str) -> None:
    template, answer = AS_WRITTEN[family]
    known = {"<think:opensource>": 1, "</think:opensource>": 2} if family == "hy3" else {}
    markup = markup_of(template, {}, known)
    assert markup.knows_tools and markup.calls is not None and markup.calls.name == family
    thought = "hm" if "hm" in answer else ""
    for step in (1, 7, 1000):
        assert read(markup, answer, enforced=False, step=step) == ("", thought, [WEATHER])


def test_elements_in_elements_are_lists_and_objects() -> None:
    """MiniMax M3's."""
    schema = {
        "type": "object",
        "properties": {
            "who": {"type": "object", "properties": {"name": {"type": "string"}}},
            "when": {"type": "array", "items": {"type": "string"}},
        },
    }
    text = (
        '<invoke name="meet"><who><name>2</name><older>true</older></who>'
        "<when><item>9</item><item>10</item></when></invoke>"
    ).replace("<", f"{M3}<")
    (call,) = m3_calls(text, [Tool("meet", "", schema)])
    expected = {"who": {"name": "2", "older": True}, "when": ["9", "10"]}
    assert json.loads(call.arguments) == expected
    with pytest.raises(ValueError, match="closes nothing"):
        m3_calls(text.replace("</item>", "</thing>", 1), [Tool("meet", "", schema)])
