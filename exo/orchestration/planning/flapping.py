"""Nodes that are lost again and again get no layers for a while: a laptop at the edge of its WLAN
would have everybody load and prefill anew each time it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

LOSSES, WITHIN_S = 3, 60.0
"""So many losses in so much time are flapping; fewer are a restart, or bad luck."""

FIRST_REST_S, LONGEST_REST_S = 30.0, 600.0
"""How long such a node gets no layers; doubled each time, and forgotten after the longest."""


@dataclass
class _Losses:
    at: list[float] = field(default_factory=list)  # those of the last minute
    rest_s: float = 0.0
    rests_until: float = 0.0


class Flapping:
    """`now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._nodes: dict[str, _Losses] = {}

    def lost(self, node_id: str) -> None:
        """It died, or cannot be reached; who says goodbye may come and go."""
        now = self._now()
        known = self._nodes.setdefault(node_id, _Losses())
        if known.at and now - max(known.at[-1], known.rests_until) > LONGEST_REST_S:
            known = self._nodes[node_id] = _Losses()
        known.at = [at for at in known.at if now - at < WITHIN_S] + [now]
        if known.rest_s or len(known.at) >= LOSSES:
            known.rest_s = min(max(FIRST_REST_S, 2 * known.rest_s), LONGEST_REST_S)
            known.rests_until = now + known.rest_s

    @property
    def rest_s(self) -> float:
        """Until all get layers again."""
        now = self._now()
        return max((known.rests_until - now for known in self._nodes.values()), default=0.0)

    def resting(self) -> dict[str, str]:
        """Who gets no layers now, and why."""
        now = self._now()
        return {
            node_id: "it was lost again and again; it gets layers in "
            f"{known.rests_until - now:.0f} s"
            for node_id, known in self._nodes.items()
            if known.rests_until > now
        }
