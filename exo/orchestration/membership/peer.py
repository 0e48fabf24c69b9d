"""One node that was heard: by which ways, what its connection is like, what is wrong with it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from exo.errors import ExoError, PeerUnavailable
from exo.networking.calls.peer_handle import PeerHandle, PeerIdentity
from exo.networking.discovery.base import Route
from exo.orchestration.membership.patience import Patience

ROUTE_LIFETIME_S = 10.0
"""A route not announced for this long is forgotten; manual ones are told again and again."""

ROUND_TRIPS = 20
"""Of a peer's heartbeats that are remembered."""


@dataclass
class Peer:
    """One node that was heard. `handle` is set while a connection works; `alive` once the peer
    has one back to us as well."""

    node_id: str
    instance_id: str
    patience: Patience
    routes: dict[Route, float] = field(default_factory=dict)
    route: Route | None = None
    handle: PeerHandle | None = None
    identity: PeerIdentity | None = None
    alive: bool = False
    left: bool = False
    problem: str = ""
    round_trip_ms: float | None = None
    round_trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS))
    max_epoch: int = 0
    replaced: list[PeerHandle] = field(default_factory=list)
    double: tuple[str, float] | None = None  # another instance with this id, heard since
    beats: int = 0  # over this connection
    due: asyncio.Event = field(default_factory=asyncio.Event)  # the next beat, whatever the rhythm
    answered_at: float = 0.0  # the last beat; the event loop's clock
    suspected: bool = False  # another node waits for it in vain
    draining: bool = False

    def best_route(self, now: float) -> Route | None:
        """Of the routes announced lately, the one over the best kind of interface."""
        self.routes = {r: at for r, at in self.routes.items() if now - at < ROUTE_LIFETIME_S}
        return min(self.routes, key=lambda route: (route.rank, route.address), default=None)


def advice(who: str, route: Route, error: ExoError) -> str:
    """What to check where a node is heard and not reached."""
    if isinstance(error, PeerUnavailable):
        return (
            f"{who} is heard but cannot be reached at {route.address} ({error.message}): check "
            f"that its firewall allows TCP port {route.port}, and that the Wi-Fi does not isolate "
            "clients"
        )
    return error.message
