"""The vendors' own clients, each imported when it is first used: they take a second or two apiece,
in every process that only collects the tests."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    return import_module(name)
