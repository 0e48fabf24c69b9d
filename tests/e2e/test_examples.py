"""Every example of a `--help` works as it stands there, beside nodes that run.

Service managers are stand-ins; the hub is one on loopback, with a small model of random weights.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from cluster import cluster
from hub_server import HubServer
from thinker import write_thinker

from exo.cli.examples import EXAMPLES
from exo.cli.main import build_parser

REPOS = ("mlx-community/Qwen3-0.6B-4bit", "Qwen/Qwen3-1.7B-MLX-4bit")

WRAPPER = """#!/bin/sh
# The node is at a port of its own here.
case "$1" in rm|du|completion|service|update) port= ;; *) port="--chatgpt-api-port {port}" ;; esac
case "$*" in *chatgpt-api-port*) set -- "$1"; esac
exec {python} -m exo.cli.main "$@" $port
"""

ENDLESS = ("exo top",)
"""Until Ctrl-C."""


def test_every_command_has_two() -> None:
    (commands,) = (action for action in build_parser()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    assert set(commands.choices) == set(EXAMPLES)
    for name, parser in commands.choices.items():
        assert len(EXAMPLES[name]) >= 2
        assert all(line in parser.format_help() for line, _ in EXAMPLES[name])


def _desk(folder: Path) -> Path:
    """What the examples find where they are run."""
    desk = folder / "desk"
    desk.mkdir()
    (desk / "notes.md").write_text("# Notes\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for what in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *what], cwd=desk, check=True, capture_output=True)
    (desk / "notes.md").write_text("# Notes, again\n")
    return desk


def _programs(folder: Path, port: int) -> Path:
    programs = folder / "bin"
    programs.mkdir()
    texts = {"exo": WRAPPER.format(python=shlex.quote(sys.executable), port=port)}
    texts |= dict.fromkeys(("systemctl", "launchctl", "journalctl"), "#!/bin/sh\n")
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return programs


async def test_every_example_works(tmp_path: Path, checkpoint: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    for each in (home, other):
        shutil.copytree(checkpoint.parent, each / "models", symlinks=True)
    write_thinker(tmp_path / "tiny")
    files = {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()}
    with HubServer() as hub:
        for repo in REPOS:
            hub.put(repo, files)
        async with cluster(tmp_path) as c:
            own = {"EXO_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
            own |= {"HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path)}
            node = c.add("studio", "--max-generate-tokens", "20", engine="cpu", **own)
            c.add("laptop", engine="cpu", **own | {"EXO_HOME": str(other)})
            await c.together()
            desk = _desk(tmp_path)
            path = f"{_programs(tmp_path, node.api_port)}:{os.environ['PATH']}"
            environment = os.environ | own | {"PATH": path, "XDG_RUNTIME_DIR": str(tmp_path)}
            environment["GIT_ALLOW_PROTOCOL"] = "file"  # `exo update` asks nobody from here
            for lines in EXAMPLES.values():
                for line, _ in lines:
                    run = _run_endless if line.startswith(ENDLESS) else _run
                    await asyncio.to_thread(run, line, desk, environment)


def _run_endless(line: str, desk: Path, environment: dict[str, str]) -> None:
    """Until it has shown the node."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=desk,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    late = threading.Timer(60, process.kill)
    late.start()
    said = ""
    for part in process.stdout:
        said += part
        if "studio" in said:
            break
    late.cancel()
    process.send_signal(signal.SIGINT)
    said += process.communicate(timeout=60)[0]
    assert "studio" in said and "Traceback" not in said, f"{line}: {said[-2000:]}"


def _run(line: str, desk: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["timeout", "-s", "INT", "120", "bash", "-c", line],
        cwd=desk,
        env=environment,
        input="hello" if line == "exo run" else "",  # no terminal: it is the question
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"{line}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    if line.startswith(("exo doctor", "exo update")):
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, said
    else:
        assert done.returncode == 0, said
