"""mlx-lm's parsers of tool calls, without what importing mlx-lm itself brings along."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from exo.models.markup.tools import Tool, ToolCall, tool_call

_PACKAGE = "_mlx_lm_tool_parsers"


@cache
def parser_module(name: str) -> ModuleType:
    """One of mlx_lm.tool_parsers, which need nothing else of mlx-lm. It says with which texts calls
    begin and end (tool_call_start, tool_call_end) and reads what is between (parse_tool_call)."""
    if _PACKAGE not in sys.modules:
        found = importlib.util.find_spec("mlx_lm")
        assert found is not None and found.origin is not None
        folder = Path(found.origin).parent / "tool_parsers"
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def parse_with(name: str, text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """The calls in what a model wrote between the markers. Raises ValueError if there are none."""
    try:
        found = parser_module(name).parse_tool_call(text, [tool.for_template() for tool in tools])
    except Exception as error:  # parsers of text that may be anything raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    calls = found if isinstance(found, list) else [found]
    return some([tool_call(call.get("name"), call.get("arguments"), tools) for call in calls])


def some(calls: list[ToolCall]) -> list[ToolCall]:
    """The calls that were read. Raises ValueError if there are none."""
    if not calls:
        raise ValueError("there is no call in it")
    return calls
