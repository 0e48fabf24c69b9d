"""The `exo` command. Imports are late: `exo --help` is instant."""

from __future__ import annotations

import argparse
import signal
import sys

from exo import __version__
from exo.cli.settings import DEFAULT_API_PORT, add_node_flags, set_up_logging
from exo.errors import ExoError

_DESCRIPTION = """\
exo turns the machines you own into one cluster that runs a language model.

  exo                              start a node; nodes on the LAN find each other
  exo run --prompt "Hello"         one answer in the terminal, through the cluster
  exo run MODEL                    a conversation in the terminal
  exo models                       models that can be used, and where their files are
  exo status                       who is in the cluster, what is loaded where

MODEL is a short name from `exo models`, a Hugging Face repo id, a directory with a config.json,
or a .gguf file. DEBUG=1 … 9 in the environment tells more."""


def build_parser() -> argparse.ArgumentParser:
    """Every command and flag."""
    parser = argparse.ArgumentParser(
        prog="exo",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"exo {__version__}")
    add_node_flags(parser)
    commands = parser.add_subparsers(dest="command", metavar="")

    run = commands.add_parser("run", help="answer in the terminal")
    run.add_argument("model", nargs="?", help="(default: smollm2-135m)")
    run.add_argument("--prompt", help="one question; without it, a conversation")
    run.add_argument("--temperature", type=float, help="0 is greedy (default: the node's)")
    run.add_argument("--max-tokens", type=int, help="longest answer")
    add_node_flags(run)
    _let_parent_values_stand(run)

    models = commands.add_parser("models", help="models that can be used")
    models.add_argument("--all", action="store_true", help="also those whose files are not here")

    status = commands.add_parser("status", help="the cluster as the node on this machine sees it")
    for command in (models, status):
        command.add_argument("--chatgpt-api-port", type=int, default=DEFAULT_API_PORT)
    status.add_argument("--json", action="store_true", help="for programs")
    return parser


def _let_parent_values_stand(command: argparse.ArgumentParser) -> None:
    """`exo --memory 4GB run`: without this the command's default would undo the flag."""
    shared = argparse.ArgumentParser()
    add_node_flags(shared)
    names = {action.dest for action in shared._actions}
    for action in command._actions:
        if action.dest in names and action.dest != "help":
            action.default = argparse.SUPPRESS


def main(arguments: list[str] | None = None) -> int:
    """Run one command; an expected failure is one line on stderr and exit status 1."""
    # Until a node's own handlers are in place there is nothing to clean up, and a KeyboardInterrupt
    # in the middle of an import may be lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = build_parser().parse_args(arguments)
    set_up_logging()
    try:
        return _command(args)
    except ExoError as error:
        print(f"exo: {error.message}", file=sys.stderr)  # noqa: T201
        return 1
    except OSError as error:
        print(f"exo: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _command(args: argparse.Namespace) -> int:
    if args.command == "run":
        from exo.cli.run import run

        return run(args)
    if args.command == "models":
        from exo.cli.models import show_models

        return show_models(args)
    if args.command == "status":
        from exo.cli.status import show_status

        return show_status(args)
    from exo.cli.serve import serve

    return serve(args)


if __name__ == "__main__":
    sys.exit(main())
