"""A checkpoint's chat template: Jinja, in a sandbox, with what templates on the hub expect.

What that is: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from exo.errors import InvalidRequest, ModelUnsupported


class ChatTemplate:
    """`source`: the template's text; `names`: what it may use beside the messages, like bos_token.

    Raises:
        ModelUnsupported: it is no template.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnsupported(f"the model's chat template is broken: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, continues: bool = False, **more: Any
    ) -> str:
        """The text of a conversation, up to where the assistant begins to answer, or with
        `continues` to the end of its last message.

        Raises:
            InvalidRequest: the template refuses the conversation.
        """
        given = {"add_generation_prompt": not continues, **self._names, **more}
        try:
            text = self._template.render(messages=[*messages], **given)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
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


def find_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The default template of a checkpoint: a file of its own, else the entry of its
    tokenizer_config.json (`config`), which may list several by name."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    file = path / "chat_template.json"
    found = config.get("chat_template")
    if found is None and file.is_file():
        found = json.loads(file.read_text("utf-8")).get("chat_template")
    if isinstance(found, list):
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("default") or next(iter(by_name.values()), None)
    return found if isinstance(found, str) else None


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model is trained on; here it stands for its content."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
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
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
