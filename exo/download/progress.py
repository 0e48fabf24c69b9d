"""What a node is doing for a model, as events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENDS = ("ready", "failed", "cancelled")
"""Phases after which nothing more comes."""


@dataclass(frozen=True)
class Progress:
    """`phase` is checking, waiting, downloading, verifying, converting, loading, warming, ready,
    failed or cancelled; reading where it is a prompt. `done` and `total` are bytes of the model, or
    tokens of the prompt, 0 where there is nothing to count. Where one file moved, it is named with
    its own bytes. `by_source` splits `done` into "hub", "peer" and "disk" (was here before); of a
    prompt it names those that were in the "cache".
    `warning` says what went wrong and is tried again, or in the phase failed for good. Speeds are
    bytes a second, filled in where events are collected."""

    phase: str
    detail: str = ""
    done: int = 0
    total: int = 0
    node_id: str = ""
    file: str = ""
    file_done: int = 0
    file_total: int = 0
    warning: str = ""
    by_source: tuple[tuple[str, int], ...] = ()
    model_id: str = ""
    speed: float = 0.0
    average_speed: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until all is done at the current speed; None where nobody can say."""
        left = self.total - self.done
        return left / self.speed if self.speed > 0 and left > 0 else None

    def __str__(self) -> str:
        where = f" on {self.node_id}" if self.node_id else ""
        share = f" {100 * self.done // self.total}%" if self.total else ""
        speed = f", {self.speed / 1e6:.0f} MB/s" if self.speed >= 1e6 else ""
        eta = f", {self.eta_s:.0f} s left" if self.eta_s is not None else ""
        warning = f" ({self.warning})" if self.warning else ""
        return f"{self.phase} {self.detail}{share}{where}{speed}{eta}{warning}"


OnProgress = Callable[[Progress], None]


def unheard(progress: Progress) -> None:
    """For work whose progress nobody waits to hear of."""
