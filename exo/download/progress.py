"""What a node is doing for a model, as events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`phase` is checking, downloading, verifying, converting, loading, warming or ready; `done`
    and `total` are bytes, 0 where there is nothing to count."""

    phase: str
    detail: str = ""
    done: int = 0
    total: int = 0
    node_id: str = ""

    def __str__(self) -> str:
        where = f" on {self.node_id}" if self.node_id else ""
        share = f" {100 * self.done // self.total}%" if self.total else ""
        return f"{self.phase} {self.detail}{share}{where}"


OnProgress = Callable[[Progress], None]
