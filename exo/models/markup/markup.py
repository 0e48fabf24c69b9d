"""How a model marks its thoughts and its calls of tools in what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from exo.models.grammar import composed, quoted, styled
from exo.models.markup.call_format import CallFormat
from exo.models.markup.call_grammar import calls_grammar, lark_text
from exo.models.markup.formats import format_of, hermes
from exo.models.markup.reader import AnswerReader, HarmonyReader, PlainReader, TaggedReader
from exo.models.markup.tools import Tool, ToolChoice

_THINKING = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<reasoning>", "</reasoning>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)


HARMONY_THOUGHT, HARMONY_END = "<|channel|>analysis<|message|>", "<|end|>"
HARMONY_AGAIN, HARMONY_FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
"""What gpt-oss opens and ends its thoughts with, and what comes after them."""


@dataclass(frozen=True)
class Markup:
    """`thinking`: what opens and closes thoughts, None for models that do not think. `calls`: the
    format of tool calls; `knows_tools` if the template itself tells the model of tools. `special`:
    ids of the tokens that are markers and no text. `harmony`: gpt-oss's channels instead."""

    thinking: tuple[str, str] | None = None
    calls: CallFormat | None = None
    knows_tools: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    harmony: bool = False

    @property
    def thinks(self) -> bool:
        return self.harmony or self.thinking is not None

    @cached_property
    def shown_tokens(self) -> Mapping[int, str]:
        """Special tokens whose text a reader needs, by id."""
        wanted = HarmonyReader.markers if self.harmony else self._markers()
        return {i: text for text, i in self.special.items() if any(text in mark for mark in wanted)}

    def _markers(self) -> list[str]:
        found = [*(self.thinking or ())]
        if self.calls is not None:
            found += [self.calls.opens, self.calls.closes]
            style = self.calls.style
            found += [style.before, style.middle, style.after]
            found += [style.argument or "", style.text_argument or ""]
            found += [style.argument_end, *(style.raw_texts or ())]
        return found

    def opened(self, prompt: str) -> bool:
        """Whether a prompt's text ends within a thought."""
        if self.thinking is None:
            return False
        opens, closes = self.thinking
        return prompt.rfind(opens) > prompt.rfind(closes) and prompt.rstrip().endswith(opens)

    def reader(
        self, tools: Sequence[Tool], *, thinks: bool = False, enforced: bool = False
    ) -> AnswerReader:
        """Of one answer; `thinks` if the prompt opened a thought, `enforced` if a grammar holds the
        calls to their format."""
        if self.harmony:
            return HarmonyReader(tools)
        if self.thinking is None and not tools:
            return PlainReader()
        return TaggedReader(self.thinking, self.calls, tools, thinks=thinks, enforced=enforced)


def answer_grammar(
    markup: Markup,
    tools: Sequence[Tool],
    choice: ToolChoice,
    answer: str | None,
    *,
    after_thoughts: bool = False,
) -> str | None:
    """The grammar that holds an answer to a format, to the tools that it has to call, and to what
    strict tools take; None where nothing holds it. Thoughts in harmony's channels are part of it,
    unless it is for what comes `after_thoughts`; those of other models never are."""
    enforced = choice.mode == "required" or any(tool.strict for tool in tools)
    if not tools or not (enforced or answer):
        if not markup.harmony or answer is None:
            return answer
        tools = ()
    if markup.harmony:
        answer = answer if choice.mode != "required" or not tools else None
        return _harmony(markup, tools, answer, after_thoughts)
    assert markup.calls is not None
    rules = calls_grammar(markup.calls, tools, markup.special, parallel=choice.parallel)
    if choice.mode == "required":
        return composed(f"start: calls\n{rules}", None)
    if answer is not None:
        return composed(f"start: calls | @answer\n{rules}", answer)
    opens = markup.calls.opens
    if opens in markup.special:
        return composed(f"start: said calls?\nsaid: /(?s:.*)/\n{rules}", None)
    begin = f"said: /(?s:.*)/\nopening[suffix={quoted(opens)}]: /(?s:.*)/"
    return composed(f"start: said | opening rest\n{begin}\n{rules}", None)


def _harmony(
    markup: Markup, tools: Sequence[Tool], answer: str | None, after_thoughts: bool
) -> str:
    """Thoughts if it likes, then a call or the final message."""

    def lark(text: str) -> str:
        return lark_text(text, markup.special)

    ends, rules = [], []
    if answer is not None:
        ends.append(lark(HARMONY_FINAL) + " @answer")
    for i, tool in enumerate(tools):
        header = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        ends.append(f"{lark(header)} arguments_{i}")
        rules.append(f"arguments_{i}: %json {json.dumps(styled(tool.schema))}")
    again = lark(HARMONY_AGAIN)
    if not after_thoughts:
        again = f"{lark(HARMONY_THOUGHT)} thought {lark(HARMONY_END)} {again}"
        rules.append("thought: /(?s:.*)/")
    return composed("\n".join([f"start: ({again})? ({' | '.join(ends)})", *rules]), answer)


def markup_of(template: str, special: Mapping[str, int], known: Mapping[str, int]) -> Markup:
    """What a chat template and a vocabulary tell. `special`: ids of the tokens that are no text,
    `known`: of all that were added to the vocabulary."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Markup(None, None, "tools" in template, special, harmony=True)
    thinking = next(
        (pair for pair in _THINKING if pair[0] in template and pair[1] in template), None
    )
    if thinking is None:  # templates that say nothing of it, over tokens that do
        thinking = next((pair for pair in _THINKING if all(one in known for one in pair)), None)
    knows_tools = re.search(r"\btools\b", template) is not None
    calls = format_of(template) if knows_tools else None
    if calls is None and knows_tools:  # a template that lists tools, over tokens that tell the rest
        calls = format_of(" ".join(known))
    # A template that lists tools in a format nobody here reads is better asked for one that is.
    return Markup(thinking, calls or hermes(), calls is not None, special)
