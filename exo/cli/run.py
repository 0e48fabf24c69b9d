"""`exo run`: answers in the terminal, tokens as they come."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from typing import Any

from exo.cli.client import stream_chat
from exo.cli.running_node import run_until_signal, some_node
from exo.errors import ExoError
from exo.models.card import default_model, resolve
from exo.tasks import on_own_thread


def run(args: argparse.Namespace) -> int:
    """Answer through the node that runs here, or through one of our own."""
    resolve(args.model or default_model())
    return run_until_signal(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with some_node(args, args.model or default_model()) as url:
        if args.prompt is not None:
            return await _answer(url, args, [{"role": "user", "content": args.prompt}])
        return await _converse(url, args)


async def _converse(url: str, args: argparse.Namespace) -> int:
    _say("Ctrl-D ends the conversation.\n")
    messages: list[dict[str, str]] = []
    while True:
        try:
            question = await on_own_thread(input, "› ")
        except EOFError:
            return 0
        if question.strip():
            messages.append({"role": "user", "content": question})
            await _answer(url, args, messages)


async def _answer(url: str, args: argparse.Namespace, messages: list[dict[str, str]]) -> int:
    """Print one answer and its speed; append it to the conversation."""
    body: dict[str, Any] = {"model": args.model or default_model(), "messages": messages}
    if args.temperature is not None:
        body["temperature"] = args.temperature
    if args.max_tokens is not None:
        body["max_tokens"] = args.max_tokens
    line = _StatusLine()
    started = time.perf_counter()
    first = None
    text = ""
    tokens = 0
    try:
        async with contextlib.aclosing(stream_chat(url, body)) as events:
            async for event in events:
                if event.waiting:
                    line.show(event.waiting)
                if event.thought:  # beside what is asked for: a pipe gets the answer alone
                    line.clear()
                    first = first or time.perf_counter()
                    _say(_dim(event.thought))
                if event.text:
                    line.clear()
                    first = first or time.perf_counter()
                    print(event.text, end="", flush=True)  # noqa: T201
                    text += event.text
                tokens = event.completion_tokens or tokens
    except ExoError as error:
        line.clear()
        _say(f"exo: {error.message}\n")
        messages.pop()
        return 1
    print()  # noqa: T201
    if first is not None:
        seconds = time.perf_counter() - first
        speed = f", {(tokens - 1) / seconds:.1f} tok/s" if tokens > 1 and seconds > 0 else ""
        _say(f"[{tokens} tokens, first after {first - started:.2f} s{speed}]\n")
    messages.append({"role": "assistant", "content": text})
    return 0


class _StatusLine:
    """One line on stderr that is drawn over: what the answer waits for, with a bar."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        if not sys.stderr.isatty():
            if text != self._shown:
                _say(text + "\n")
        else:
            percent = re.search(r" (\d+)%", text)
            bar = ""
            if percent:
                done = int(percent[1]) * 30 // 100
                bar = f" {'━' * done}{'╌' * (30 - done)}"
            _say(f"\r\033[2K{text}{bar}")
        self._shown = text

    def clear(self) -> None:
        if self._shown and sys.stderr.isatty():
            _say("\r\033[2K")
        self._shown = ""


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
