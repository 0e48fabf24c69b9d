"""The one screen of a running node: what to open, who is here, what is ready."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from exo import __version__
from exo.cli.activity_line import activity_line
from exo.cli.plain_lines import activity_shown
from exo.orchestration.node import StandardNode
from exo.shard import RingPlan
from exo.topology.capabilities import GB
from exo.topology.topology import NodeView, Topology

_MARKS = {"self": ("●", "green"), "alive": ("●", "green"), "connecting": ("◌", "yellow")}


def node_screen(node: StandardNode) -> RenderableType:
    """The screen as it is now."""
    topology = node.topology()
    parts: list[RenderableType] = [_links(node), Text(), _nodes(topology)]
    if plans := list(node.plans):
        parts += [Text(), *map(_plan, plans)]
    if items := activity_shown(node):
        parts += [Text(), *map(_activity, items)]
    parts += [Text(), Text("Ctrl-C ends this node", style="dim")]
    return Panel(Group(*parts), title=f"exo {__version__}", title_align="left", padding=(1, 2))


def _activity(item: dict[str, Any]) -> RenderableType:
    """A bar and what it means."""
    line = Text(activity_line(item), style="yellow" if item["warning"] else "")
    if not item["total"]:
        return line
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(item["total"], item["done"], width=32), line)
    return row


def _links(node: StandardNode) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("Chat", Text(node.api_url, style="bold cyan"))
    table.add_row("API", Text(f"{node.api_url}/v1", style="cyan"))
    return table


def _nodes(topology: Topology) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "node", "machine", "memory free", "address"):
        table.add_column(column)
    for view in sorted(topology.nodes.values(), key=lambda v: (v.state != "self", v.node_id)):
        mark, style = _MARKS.get(view.state, ("○", "red"))
        table.add_row(
            Text(mark, style=style),
            view.node_id + (" (this one)" if view.state == "self" else ""),
            _machine(view),
            _memory(view),
            view.address,
        )
        if view.problem:
            table.add_row("", Text(view.problem, style="red"))
    return table


def _machine(view: NodeView) -> str:
    found = view.capabilities
    return f"{found.chip}, {found.accelerator}" if found else "not reached"


def _memory(view: NodeView) -> str:
    found = view.capabilities
    if found is None:
        return ""
    return f"{found.memory_available_bytes / GB:.1f} of {found.memory_total_bytes / GB:.1f} GB"


def _plan(plan: RingPlan) -> RenderableType:
    """A bar with each member's share of the layers."""
    bar = Text(f"{plan.model_id}  ", style="bold")
    for index, member in enumerate(plan.members):
        shard = member.shard
        width = max(1, round(32 * shard.layer_count / shard.n_layers))
        bar.append("━" * width, style=("cyan", "magenta", "yellow", "green")[index % 4])
        bar.append(f" {member.node_id} {shard.start_layer}–{shard.end_layer} ", style="dim")
    left_out = [Text(f"  {node} is left out: {why}", style="dim") for node, why in plan.left_out]
    return Group(bar, *left_out)
