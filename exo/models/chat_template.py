"""A checkpoint's chat template: Jinja, in a sandbox, with what templates on the hub expect.

What that is: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.runtime
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from exo import json_text
from exo.errors import InvalidRequest, ModelUnsupported
from exo.models.time_limit import within

RENDER_S = 5.0
"""A template that takes longer is broken, or means harm."""

MAX_RENDERED = 16 * 2**20
"""Characters of a conversation, and of what a template multiplies."""


class ChatTemplate:
    """`source`: the template's text; `names`: what it may use beside the messages, like bos_token.

    Raises:
        ModelUnsupported: it is no template.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        self._efforts = _HY3_EFFORTS if "'no_think'" in source else {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnsupported(f"the model's chat template is broken: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, continues: bool = False, **more: Any
    ) -> str:
        """The text of a conversation, up to where the assistant begins to answer, or with
        `continues` to the end of its last message. Where the template takes one system message
        only, or none, those that are there are put together, or before the first of the user's;
        where it takes arguments of calls as texts, or wants short names of calls, they are; where
        it wants roles to alternate, they do.

        Raises:
            InvalidRequest: the template refuses the conversation, or is never done with it.
        """
        given = {"add_generation_prompt": not continues, **self._names, **self._told(more)}
        refused: Exception | None = None
        tried: list[list[Any]] = []
        for alternates, shape in product((False, True), _SHAPES):
            shaped = shape(messages)
            shaped = _alternating(shaped) if alternates else shaped
            if shaped in tried:
                continue
            tried.append(shaped)
            try:
                text = self._rendered(shaped, given)
                break
            except _REFUSALS as error:
                refused = refused or error
        else:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {refused}", param="messages"
            ) from refused
        if not continues:
            return text
        last = str(messages[-1]["content"]).strip()
        at = text.rfind(last)
        if at < 0:
            raise InvalidRequest(
                "the model's chat template changes the last message: it cannot be gone on with",
                param="messages",
            )
        return text[: at + len(last)]

    def _told(self, options: dict[str, Any]) -> dict[str, Any]:
        """With how long to think, or whether to, in the template's own words."""
        if not self._efforts:
            return options
        effort = options.get("reasoning_effort")
        if effort is None and (wanted := options.get("enable_thinking")) is not None:
            effort = "high" if wanted else "none"
        if effort is None:
            return options
        return {**options, "reasoning_effort": self._efforts.get(effort, effort)}

    def _rendered(self, messages: list[Any], given: dict[str, Any]) -> str:
        """Raises what the template raises; InvalidRequest where it is never done."""

        def render() -> str:
            parts, length = [], 0
            for part in self._template.generate(messages=deepcopy(messages), **given):
                length += len(part)
                if length > MAX_RENDERED:
                    raise InvalidRequest(
                        f"the model's chat template writes more than {MAX_RENDERED} characters",
                        param="messages",
                    )
                parts.append(part)
            return "".join(parts)

        try:
            return within(RENDER_S, render)
        except TimeoutError as error:
            raise InvalidRequest(
                f"the model's chat template is not done with these messages after {RENDER_S:.0f} s",
                param="messages",
            ) from error


_HY3_EFFORTS = {"none": "no_think", "minimal": "low", "medium": "high", "xhigh": "high"}
"""Hy3's template refuses all but no_think, low and high."""

_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template that does not take a conversation ends with."""


def _short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Calls named by nine letters and digits, which Mistral's templates insist on."""

    def short(name: Any) -> str:
        return hashlib.sha256(str(name).encode()).hexdigest()[:9]

    found: list[Any] = []
    for one in messages:
        shaped = dict(one)
        if shaped.get("tool_calls"):
            calls = shaped["tool_calls"]
            shaped["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in calls]
        if "tool_call_id" in shaped:
            shaped["tool_call_id"] = short(shaped["tool_call_id"])
        found.append(shaped)
    return found


def _arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Calls whose arguments are JSON in a text, as OpenAI writes them and few templates expect."""

    def told(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = _to_json(function["arguments"])
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**one, "tool_calls": [told(call) for call in one["tool_calls"]]}
        if one.get("tool_calls")
        else one
        for one in messages
    ]


def _one_system(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All system messages as the first."""
    texts = [str(one["content"]) for one in messages if one["role"] == "system"]
    rest = [one for one in messages if one["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


def _no_system(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Their texts before the first message of the user's."""
    system, *rest = _one_system(messages) or [{}]
    if system.get("role") != "system":
        return list(messages)
    first = next((i for i, one in enumerate(rest) if one["role"] == "user"), None)
    if first is None:
        return [{**system, "role": "user"}, *rest]
    joined = f"{system['content']}\n\n{rest[first]['content']}"
    return [*rest[:first], {**rest[first], "content": joined}, *rest[first + 1 :]]


def _alternating(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What follows its like from the user or the assistant as one message, an answer between what
    tools gave and what the user says then, and something of the user's first."""
    found: list[dict[str, Any]] = []
    for one in messages:
        before = found[-1] if found else {}
        turn, last = one["role"], before.get("role")
        if turn == last and turn in ("user", "assistant") and not before.get("tool_calls"):
            texts = [text for text in (before["content"], one["content"]) if text]
            found[-1] = {**before, **one, "content": "\n\n".join(map(str, texts))}
            continue
        if turn == "user" and last == "tool":
            found.append({"role": "assistant", "content": "(interrupted)"})
        elif turn == "assistant" and last in (None, "system"):
            found.append({"role": "user", "content": "..."})
        found.append(dict(one))
    return found


def _short_ids_one_system(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    return _short_ids(_one_system(messages))


_SHAPES: tuple[Callable[[Sequence[Mapping[str, Any]]], list[Any]], ...] = (
    list,
    _one_system,
    _no_system,
    _arguments_as_text,
    _short_ids,
    _short_ids_one_system,
)


def find_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The default template of a checkpoint: a file of its own, else the entry of its
    tokenizer_config.json (`config`), which may list several by name.

    Raises:
        ModelUnsupported: what there is cannot be read.
    """
    try:
        file = path / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        file = path / "chat_template.json"
        found = config.get("chat_template")
        if found is None and file.is_file():
            found = json_text.object_in(file).get("chat_template")
        if isinstance(found, list):
            by_name = {entry["name"]: entry["template"] for entry in found}
            found = by_name.get("default") or next(iter(by_name.values()), None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnsupported(f"the chat template in {path} cannot be read: {error!r}") from error
    return found if isinstance(found, str) else None


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model is trained on; here it stands for its content."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which nothing can be made endlessly large by a multiplication. Lists may change,
    which Kimi K2's templates ask for: messages are copies."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
        counts = [abs(side) for side in (left, right) if isinstance(side, int)]
        if (sizes and counts and sizes[0] * counts[0] > MAX_RENDERED) or (
            operator == "**" and counts and max(counts) > 1000
        ):
            raise jinja2.TemplateError(f"{operator} makes something too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """What Jinja's filters give, map and select among them."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
