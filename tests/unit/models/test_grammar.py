"""Grammars of what clients send: texts that fit are taken, others are not."""

from __future__ import annotations

import pytest

from exo.errors import InvalidRequest
from exo.models import grammar
from exo.models.grammar import Follower
from exo.models.tokenizer import ByteTokenizer

VOCABULARY = ByteTokenizer().vocabulary
END = 257


def fits(of: str, text: str) -> bool:
    VOCABULARY.check(of)
    follower = Follower(VOCABULARY, of)
    for byte in text.encode():
        if not follower.allowed()[byte]:
            return False
        follower.take(byte)
    return bool(follower.allowed()[END])


def test_kinds_of_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert fits(grammar.of_json_schema(schema), '{"a": 12}')
    assert not fits(grammar.of_json_schema(schema), '{"a": "x"}')
    assert fits(grammar.of_any_json(), '{"x": [1, null, {"y": ""}]}')
    assert fits(grammar.of_regex(r"\d{3}/[a-c]+"), "123/ab")
    assert not fits(grammar.of_regex(r"\d{3}"), "12")
    assert fits(grammar.of_choices(["yes", 'n"o']), 'n"o')
    assert not fits(grammar.of_choices(["yes", "no"]), "maybe")
    assert fits(grammar.of_lark("start: A+\nA: /[xy]/"), "xyx")
    assert fits(grammar.of_lark('root ::= "a" b\nb ::= [0-9]+'), "a42")


def test_objects_whose_properties_are_named_have_no_others() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert not fits(grammar.of_json_schema(point), '{"x": 1, "y": 2}')
    assert fits(grammar.of_json_schema(point | {"additionalProperties": True}), '{"y": 2}')
    both = {"allOf": [point, {"type": "object", "properties": {"y": {"type": "integer"}}}]}
    assert fits(grammar.of_json_schema(both), '{"x": 1, "y": 2}')
    nested = {"type": "array", "items": {"anyOf": [point, {"type": "null"}]}}
    assert not fits(grammar.of_json_schema(nested), '[{"x": 1, "y": 2}]')


def test_recursion() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    assert fits(
        grammar.of_json_schema({"$ref": "#/$defs/node", "$defs": {"node": node}}),
        '{"next": {"next": {}}}',
    )


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (grammar.of_json_schema({"type": "wizard"}), "wizard"),
        (grammar.of_regex("(a"), "regex"),
        (grammar.of_lark("start: nobody"), "nobody"),
        (grammar.of_lark("start: " + "x" * 300_000), "bytes"),
    ],
)
def test_what_cannot_be_held_to_is_refused(broken: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        VOCABULARY.check(broken)
