"""The `exo` command. Imports are late: `exo --help` is instant."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from exo import __version__
from exo.cli.examples import shown
from exo.cli.settings import (
    DEFAULT_API_PORT,
    add_node_flags,
    counts,
    positive,
    set_up_logging,
)
from exo.errors import ExoError

_DESCRIPTION = """\
exo turns the machines you own into one cluster that runs a language model.

  exo                              start a node; nodes on the LAN find each other
  exo run --prompt "Hello"         one answer in the terminal, through the cluster
  exo run MODEL                    a conversation in the terminal
  exo download MODEL               bring a model's files here; goes on where it was stopped
  exo rm MODEL                     delete them; `exo du` tells what they take
  exo models [MODEL]               models that can be used, and where their files are; what one is
  exo status                       who is in the cluster, what is loaded where; `exo top` goes on
  exo drain [NODE]                 have other nodes take over, before NODE is stopped or updated
  exo service install              start a node with this machine, kept by systemd or launchd
  exo update                       whether there is a newer exo; changes nothing
  exo doctor                       what is wrong here, and what to do about it
  exo bench MODEL                  tokens a second on this machine

MODEL is a short name from `exo models`, a Hugging Face repo id, a directory with a config.json,
or a .gguf file. DEBUG=1 … 9 in the environment tells more."""

_RUN = """\
Answers through the node that runs on this machine, or through one of its own until it is done.

Exit status: 0 answered, 1 not, with the reason on stderr, 2 wrong flags, 130 after Ctrl-C."""

_DRAIN = """\
Answers go on on other nodes, and the node has no part in rings until --undo or its next start.
Ctrl-C of a node does the same before it ends; this is for looking first, and for other nodes."""

_UPDATE = """\
Whether there is a newer exo than this one, what is new in it, and how to get it: what a clone
follows is asked, and nothing is changed.

Exit status 1 if nobody can tell."""

_DOCTOR = """\
Looks at this machine, at the cluster if a node runs here, and at the way to the hub.

