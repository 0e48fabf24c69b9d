"""Bodies of requests: each a struct that checks itself, and what is wrong with one in words.

A body is described by its type alone, which openapi.py turns into what /openapi.json says of it.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from exo import json_text
from exo.errors import InvalidRequest

Wanted = TypeVar("Wanted", bound="Body")


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client sends. Fields that are null count as not given."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that are."""
        return frozenset(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    def refuse(self, **only: tuple[Any, ...]) -> None:
        """Raises InvalidRequest for a field that is given and not one of the values that ask for
        nothing, which is all that is served of it."""
        for name, values in only.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise InvalidRequest(f"{name}={shown(value)} is not supported", param=name)


def shown(value: Any) -> str:
    """A value as a message quotes it."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


async def read_body(http: web.Request, kind: type[Wanted]) -> Wanted:
    """Raises InvalidRequest if the body is not JSON, or not of this kind; `param` says where."""
    data = await http.read()
    if data.count(b"[") + data.count(b"{") > json_text.MAX_DEPTH:
        try:
            json_text.check_depth(msgspec.json.decode(data))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise _not_json(error) from error
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        pass  # it is JSON so far: what is wrong is said below
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from error
    try:
        decoded = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from error
    return body_from(decoded, kind)


def _not_json(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the request body cannot be read as JSON: {error}")


def body_from(data: Any, kind: type[Wanted]) -> Wanted:
    """The same of JSON that is decoded already, in which unknown fields may be null."""
    if isinstance(data, dict):
        data = {name: value for name, value in data.items() if value is not None}
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _named(error) from error


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$(?P<at>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?: - at `\$(?P<at>.*)`)?")
_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<at>.*)`)?", re.DOTALL)


def _named(error: msgspec.ValidationError) -> InvalidRequest:
    """The library's message with the field first, as people look for it."""
    for pattern, said in ((_UNKNOWN, "unknown parameter {}"), (_MISSING, "{} is missing")):
        if found := pattern.fullmatch(str(error)):
            name = f"{found['at'] or ''}.{found['name']}".lstrip(".")
            return InvalidRequest(said.format(name), param=name)
    found = _WRONG.fullmatch(str(error))
    assert found is not None
    at = (found["at"] or "").lstrip(".")
    what = found["what"].replace("`", "").replace("Expected", "expected", 1)
    if not at:
        return InvalidRequest(f"the request body must be a JSON object: {what}")
    return InvalidRequest(f"{at}: {what}", param=at)
