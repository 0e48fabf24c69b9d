"""`exo download`: brings a model's files, with a bar for each file or node, and a total."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import aiohttp
from tqdm import tqdm

from exo.cli.activity_line import LINE_S, activity_line
from exo.cli.client import session as client_session
from exo.cli.running_node import run_until_signal, some_node
from exo.errors import error_from_code
from exo.models.card import default_model, resolve
from exo.tasks import TaskOwner

_SMALL = 1 << 20
"""Bytes below which a file gets no bar of its own: it would be gone before it is read."""


def download(args: argparse.Namespace) -> int:
    """Fetch the model, or what a newer revision changed of it, through the node that runs here or
    one for the occasion, so that peers who have it are asked first."""
    resolve(args.model or default_model())
    return run_until_signal(_download(args))


async def _download(args: argparse.Namespace) -> int:
    model = args.model or default_model()
    shown = DownloadView(model, by_node=args.all_nodes)
    async with some_node(args, model) as url, client_session() as session:
        tasks = TaskOwner("download")
        tasks.background(_watch(session, url, shown), "watch")
        try:
            body = {"model": model, "all_nodes": args.all_nodes, "wait": True}
            if args.shard:
                body["shard"] = args.shard
            timeout = aiohttp.ClientTimeout(total=None)
            async with session.post(f"{url}/v1/download", json=body, timeout=timeout) as response:
                answer = await response.json()
        finally:
            await tasks.close()
            shown.close()
    if "error" in answer:
        error = answer["error"]
        raise error_from_code(error["code"], error["message"], error["param"])
    for node, end in answer["nodes"].items():
        if end != "ready" or args.all_nodes:
            print(f"{node}: {end}")  # noqa: T201
    if set(answer["nodes"].values()) != {"ready"}:
        return 1
    if args.verbose:
        _tell_left_out(answer["left_out"])
    what = f"shard {args.shard} of {model}" if args.shard else model
    print(f"{what} is here{shown.summary()}")  # noqa: T201
    return 0


def _tell_left_out(left_out: dict[str, dict[str, int]]) -> None:
    for why, files in left_out.items():
        print(f"left out, {why}:")  # noqa: T201
        for path, size in files.items():
            print(f"  {path}  {size / 1e6:,.1f} MB")  # noqa: T201


async def _watch(session: aiohttp.ClientSession, url: str, shown: DownloadView) -> None:
    """Until it is cancelled. If the stream breaks, the answer still tells how it ended."""
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with session.get(f"{url}/v1/events?of=progress", timeout=timeout) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    shown.show(json.loads(line[6:]))
    except aiohttp.ClientError as error:
        tqdm.write(f"no progress to show: {error}", file=sys.stderr)


class DownloadView:
    """Events of a download as bars, or as a line now and then where stderr is no terminal."""

    def __init__(self, model: str, *, by_node: bool) -> None:
        self._model = model
        self._by_node = by_node
        self._is_terminal = sys.stderr.isatty()
        self._bars: dict[str, tqdm[Any]] = {}
        self._began = time.monotonic()
        self._last: dict[str, dict[str, Any]] = {}  # by node
        self._line_at = 0.0
        self._said: set[str] = set()

    def show(self, event: dict[str, Any]) -> None:
        if event["model"] != self._model:
            return
        node = event["node_id"]
        if event["warning"] and event["phase"] not in ("failed", "cancelled"):
            self._say_once(f"{node}: {event['warning']}")
        if not event["total"]:
            return
        self._last[node] = event
        if self._is_terminal:
            self._draw(event)
        elif time.monotonic() - self._line_at > LINE_S:
            self._line_at = time.monotonic()
            tqdm.write(activity_line(event), file=sys.stderr)

    def summary(self) -> str:
        """What came from where; empty where nothing had to."""
        came: dict[str, int] = {}
        for event in self._last.values():
            for source, count in event["by_source"].items():
                came[source] = came.get(source, 0) + count
        parts = [f"{count / 1e6:.0f} MB from {name}" for name, count in came.items() if count]
        seconds = time.monotonic() - self._began
        return f": {', '.join(parts)}, {seconds:.1f} s" if parts else ""

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()

    def _draw(self, event: dict[str, Any]) -> None:
        name = event["node_id"] if self._by_node else self._model
        self._move(name, event["done"], event["total"])
        if not self._by_node and event["file"] and event["file_total"] >= _SMALL:
            self._move(event["file"], event["file_done"], event["file_total"])

    def _move(self, name: str, done: int, total: int) -> None:
        bar = self._bars.get(name)
        if bar is None:
            bar = self._bars[name] = tqdm(
                total=total,
                initial=done,
                desc=name,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,
                file=sys.stderr,
            )
        bar.update(done - bar.n)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            tqdm.write(text, file=sys.stderr)