Exit status 1 if something is wrong."""


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

    def command_of(name: str, what: str, description: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=what,
            description=description or what[0].upper() + what[1:] + ".",
            epilog=shown(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    _add_run(command_of("run", "answer in the terminal", _RUN))
    fetch = command_of("download", "bring a model's files here")
    fetch.add_argument(
        "model",
        nargs="?",
        help="a short name or a repo id, with @revision to pin one (default: smollm2-135m)",
    )
    how_much = fetch.add_mutually_exclusive_group()
    how_much.add_argument(
        "--all-nodes", action="store_true", help="to every node of the cluster, each byte once"
    )
    how_much.add_argument(
        "--shard", metavar="I/N", help="only what the I-th of N equal shards reads, like 1/3"
    )
    fetch.add_argument(
        "-v", "--verbose", action="store_true", help="list the repo's files that exo leaves out"
    )
    add_node_flags(fetch)
    _let_parent_values_stand(fetch)
    removal = command_of("rm", "delete a model's files from this machine")
    removal.add_argument("model")
    command_of("du", "disk that models take")
    models = command_of("models", "models that can be used")
    models.add_argument("model", nargs="?", help="what is known of one whose files are here")
    models.add_argument("--all", action="store_true", help="also those whose files are not here")

    status = command_of("status", "the cluster as the node on this machine sees it")
    top = command_of("top", "the same, again each second, until Ctrl-C")
    drain = command_of("drain", "have other nodes take over what a node does", _DRAIN)
    drain.add_argument("node", nargs="?", help="its id in `exo status` (default: this machine's)")
    drain.add_argument("--undo", action="store_true", help="use it for rings again")
    doctor = command_of("doctor", "what is wrong here, and what to do about it", _DOCTOR)
    doctor.add_argument(
        "--verify", action="store_true", help="read all model files: are they whole?"
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument("--bundle", type=Path, metavar="FILE.tar.gz", help="for a bug report")
    doctor.add_argument("--interface", action="append", default=[], metavar="NAME")
    doctor.add_argument(
        "--inference-engine", default="auto", choices=("auto", "cpu", "mlx"), help="(default auto)"
    )
    _add_service(command_of("service", "a node that starts with this machine"))
    for command in (models, status, top, drain, doctor):
        command.add_argument("--chatgpt-api-port", type=int, default=DEFAULT_API_PORT)
    how = status.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="for programs")
    how.add_argument("--watch", action="store_true", help="as `exo top`")
    top.set_defaults(json=False, watch=True)
    update = command_of("update", "whether there is a newer exo; changes nothing", _UPDATE)
    update.add_argument("--json", action="store_true", help="for programs")
    completion = command_of("completion", "have the shell complete exo's commands and flags")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    _add_bench(command_of("bench", "tokens a second, of an engine or a ring"))
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", help="(default: smollm2-135m)")
    command.add_argument("--prompt", help="one question; without it, a conversation")
    command.add_argument(
        "--file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a text that goes with the question, may be repeated",
    )
    command.add_argument("--system", metavar="TEXT", help="a system prompt")
    command.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    command.add_argument("--max-tokens", type=int, help="longest answer")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="the text as it is, no Markdown drawn")
    how.add_argument("--json", action="store_true", help="for programs: one object on stdout")
    add_node_flags(command)
    _let_parent_values_stand(command)


def _add_service(command: argparse.ArgumentParser) -> None:
    what = command.add_subparsers(dest="what", metavar="", required=True)
    install = what.add_parser(
        "install",
        help="have systemd or launchd keep a node running",
        description="A node of the user, started at login and again when it fails. Flags of the "
        "node follow, like: exo service install -- --chatgpt-api-host 0.0.0.0 --memory 12GB",
    )
    install.add_argument("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS")
    what.add_parser("remove", help="stop it and forget it; models stay")
    what.add_parser("status", help="whether it runs")
    logs = what.add_parser("logs", help="what it said last")
    logs.add_argument("-f", "--follow", action="store_true", help="and what it says from now on")


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", help="(default: smollm2-135m)")
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--ring",
        type=counts,
        metavar="N,…",
        help="through N nodes on this machine, over loopback; several, like 1,2, are measured in "
        "turns, as a machine's speed changes from minute to minute",
    )
    where.add_argument(
        "--running", action="store_true", help="through the node that runs here, and its cluster"
    )
    command.add_argument("--chatgpt-api-port", type=int, default=DEFAULT_API_PORT)
    command.add_argument(
        "--threads", type=positive, metavar="N", help="of each engine (default: all cores)"
    )
    command.add_argument(
        "--inference-engine", default="auto", choices=("auto", "cpu", "mlx"), help="(default auto)"
    )
    command.add_argument(
        "--precise", action="store_true", help="float activations on a CPU, float32 on a GPU"
    )
    command.add_argument(
        "--kv-bits", type=int, choices=(16, 8), default=16, help="of keys and values (default 16)"
    )
    for name, default, what in (
        ("--prefill", (128, 512, 2048), "lengths of prompts"),
        ("--decode", (16, 512, 2048), "tokens of context to decode at"),
        ("--batch", (1, 4, 8, 16), "sequences at once, at the first of these contexts"),
    ):
        shown = ",".join(map(str, default))
        help_text = f"{what} (default {shown}, 0 for none)"
        command.add_argument(name, type=counts, default=default, metavar="N,…", help=help_text)
    command.add_argument("--repetitions", type=positive, default=3, metavar="N")
    command.add_argument("--json", action="store_true", help="for programs: nothing else on stdout")


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
    # numpy's threads wait by spinning, a tenth of a second of each core at every start, for work
    # that is not done with numpy here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        # Nothing that is imported is ever garbage: not looking for it is a twelfth of a start, and
        # what is not looked through later does not hold up a step.
        gc.disable()
        command = _command(args)
        gc.freeze()
        gc.enable()
        return command(args)
    except ExoError as error:
        print(f"exo: {error.message}", file=sys.stderr)  # noqa: T201
        return 1
    except OSError as error:
        print(f"exo: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _command(args: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """The function of one command; to import what it needs is what takes long here."""
    if args.command == "run":
        from exo.cli.run.command import run

        return run
    if args.command == "download":
        from exo.cli.download import download

        return download
    if args.command in ("rm", "du"):
        from exo.cli.models import remove, show_usage

        return remove if args.command == "rm" else show_usage
    if args.command == "models":
        from exo.cli.models import show_model, show_models

        return show_models if args.model is None else show_model
    if args.command in ("status", "top"):
        from exo.cli.status import show_status

        return show_status
    if args.command == "service":
        from exo.cli.service import service

        return service
    if args.command == "doctor":
        from exo.cli.doctor.command import doctor

        return doctor
    if args.command == "update":
        from exo.cli.update import update

        return update
    if args.command == "drain":
        from exo.cli.drain import drain

        return drain
    if args.command == "completion":
        from exo.cli.completion import completion

        return lambda args: completion(build_parser(), args.shell)
    if args.command == "bench":
        from exo.cli.bench import bench

        return bench
    from exo.cli.serve import serve

    return serve


if __name__ == "__main__":
    sys.exit(main())
