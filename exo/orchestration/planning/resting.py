"""Nodes that get no layers for a while.

One that is lost again and again: a laptop at the edge of its WLAN would have everybody load and
prefill anew each time it comes back. And one that computes many times slower than it did: every
token of its ring waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LOSSES, WITHIN_S = 3, 60.0
"""So many losses in so much time are flapping; fewer are a restart, or bad luck."""

FIRST_REST_S, LONGEST_REST_S = 30.0, 600.0
"""How long such a node gets no layers; doubled each time, and forgotten after the longest."""

SLOW = 8.0
"""So many times as long as usual is no longer chance, or a little other work."""

UNLIKE = 4.0
"""So many times as slow as the least slow of the others: it is the node, not what all do."""

_COMPUTES = "it computes "


def is_slow(reason: str) -> bool:
    """Whether a node is left out, by this reason, since it computes slower than it did."""
    return reason.startswith(_COMPUTES)


def slow_among(node_ids: Sequence[str], slowdowns: Mapping[str, float]) -> dict[str, float]:
    """The members of a ring that compute slower than they did, and by how much, if the others do
    not as well: work that all of them share, or a machine, slows everybody. Nothing is said of a
    ring of which some have not told."""
    times = {node_id: slowdowns.get(node_id, 0.0) for node_id in node_ids}
    if not all(times.values()):
        return {}
    found = {}
    for node_id, slowdown in times.items():
        others = [other for member, other in times.items() if member != node_id]
        if slowdown >= max(SLOW, UNLIKE * min(others, default=1.0)):
            found[node_id] = slowdown
    return found


@dataclass
class _Known:
    lost_at: list[float] = field(default_factory=list)  # in the last minute
    noted_at: float = 0.0
    rest_s: float = 0.0
    rests_until: float = 0.0
    why: str = ""


class Resting:
    """`now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._nodes: dict[str, _Known] = {}

    def lost(self, node_id: str) -> None:
        """It died, or cannot be reached; who says goodbye may come and go."""
        now, known = self._now(), self._known(node_id)
        known.lost_at = [at for at in known.lost_at if now - at < WITHIN_S] + [now]
        if known.rest_s or len(known.lost_at) >= LOSSES:
            self._rest(known, "it was lost again and again")

    def slow(self, node_id: str, slowdown: float) -> None:
        """Its steps take so many times as long as they did."""
        known = self._known(node_id)
        if known.rests_until <= self._now():
            self._rest(known, f"{_COMPUTES}{slowdown:.0f} times slower than it did")

    @property
    def rest_s(self) -> float:
        """Until all get layers again."""
        now = self._now()
        return max((known.rests_until - now for known in self._nodes.values()), default=0.0)

    def reasons(self) -> dict[str, str]:
        """Who gets no layers now, and why."""
        now = self._now()
        return {
            node_id: f"{known.why}; it gets layers in {known.rests_until - now:.0f} s"
            for node_id, known in self._nodes.items()
            if known.rests_until > now
        }

    def _known(self, node_id: str) -> _Known:
        now = self._now()
        known = self._nodes.get(node_id)
        if known is None or now - max(known.noted_at, known.rests_until) > LONGEST_REST_S:
            known = self._nodes[node_id] = _Known()
        known.noted_at = now
        return known

    def _rest(self, known: _Known, why: str) -> None:
        known.rest_s = min(max(FIRST_REST_S, 2 * known.rest_s), LONGEST_REST_S)
        known.rests_until = self._now() + known.rest_s
        known.why = why
