"""`exo run` as people use it: a real process, in a pipe and in a pseudo terminal."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from cluster import cluster

RUN = [sys.executable, "-m", "exo.cli.main", "run", "dummy", "--max-tokens", "5"]


async def run(home: Path, port: int, *arguments: str, asked: bytes | None = None) -> Any:
    return await asyncio.to_thread(
        subprocess.run,
        [*RUN, *arguments, "--chatgpt-api-port", str(port)],
        input=asked,
        stdin=subprocess.DEVNULL if asked is None else None,
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"EXO_HOME": str(home)},
    )


async def test_a_pipe_and_files_go_with_the_question(exo_home: Path, tmp_path: Path) -> None:
    notes, picture = tmp_path / "notes.md", tmp_path / "picture.png"
    notes.write_text("# Notes\n")
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    async with cluster(tmp_path, exo_home) as c:
        port = c.add("n0").api_port
        await c.together()

        async def length(*arguments: str, asked: bytes | None = None) -> int:
            done = await run(exo_home, port, *arguments, "--json", asked=asked)
            assert done.returncode == 0, done.stderr
            answer = json.loads(done.stdout)
            assert answer["content"] and answer["completion_tokens"] == 5
            assert answer["finish_reason"] == "length" and answer["model"] == "dummy"
            return int(answer["prompt_tokens"])

        alone = await length("--prompt", "review")
        piped = await length("--prompt", "review", asked=b"diff --git a b\n")
        filed = await length("--prompt", "review", "--file", str(notes))
        both = await length("--prompt", "review", "--file", str(notes), asked=b"diff --git a b\n")
        assert alone < piped < both and alone < filed < both
        assert await length(asked=b"review") == alone  # all of stdin is the question

        plain = await run(exo_home, port, "--prompt", "hello")
        assert plain.returncode == 0 and b"[5 tokens" in plain.stderr and plain.stdout.strip()
        for arguments, said in (
            (("--prompt", "x", "--file", str(picture)), "is no"),
            (("--prompt", "x", "--file", "nothing.txt"), "nothing.txt cannot be read"),
            ((), "nothing is asked"),
            (("--prompt", "x", "--temperature", "-1"), "temperature"),
        ):
            failed = await run(exo_home, port, *arguments)
            assert failed.returncode == 1 and said in failed.stderr.decode(), failed.stderr
            assert len(failed.stderr.splitlines()) == 1 and not failed.stdout
        failed = await run(exo_home, port, "--prompt", "x", "--temperature", "-1", "--json")
        assert failed.returncode == 1
        assert "temperature" in json.loads(failed.stdout)["error"]["message"]


class Terminal:
    """A conversation typed by hand."""

    def __init__(self, home: Path, port: int, *arguments: str, into: Path | None = None) -> None:
        command = shlex.join([*RUN[:4], *arguments, "--chatgpt-api-port", str(port)])
        self.child = pexpect.spawn(
            "/bin/sh",
            ["-c", f"exec {command}" + (f" > {shlex.quote(str(into))}" if into else "")],
            env=os.environ | {"EXO_HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            timeout=30,
            dimensions=(40, 100),
            encoding="utf-8",
        )

    async def type(self, line: str, answered: str) -> str:
        """What was shown until `answered` was."""
        self.child.send(line + "\r")
        return await self.sees(answered)

    async def sees(self, what: str) -> str:
        await asyncio.to_thread(self.child.expect, what)
        return str(self.child.before) + str(self.child.after)

    async def ends_at_eof(self) -> int | None:
        # Between two prompts the terminal is in another mode, where Ctrl-D is nobody's.
        await self.sees("›")
        self.child.sendeof()
        return await self.ends()

    async def ends(self) -> int | None:
        await asyncio.to_thread(self.child.expect, pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


async def test_a_conversation_in_a_terminal(exo_home: Path, tmp_path: Path) -> None:
    kept = tmp_path / "talk.json"
    async with cluster(tmp_path, exo_home) as c:
        port = c.add("n0").api_port
        await c.together()
        talk = Terminal(exo_home, port, "dummy", "--max-tokens", "5")
        await talk.sees("/help lists commands")
        await talk.sees("›")
        await talk.type("first", r"\[5 tokens[^\n]*\n")
        await talk.type("second", r"\[5 tokens[^\n]*\n")
        await talk.type("/stats", "messages  4")
        await talk.type("/regen", r"\[5 tokens[^\n]*\n")
        await talk.type("/stats", "messages  4")
        await talk.type("/nothing", "there is no /nothing")
        await talk.type("/save", "needs a FILE")
        await talk.type("/model no-such", "unknown model 'no-such'")
        await talk.type("/system Be brief.", "system prompt set")
        await talk.type(f"/save {kept}", "4 messages in")
        await talk.type("/new", "a new conversation")
        await talk.type("/stats", "messages  0")
        await talk.type(f"/load {kept}", "4 messages from")
        await talk.type("two\x1b\rlines", r"\[5 tokens[^\n]*\n")
        await talk.type(f"/save {kept}", "6 messages in")
        assert await talk.ends_at_eof() == 0
        (conversation,) = json.loads(kept.read_text())["conversations"]
        assert conversation["settings"] == {"system": "Be brief."}
        said = [message["content"] for message in conversation["messages"].values()]
        assert said[::2] == ["first", "second", "two\nlines"] and all(said)

        again = Terminal(exo_home, port, "dummy", "--max-tokens", "5")
        await again.sees("›")
        await again.type("\x1b[A\x1b[A", r"\[5 tokens[^\n]*\n")  # the line before the last
        c.nodes["n0"].send(signal.SIGKILL)  # what cannot be answered again keeps its answer
        await again.type("/regen", "stopped answering")
        await again.type("/stats", "messages  2")
        assert await again.type("/quit", "quit")
        assert await again.ends() == 0
    history = exo_home / "run_history"
    assert history.stat().st_mode & 0o777 == 0o600 and "+first" in history.read_text()


async def test_answers_go_to_a_file_and_the_rest_to_the_terminal(
    exo_home: Path, tmp_path: Path
) -> None:
    own = tmp_path / "home"
    (own / "run_history").mkdir(parents=True)  # where no file can be written
    answers = tmp_path / "answers.txt"
    async with cluster(tmp_path, exo_home) as c:
        port = c.add("n0").api_port
        await c.together()
        talk = Terminal(own, port, "dummy", "--max-tokens", "5", into=answers)
        await talk.sees("what is typed is not kept for later")
        await talk.sees("›")
        await talk.type("first", r"\[5 tokens[^\n]*\n")
        assert await talk.ends_at_eof() == 0
    said = answers.read_text()
    assert said.strip() and "›" not in said and "\x1b" not in said and "tokens" not in said


@pytest.mark.parametrize("interrupt", ["\x03", "kill"])
async def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    interrupt: str, exo_home: Path, tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        node = c.add("n0", EXO_DUMMY_FAULTS="delay=0.2")
        await c.together()
        talk = Terminal(exo_home, node.api_port, "dummy", "--max-tokens", "1000")
        await talk.sees("›")
        await talk.type("first", r"\x1b\[\?2004l")  # the line is taken
        await talk.sees("[a-z]{2}")  # of the answer
        if interrupt == "kill":
            talk.child.kill(15)
            assert await talk.ends() == 130
            return
        talk.child.send(interrupt)
        await talk.sees(r"\[stopped\]")
        await talk.type("/stats", "messages  [02]")
        talk.child.send("half a line\x03")  # forgets it
        await talk.type("/quit", "quit")
        assert await talk.ends() == 0
