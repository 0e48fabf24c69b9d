"""When a peer is next told and asked: often where an answer depends on it, seldom in a crowd.

N nodes that all beat with all, twice a second, pay for N² beats, each about a millisecond of both
sides: 23 on two cores did nothing else. So a node has a few beats a second for all peers it has no
reason to watch, and who finds one of them silent has everybody ask it (docs/decisions/015).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from zlib import crc32

PROBES_S = 1.5
"""Beats a second to peers that are not watched. As everybody is probed by all others together this
often, it is also how soon a silent node is found. More cost a node that idles about 0.1 % of a core
each."""

NEWS_S = 8.0
"""Beats a second at most to tell of what can wait: downloads, tokens a second."""

ACQUAINTED = 4
"""Beats with a new peer before it is one of many: it may know plans, and each side names the plans
it knows before it is sent others."""

CONFIRM_S = 0.7
"""How long a peer may take at most when another node has waited for it in vain, and this one has
not heard it meanwhile."""

SUSPECTED_S = 5.0
"""How long others are told of a node that fell silent here."""


def rest_s(own_id: str, peer_id: str, everyone: Collection[str], now: float) -> float:
    """Seconds until this node's turn to ask a peer that is not watched; `now` is wall-clock time.

    The others take turns, in the order of their ids, so that somebody asks each 1 / PROBES_S s. By
    intervals of their own they would fall into step, as news is told to all at once, and leave long
    silences between. Clocks that differ only spoil the spacing.
    """
    askers = sorted({*everyone, own_id} - {peer_id})
    round_s = len(askers) / PROBES_S
    turn = askers.index(own_id) / len(askers) + crc32(peer_id.encode()) / 2**32
    return (turn * round_s - now) % round_s or round_s


class News:
    """What others are told without being asked. `urgent` and `usual` give what this node would say:
    of the one every change is told at the next look, of the other now and then."""

    def __init__(
        self, urgent: Callable[[], object], usual: Callable[[], object], now: Callable[[], float]
    ) -> None:
        self._urgent, self._usual, self._now = urgent, usual, now
        self._told: tuple[object, object] = (urgent(), usual())
        self._at = now()

    def is_there(self, others: int) -> bool:
        """Whether there is anything to tell `others` peers; it counts as told."""
        now, urgent, usual = self._now(), self._urgent(), self._told[1]
        if now - self._at >= others / NEWS_S:
            usual = self._usual()
        if (urgent, usual) == self._told:
            return False
        self._told, self._at = (urgent, usual), now
        return True
