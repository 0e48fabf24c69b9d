"""`exo completion`: commands, flags and short names of models, for the shell."""

from __future__ import annotations

import argparse

import shtab

from exo.models.card import registry

_FUNCTION = "_exo_models"


def completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print what the shell is to read."""
    names = " ".join(registry())
    for command in _parsers(parser):
        for action in command._actions:
            if action.dest == "model":
                action.complete = {"bash": _FUNCTION, "zsh": _FUNCTION}  # type: ignore[attr-defined]
    preamble = {
        "bash": f'{_FUNCTION}() {{ compgen -W "{names}" -- "$1"; }}',
        "zsh": f"{_FUNCTION}() {{ compadd -- {names} }}",
    }
    print(shtab.complete(parser, shell=shell, preamble=preamble.get(shell, "")))  # noqa: T201
    return 0


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [one for child in action.choices.values() for one in _parsers(child)]
    return found
