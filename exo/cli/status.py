"""`exo status`: the cluster as the node on this machine sees it."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from exo.cli.client import get_json
from exo.topology.capabilities import GB


def show_status(args: argparse.Namespace) -> int:
    """Nodes, what is wrong with those that cannot be reached, and the plans that serve."""
    view = asyncio.run(get_json(args.chatgpt_api_port, "/v1/topology"))
    if args.json:
        print(json.dumps(view, indent=2))  # noqa: T201
        return 0
    console = Console(soft_wrap=True)
    console.print(_nodes(view))
    for plan in view["plans"]:
        console.print(
            f"\n{plan['model_id']}: ready on {len(plan['members'])} node(s)", style="bold"
        )
        for member in plan["members"]:
            shard = member["shard"]
            layers = f"layers {shard['start_layer']} to {shard['end_layer'] - 1}"
            console.print(f"  {member['node_id']}  {layers}")
        for node_id, why in plan["left_out"]:
            console.print(f"  {node_id}  left out: {why}", style="dim")
    for item in view["activity"]:
        if item["phase"] != "ready":
            console.print(_doing(item), style="yellow" if item["phase"] == "failed" else "")
    return 0


def _doing(item: dict[str, Any]) -> str:
    """One node at work on one model, or why it failed."""
    share = f" {100 * item['done'] // item['total']}%" if item["total"] else ""
    speed = f", {item['speed'] / 1e6:.0f} MB/s" if item["speed"] else ""
    eta = f", {item['eta_s']:.0f} s left" if item["eta_s"] else ""
    why = f": {item['warning']}" if item["warning"] else ""
    return f"\n{item['node_id']}: {item['phase']} {item['model']}{share}{speed}{eta}{why}"


def _nodes(view: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    for column in ("node", "state", "machine", "memory free", "address"):
        table.add_column(column)
    for node in view["nodes"].values():
        found = node["capabilities"]
        table.add_row(
            node["node_id"],
            node["state"],
            f"{found['chip']}, {found['accelerator']}" if found else node["problem"],
            f"{found['memory_available_bytes'] / GB:.1f} GB" if found else "",
            node["address"],
        )
    return table
