"""Who may be there. Discovery only hears and tells; the node decides whom to connect to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from exo.networking.discovery.interfaces import Interface


@dataclass(frozen=True)
class Route:
    """One way to reach a node. `rank` orders kinds of interface, 0 best."""

    host: str
    port: int
    interface: str = "manual"
    rank: int = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class DiscoveryListener(ABC):
    """Told by a discovery, on the event loop."""

    @abstractmethod
    def heard(self, node_id: str, instance_id: str, route: Route) -> None:
        """A node says it is reachable by `route`. An empty node id: nobody knows who is there."""

    @abstractmethod
    def distrusted(self, node_id: str, route: Route, why: str) -> None:
        """Somebody calls himself a node of this cluster, and does not prove it."""

    @abstractmethod
    def left(self, node_id: str, instance_id: str) -> None:
        """A node says goodbye."""


class Discovery(ABC):
    """Finds candidates until stopped."""

    @abstractmethod
    async def start(self, listener: DiscoveryListener, port: int) -> None:
        """Begin; `port` is where this node listens for others."""

    async def use(self, interfaces: list[Interface]) -> None:
        """The machine has these interfaces now.

        Raises:
            OSError: one of them cannot be used yet; the others are.
        """
        return  # who does not announce itself has nothing to do

    @abstractmethod
    async def stop(self) -> None:
        """Say goodbye where that is possible, and end."""

    def status(self) -> dict[str, int]:
        """Counters for people who wonder why a peer is missing."""
        return {}


class NoDiscovery(Discovery):
    """This node looks for nobody; others may still connect to it."""

    async def start(self, listener: DiscoveryListener, port: int) -> None:
        return None

    async def stop(self) -> None:
        return None
