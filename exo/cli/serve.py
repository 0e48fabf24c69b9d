"""`exo`: a node until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator

from exo.cli.activity_line import LINE_S, activity_line, is_under_way
from exo.cli.plain_lines import activity_shown, plain_lines
from exo.cli.running_node import run_until_signal, running_node
from exo.orchestration.node import StandardNode
from exo.orchestration.preload import preload_most_used
from exo.tasks import TaskOwner

_REFRESH_S = 0.2


def serve(args: argparse.Namespace) -> int:
    """Run a node; the screen follows what peers do."""
    return run_until_signal(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    async with running_node(args, args.chatgpt_api_port) as node:
        if args.wait_for_peers:
            print(f"waiting for {args.wait_for_peers} peers", flush=True)  # noqa: T201
            await node.wait_for_peers(args.wait_for_peers)
        tasks = TaskOwner("serve")
        try:
            if args.preload:
                tasks.background(preload_most_used(node), "preload")
            if args.disable_tui or not sys.stdout.isatty():
                await _print_changes(node)
            else:
                await _show_screen(node)
        finally:
            await tasks.close()
    return 0


async def _show_screen(node: StandardNode) -> None:
    from rich.console import Console
    from rich.live import Live

    from exo.cli.screen import node_screen

    with Live(node_screen(node), console=Console(), auto_refresh=False) as live:
        async for _ in _changes(node):
            live.update(node_screen(node), refresh=True)


async def _print_changes(node: StandardNode) -> None:
    print(f"exo is ready: chat at {node.api_url}, API at {node.api_url}/v1", flush=True)  # noqa: T201
    shown: set[str] = set()
    said: dict[tuple[str, str], tuple[str, float]] = {}  # by node and model: phase, when
    async for _ in _changes(node):
        lines = plain_lines(node)
        for line in lines:
            if line not in shown:
                print(line, flush=True)  # noqa: T201
        shown = set(lines)
        for item in activity_shown(node):
            key, now = (item["node_id"], item["model"]), time.monotonic()
            phase, at = said.get(key, ("", 0.0))
            if item["phase"] != phase or (is_under_way(item) and now - at > LINE_S):
                said[key] = (item["phase"], now)
                print(activity_line(item), flush=True)  # noqa: T201


async def _changes(node: StandardNode) -> AsyncIterator[None]:
    """Once, and then whenever what is shown has changed, a few times a second at most."""
    while True:
        activity = asyncio.ensure_future(node.activity.next_change().wait())
        others = asyncio.ensure_future(node.changed())
        try:
            yield
            await asyncio.wait([activity, others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            activity.cancel()
            others.cancel()
        await asyncio.sleep(_REFRESH_S)
