"""What templates in the world do with conversations: one system message, none, arguments as texts;
and templates that mean harm."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from exo.errors import InvalidRequest
from exo.models import chat_template
from exo.models.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def render(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source, {}).render(messages)


EACH = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('first only') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


def test_system_messages_go_where_the_template_takes_them() -> None:
    messages = (system("A"), USER, system("B"), USER)
    assert render(EACH, *messages) == "system:A;user:hi;system:B;user:hi;"
    assert render(ONE_SYSTEM, *messages) == "system:A\n\nB;user:hi;user:hi;"
    assert render(NO_SYSTEM, *messages) == "user:A\n\nB\n\nhi;user:hi;"
    assert render(NO_SYSTEM, system("A")) == "user:A;"
    with pytest.raises(InvalidRequest, match="never"):
        render("{{ raise_exception('never') }}", *messages)


ALTERNATING = (
    "{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% endfor %}" + EACH
)


def test_roles_alternate_where_the_template_wants_it() -> None:
    """Mistral's and Gemma's; clients put what they know of a project into a message before the
    user's, and users break in on tools."""
    reply, call = (
        {"role": "assistant", "content": "yes"},
        {"id": "1", "function": {"name": "f", "arguments": {}}},
    )
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    given = {"role": "tool", "content": "42", "tool_call_id": "1"}
    assert render(EACH, USER, USER) == "user:hi;user:hi;"
    assert render(ALTERNATING, USER, USER) == "user:hi\n\nhi;"
    assert (
        render(ALTERNATING, system("A"), reply, USER) == "system:A;user:...;assistant:yes;user:hi;"
    )
    assert (
        render(ALTERNATING, USER, called, given, USER)
        == "user:hi;assistant:;tool:42;assistant:(interrupted);user:hi;"
    )


def test_arguments_are_what_the_template_takes() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    made = {"role": "assistant", "content": "", "tool_calls": [call]}
    as_object = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    as_text = "{% for c in messages[0].tool_calls %}{{ '' + c.function.arguments }}{% endfor %}"
    assert render(as_object, made) == render(as_text, made) == '{"x": 1}'


def test_lists_may_change_but_not_the_callers() -> None:
    """Kimi K2's templates collect the names of calls; others what filters give."""
    source = (
        "{% set found = [] %}{% for m in messages %}{% set _ = found.append(m.content) %}"
        "{% endfor %}{% set _ = messages.append(found.pop()) %}{% set _ = found.append(1) %}"
        "{{ found | tojson }}"
        "{{ messages[:1] | map(attribute='role') | tojson }}"
    )
    messages = [USER]
    assert ChatTemplate(source, {}).render(messages) == '[1]["user"]'
    assert messages == [USER]


HY3 = (
    "{% if reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('effort') }}"
    "{% endif %}{{ reasoning_effort }}"
)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"reasoning_effort": "none"}, "no_think"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "medium"}, "high"),
        ({"reasoning_effort": "low", "enable_thinking": True}, "low"),
        ({"enable_thinking": True}, "high"),
        ({"enable_thinking": False}, "no_think"),
    ],
)
def test_efforts_are_told_in_the_templates_words(asked: dict[str, Any], told: str) -> None:
    assert ChatTemplate(HY3, {}).render([USER], **asked) == told


NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('length 9') }}{% endif %}{{ c.id }}{% endfor %}{% if m.tool_call_id %}"
    "={{ m.tool_call_id }}{% endif %}{% endfor %}"
)


def test_calls_are_named_as_mistrals_templates_want_it() -> None:
    def conversation(name: str) -> list[dict[str, Any]]:
        call = {"id": name, "function": {"name": "f", "arguments": {}}}
        result = {"role": "tool", "content": "x", "tool_call_id": name}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]

    assert render(NINE, *conversation("abcdef123")) == "abcdef123=abcdef123"
    made, told = render(NINE, *conversation("call_0123456789abcdef")).split("=")
    assert made == told and made.isalnum() and len(made) == 9


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set l = [] %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% set _ = l.append(a) %}{% endfor %}{% endfor %}",
        "{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}",
        "{{ 'x' * 999999999 }}",
        "{{ 9 ** 99999999 }}",
        "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    ],
)
@pytest.mark.filterwarnings(
    # It is raised again where Python ignores it.
    "ignore:Exception ignored in.*:pytest.PytestUnraisableExceptionWarning"
)
def test_a_template_that_means_harm_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.3)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            render(source, USER)
        except InvalidRequest as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and failed


def test_the_sandbox_holds() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.clear() }}"):
        with pytest.raises(InvalidRequest):
            render(source, USER)
