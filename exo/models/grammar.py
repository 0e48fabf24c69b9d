"""Grammars that an answer can be held to, made of what clients send, through llguidance.

A grammar travels as one text in llguidance's own form, which names its kind: a list of Lark
grammars and JSON schemas that may use each other.
Format: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from exo.errors import InvalidRequest

if TYPE_CHECKING:
    import llguidance

MAX_GRAMMAR_BYTES = 256 * 1024
"""It travels with the steps of a ring."""

# Compact JSON with a space after colons and commas, as models write it themselves; to leave the
# whitespace open lets small models write nothing else for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def of_json_schema(schema: Any) -> str:
    """JSON that is valid for a schema."""
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest(f"a JSON schema is an object, not {schema!r}")
    return _grammars({"json_schema": styled(schema)})


def of_any_json() -> str:
    """Any JSON object."""
    return of_json_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """Texts that a regular expression (of Rust's regex crate) matches as a whole."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(pattern))


def of_choices(choices: Sequence[str]) -> str:
    """One of some texts."""
    return of_lark("start: " + " | ".join(quoted(choice) for choice in choices))


def of_lark(text: str) -> str:
    """Lark, or llama.cpp's GBNF, which is told by its `root ::=`."""
    if "::=" in text:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # the converter raises whatever it stumbles over
            raise InvalidRequest(f"the GBNF grammar cannot be read: {error}") from error
    return _grammars({"lark_grammar": text})


def composed(lark: str, answer: str | None) -> str:
    """A Lark grammar in which `@answer` is another grammar."""
    others = json.loads(answer)["grammars"] if answer is not None else []
    if others:
        others[0] = {**others[0], "name": "answer"}
    return json.dumps({"grammars": [{"lark_grammar": lark}, *others]}, ensure_ascii=False)


def styled(schema: Any) -> Any:
    """The schema with how its JSON is to be written."""
    if not isinstance(schema, dict):
        return schema
    closed = _closed(schema)
    return {**closed, "x-guidance": {**_JSON_STYLE, **schema.get("x-guidance", {})}}


_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "not")


def _closed(schema: Any, *, combined: bool = False) -> Any:
    """Objects whose properties are named have no others unless the schema speaks of them: what is
    valid so is valid by the schema, and models that may add properties often never stop."""
    if isinstance(schema, list):
        return [_closed(one, combined=combined) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(found.get(key), dict):
            found[key] = {name: _closed(one) for name, one in found[key].items()}
    for key in ("items", "prefixItems"):
        if key in found:
            found[key] = _closed(found[key])
    has_own = "properties" in found
    for key in ("anyOf", "oneOf"):
        if key in found:
            found[key] = _closed(found[key], combined=has_own or combined)
    open_ = combined or any(key in found for key in _COMBINED)
    if has_own and not open_ and "unevaluatedProperties" not in found:
        found.setdefault("additionalProperties", False)
    return found


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _grammars(grammar: dict[str, Any]) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


class Vocabulary:
    """A model's tokens as grammars see them.

    `source`: a tokenizer.json's text, or the bytes of each token; `size`: token ids are smaller;
    `ends`: the tokens that end an answer.
    """

    def __init__(self, source: str | Sequence[bytes], size: int, ends: Sequence[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer = source if isinstance(source, str) else TokenizerWrapper(_ByToken(source, ends))
        self.tokenizer = LLTokenizer(tokenizer, n_vocab=size, eos_token=sorted(ends))
        self.size = size

    def check(self, grammar: str) -> None:
        """Raises InvalidRequest if a grammar cannot be held to, with what it cannot express."""
        from llguidance import LLMatcher

        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the grammar has {len(grammar.encode())} bytes; expected up to {MAX_GRAMMAR_BYTES}"
            )
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self.tokenizer)
        if failed:
            raise InvalidRequest(f"the grammar cannot be used: {_first_line(messages)}")


class _ByToken:
    """What llguidance asks of a tokenizer that is not Hugging Face's."""

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = min(ends)
        self.bos_token_id = None
        self.special_token_ids = sorted(ends)
        self._ids = {token: i for i, token in reversed([*enumerate(tokens)])}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text]


class Follower:
    """One answer's way through a grammar.

    Raises:
        InvalidRequest: from any call, where the grammar is broken or needs too much.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        from llguidance import LLMatcher

        self._vocabulary = vocabulary
        self._matcher: llguidance.LLMatcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
        self._check()

    def take(self, token_id: int) -> None:
        """Go on by a token."""
        self._matcher.consume_token(token_id)
        self._check()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocabulary]: which tokens may come next; those that end the answer where it may end."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(mask, bitorder="little").view(np.bool_)[: self._vocabulary.size]

    def forced(self) -> list[int]:
        """The only tokens that can come next, in order; none where the answer may end or several
        can come."""
        return list(self._matcher.compute_ff_tokens())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar failed: {_first_line([self._matcher.get_error()])}")


def _first_line(messages: Sequence[str]) -> str:
    """Of what the library says, what tells people something."""
    text = "; ".join(messages) or "no reason given"
    return text.split("\n<state>", 1)[0].strip()[:500]
