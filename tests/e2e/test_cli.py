"""The `exo` command as people use it: real processes, the real default model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import cluster, free_port, until

ROOT = Path(__file__).parents[2]


def exo(*arguments: str, home: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "exo.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"EXO_HOME": str(home)},
        **options,  # type: ignore[call-overload]
    )


def test_help_teaches_and_touches_nothing(tmp_path: Path) -> None:
    shown = exo("--help", home=tmp_path)
    assert "exo run" in shown.stdout and "--wait-for-peers" in shown.stdout
    commands = ("run", "download", "rm", "du", "models", "status", "bench", "drain", "doctor")
    for command in (*commands, "service", "completion"):
        help_of = exo(command, "--help", home=tmp_path)
        assert help_of.returncode == 0 and f"exo {command}" in help_of.stdout, help_of.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("dr", "drain"), ("status --wa", "--watch"), ("run qwen3-0", "qwen3-0.6b")],
)
def test_the_shell_completes(typed: str, offered: str, tmp_path: Path) -> None:
    words = ["exo", *typed.split()]
    (tmp_path / "exo.bash").write_text(exo("completion", "bash", home=tmp_path).stdout)
    script = (
        f"source {tmp_path}/exo.bash; COMP_WORDS=({' '.join(words)}); "
        f'COMP_CWORD={len(words) - 1}; _shtab_exo; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert offered in done.stdout.split(), done.stderr
    for shell in ("zsh", "fish"):
        assert "drain" in exo("completion", shell, home=tmp_path).stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # `exo --help` is instant, and a node's API is up before anything asks for a model.
        ("exo.cli.main", ["numpy", "aiohttp", "grpc", "mlx", "transformers", "rich"]),
        ("exo.cli.serve", ["mlx_lm", "transformers", "jinja2"]),
        ("exo.inference.mlx.engine", ["mlx_lm", "transformers"]),
    ],
)
def test_what_is_slow_to_import_is_imported_late(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "no-such-model", "--prompt", "x"], "unknown model 'no-such-model'"),
        (["run", "qwen3-06b", "--prompt", "x"], "did you mean qwen3-0.6b"),
        (["--memory", "lots"], "write it like 12GB"),
        (["--interface", "nothing0"], "--interface nothing0"),
        (["--discovery-module", "manual"], "needs --peers"),
        (["--peers", "x"], "is not host:port"),
        (["status", "--chatgpt-api-port", "9"], "no exo node answers"),
        (["--listen-port", "5", "--broadcast-port", "6"], "differ"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = exo(*arguments, home=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_one_prompt_is_answered_and_nothing_stays_behind(exo_home: Path) -> None:
    port = free_port()
    done = exo(
        *("run", "--interface", "lo", "--broadcast-port", str(free_port())),
        *("--chatgpt-api-port", str(port), "--temperature", "0"),
        *("--prompt", "What is the capital of France?"),
        home=exo_home,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tok/s" in done.stderr


async def test_status_and_models_tell_what_is_there(exo_home: Path, tmp_path: Path) -> None:
    async with cluster(tmp_path, exo_home) as c:
        c.add("n0", "--memory", "2GB")
        c.add("n1", "--memory", "1GB")
        await c.together()
        await c.nodes["n0"].chat()
        port = str(c.nodes["n1"].api_port)
        shown = exo("status", "--chatgpt-api-port", port, home=exo_home).stdout
        assert "n0" in shown and "layers 0 to 4" in shown
        data = json.loads(exo("status", "--json", "--chatgpt-api-port", port, home=exo_home).stdout)
        assert set(data["nodes"]) == {"n0", "n1"}
    models = exo("models", "--all", home=exo_home).stdout
    assert "smollm2-135m" in models and "qwen3-8b" in models
    one = exo("models", "qwen3.5-2b", home=exo_home).stdout
    assert "unsloth/Qwen3.5-2B-GGUF" in one and "262,144 tokens" in one and "Not here" in one


async def test_ctrl_c_ends_in_time_even_while_the_engine_works(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.add("n0", EXO_DUMMY_FAULTS="delay=30")
        await c.together()
        asked = asyncio.create_task(node.chat())
        await until(lambda: "loading" in node.log.read_text(), "the engine is at work")
        node.send(signal.SIGINT)
        await until(lambda: not node.lives, "the process ended", 2)
        with pytest.raises(Exception):  # noqa: B017 - the server is gone, however it shows
            await asked


async def test_the_next_port_is_taken_and_said_so(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        first = c.add("n0")
        await until(first.answers, "the first answers")
        second = c.add("n1", "--chatgpt-api-port", str(first.api_port))
        await until(lambda: "is taken, using" in second.tail(), "the notice")
        using = re.search(rf"{first.api_port} is taken, using (\d+)", second.tail())
        assert using and first.api_port < int(using[1]) < first.api_port + 10
        await until(lambda: f"http://127.0.0.1:{using[1]}" in second.tail(), "its address")


def test_the_screen_of_a_terminal_shows_what_to_open(tmp_path: Path) -> None:
    """In a real pseudo terminal, as a person sees it."""
    reader, writer = pty.openpty()
    port = free_port()
    node = subprocess.Popen(
        [sys.executable, "-m", "exo.cli.main", "--interface", "lo", "--inference-engine", "dummy"]
        + ["--broadcast-port", str(free_port()), "--chatgpt-api-port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        env=os.environ | {"EXO_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "100"},
    )
    seen = b""
    deadline = time.monotonic() + 20
    while b"Ctrl-C" not in seen and time.monotonic() < deadline:
        seen += os.read(reader, 4096)
    node.send_signal(signal.SIGINT)
    assert node.wait(5) == 130
    text = seen.decode(errors="replace")
    assert f"http://127.0.0.1:{port}" in text and "this one" in text
    os.close(reader)
    os.close(writer)


async def test_the_status_is_watched_in_a_terminal(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.add("n0")
        await c.together()
        reader, writer = pty.openpty()
        watching = subprocess.Popen(
            [sys.executable, "-m", "exo.cli.main", "status", "--watch"]
            + ["--chatgpt-api-port", str(node.api_port)],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        )
        os.set_blocking(reader, False)
        seen = b""

        def shows(what: bytes) -> bool:
            nonlocal seen
            with contextlib.suppress(BlockingIOError):
                seen += os.read(reader, 65536)
            return what in seen

        await until(lambda: shows(b"n0"), "the node is shown")
        assert not shows(b"dummy")
        await node.chat()
        await until(lambda: shows(b"dummy: ready on 1 node(s)"), "and the model once it is there")
        watching.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(watching.wait, 5) == 0
        os.close(reader)
        os.close(writer)
