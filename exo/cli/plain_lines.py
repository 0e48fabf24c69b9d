"""What a running node shows without a screen, in a log or a pipe; rich takes 25 ms to import."""

from __future__ import annotations

from typing import Any

from exo.cli.activity_line import is_under_way
from exo.orchestration.files.activity import as_json
from exo.orchestration.node import StandardNode


def plain_lines(node: StandardNode) -> list[str]:
    """A line for each node and each ring."""
    lines = []
    for view in node.topology().nodes.values():
        problem = f": {view.problem}" if view.problem else ""
        lines.append(f"node {view.node_id} {view.state} at {view.address}{problem}")
    for plan in node.plans:
        shards = ", ".join(
            f"{m.node_id} [{m.shard.start_layer}:{m.shard.end_layer}]" for m in plan.members
        )
        lines.append(f"ready {plan.model_id}: {shards}")
    return lines


def activity_shown(node: StandardNode) -> list[dict[str, Any]]:
    """What any node is bringing or loading now, or failed to."""
    items = (as_json(progress) for progress in node.activity.everyone())
    return [item for item in items if is_under_way(item) or item["phase"] == "failed"]
