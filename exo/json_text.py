"""JSON that others wrote: people's files, datagrams, requests, models' answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_DEPTH = 128
"""Objects and lists within each other. What walks through JSON, here and in libraries, calls itself
for each, and Python ends that at some hundreds; nothing that people write comes near."""


def parsed(text: str | bytes) -> Any:
    """Raises ValueError: it is no JSON, or nested deeper than MAX_DEPTH."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    check_depth(found)
    return found


def parsed_object(text: str | bytes) -> dict[str, Any]:
    """Raises ValueError: it is no JSON object, or nested deeper than MAX_DEPTH."""
    found = parsed(text)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def object_in(file: Path) -> dict[str, Any]:
    """Raises OSError, and ValueError as `parsed_object` does."""
    return parsed_object(file.read_bytes())


def check_depth(found: Any) -> None:
    """Raises ValueError: objects and lists are nested deeper than MAX_DEPTH."""
    level = [found]  # all that is at one depth
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if any(isinstance(one, (dict, list)) for one in level):
        raise _too_deep()


def _inside(outer: Any) -> Iterable[Any]:
    if isinstance(outer, dict):
        return outer.values()
    return outer if isinstance(outer, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
