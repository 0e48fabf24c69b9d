"""What a node is doing for a model, in one line."""

from __future__ import annotations

from typing import Any

from exo.download.progress import ENDS

LINE_S = 5.0
"""Between two lines on one download where there is no terminal to draw bars on."""


def activity_line(item: dict[str, Any]) -> str:
    """An item of /v1/download/progress, like "b: downloading org/m, 35% of 4,700 MB, 52 MB/s, 59 s
    left (slow link)"."""
    line = f"{item['node_id']}: {item['phase']} {item['model']}"
    if item["total"]:
        line += f", {100 * item['done'] // item['total']}% of {item['total'] / 1e6:,.0f} MB"
    if item["speed"] >= 1e5:
        line += f", {item['speed'] / 1e6:,.1f} MB/s"
    if item["eta_s"]:
        line += f", {item['eta_s']:,.0f} s left"
    return line + (f" ({item['warning']})" if item["warning"] else "")


def is_under_way(item: dict[str, Any]) -> bool:
    return item["phase"] not in ENDS
