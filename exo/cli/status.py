"""`exo status`: the cluster as the node on this machine sees it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from exo.cli.activity_line import activity_line
from exo.cli.client import get_json
from exo.topology.capabilities import GB

LOOK_S = 1.0


def show_status(args: argparse.Namespace) -> int:
    """Nodes, what is wrong with those that cannot be reached, and the plans that serve."""
    view = asyncio.run(get_json(args.chatgpt_api_port, "/v1/topology"))
    if args.json:
        print(json.dumps(view, indent=2))  # noqa: T201
        return 0
    if args.watch:
        return _watch(args.chatgpt_api_port, view)
    Console(soft_wrap=True).print(_shown(view))
    return 0


def _watch(port: int, view: dict[str, Any]) -> int:
    """The same, again and again, until Ctrl-C or the node ends; into a file or a pipe one after the
    other."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that the cursor comes back
    console = Console(soft_wrap=True)
    live = Live(auto_refresh=False) if console.is_terminal else None
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            if live is not None:
                live.update(_shown(view), refresh=True)
            else:
                console.print(_shown(view), "")
                sys.stdout.flush()
            time.sleep(LOOK_S)
            view = asyncio.run(get_json(port, "/v1/topology"))
    return 0


def _shown(view: dict[str, Any]) -> Group:
    parts: list[Table | Text] = [_nodes(view)]
    wrong = [node for node in view["nodes"].values() if node["problem"]]
    parts += [Text(f"\n{node['node_id']}: {node['problem']}", style="yellow") for node in wrong]
    loads = [load for node in view["serving"].values() for load in node["plans"]]
    for plan in view["plans"]:
        ready = f"\n{plan['model_id']}: ready on {len(plan['members'])} node(s)"
        parts.append(Text(ready, style="bold"))
        if plan["predicted_step_s"]:
            predicted = f"  {1 / plan['predicted_step_s']:.0f} tok/s predicted for one answer"
            parts.append(Text(predicted))
        for load in loads:
            if load["plan_hash"] == plan["hash"]:
                parts.append(Text(f"  {_load_line(load)}"))
        for member in plan["members"]:
            shard = member["shard"]
            layers = f"layers {shard['start_layer']} to {shard['end_layer'] - 1}"
            if (share := shard.get("expert_share", 1)) < 1:
                layers += f", {100 * share:.0f} % of their experts in memory, the rest on disk"
            parts.append(Text(f"  {member['node_id']}  {layers}"))
        for node_id, why in plan["left_out"]:
            parts.append(Text(f"  {node_id}  left out: {why}", style="dim"))
    for item in view["activity"]:
        if item["phase"] != "ready":
            style = "yellow" if item["phase"] == "failed" else ""
            parts.append(Text(f"\n{activity_line(item)}", style=style))
    return Group(*parts)


def _load_line(load: dict[str, Any]) -> str:
    pages = load["kv_pages"]
    said = f"{load['running']} running, {load['waiting']} waiting, {load['tokens_per_s']:.0f} tok/s"
    if not pages["capacity"]:
        return said
    used, kept = (100 * pages[what] / pages["capacity"] for what in ("used", "kept"))
    return f"{said}; KV cache {used:.0f}% used, {kept:.0f}% by what may be asked for again"


def _nodes(view: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    for column in ("node", "state", "machine", "memory free", "busy", "address"):
        table.add_column(column, no_wrap=column in ("node", "state", "address"))
    for node in view["nodes"].values():
        found = node["capabilities"]
        table.add_row(
            node["node_id"],
            f"{node['state']}, draining" if node["draining"] else node["state"],
            f"{found['chip']}, {found['accelerator']}" if found else "",
            f"{found['memory_available_bytes'] / GB:.1f} GB" if found else "",
            _busy(view["serving"].get(node["node_id"])),
            node["address"],
        )
    return table


def _busy(report: dict[str, Any] | None) -> str:
    if report is None:
        return ""
    slow = f", {report['slowdown']:.0f}x slower than usual" if report["slowdown"] > 2 else ""
    return f"{100 * report['busy']:.0f}%{slow}"
