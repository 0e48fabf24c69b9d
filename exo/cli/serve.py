"""`exo`: a node until Ctrl-C."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.live import Live

from exo.cli.running_node import run_until_signal, running_node
from exo.cli.screen import node_screen, plain_lines
from exo.orchestration.node import StandardNode
from exo.orchestration.preload import preload_most_used
from exo.tasks import TaskOwner


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
    with Live(node_screen(node), console=Console(), auto_refresh=False) as live:
        while True:
            await node.changed()
            live.update(node_screen(node), refresh=True)


async def _print_changes(node: StandardNode) -> None:
    print(f"exo is ready: chat at {node.api_url}, API at {node.api_url}/v1", flush=True)  # noqa: T201
    shown: set[str] = set()
    while True:
        lines = plain_lines(node)
        for line in lines:
            if line not in shown:
                print(line, flush=True)  # noqa: T201
        shown = set(lines)
        await node.changed()
