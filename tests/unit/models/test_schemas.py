"""Two hundred JSON schemas as people write them: whatever ends under their grammars is valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from exo.errors import InvalidRequest
from exo.models import grammar
from exo.models.grammar import Follower
from exo.models.tokenizer import ByteTokenizer

VOCABULARY = ByteTokenizer().vocabulary
END = 257
LONGEST = 4000


def leaf(chance: random.Random) -> dict[str, Any]:
    low = chance.randrange(-20, 20)
    return chance.choice(
        [
            {"type": "string", "maxLength": chance.randrange(8)},
            {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"},
            {"type": "string", "format": chance.choice(["date", "time", "date-time", "uuid"])},
            {"type": "string", "format": chance.choice(["email", "ipv4", "hostname"])},
            {"type": "integer", "minimum": low, "maximum": low + chance.randrange(30)},
            {"type": "integer", "exclusiveMinimum": 0, "maximum": 9},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["a", 'with "quotes"', "é\n", 7, None, {"x": [1]}]},
            {"const": {"kind": "fixed"}},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        ]
    )


def schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = chance.random()
    if depth >= 3 or kind < 0.25:
        return leaf(chance)
    if kind < 0.6:
        names = chance.sample(
            ["a", "b", "long name", 'qu"ote', "é", "_x", "type"], chance.randrange(4)
        )
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: schema(chance, depth + 1) for name in names},
            "required": [name for name in names if chance.random() < 0.6],
        }
        if chance.random() < 0.2:
            found["additionalProperties"] = chance.choice([False, {"type": "boolean"}])
        return found
    if kind < 0.8:
        least = chance.randrange(2)
        most = least + chance.randrange(3)
        return {
            "type": "array",
            "items": schema(chance, depth + 1),
            "minItems": least,
            "maxItems": most,
        }
    if kind < 0.9:
        return {"anyOf": [schema(chance, depth + 1), schema(chance, depth + 1)]}
    tree = {
        "type": "object",
        "properties": {
            "value": leaf(chance),
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        },
        "required": ["value"],
    }
    return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}} if depth == 0 else leaf(chance)


def written(of: str, chance: random.Random) -> str | None:
    """What a model without sense writes, that likes to come to an end; None if it does not."""
    follower, text = Follower(VOCABULARY, of), bytearray()
    liked = set(b'"}],0-a')
    while len(text) < LONGEST:
        may = np.flatnonzero(follower.allowed()).tolist()
        if END in may and chance.random() < 0.5:
            return text.decode()
        choices = [token for token in may if token in liked and chance.random() < 0.7] or may
        token = chance.choice(choices)
        if token == END:
            return text.decode()
        follower.take(token)
        text.append(token)
    return None


@pytest.mark.parametrize("seed", range(200))
def test_what_ends_is_valid(seed: int) -> None:
    chance = random.Random(seed)
    wanted = schema(chance)
    of = grammar.of_json_schema(wanted)
    try:
        VOCABULARY.check(of)
    except InvalidRequest as error:
        # The library says what it cannot express, or that nothing is valid.
        assert "nsatisfiable" in error.message or "not supported" in error.message, error.message
        return
    checker = jsonschema.Draft202012Validator(
        wanted, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for _ in range(3):
        text = written(of, chance)
        if text is not None:
            # RFC 3339 has a year 0 and leap seconds, Python's dates have not.
            text = text.replace('"0000-', '"2000-').replace(":60", ":59")
            checker.validate(json.loads(text))
