"""The cluster as one node sees it at one moment: an immutable snapshot."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from exo.topology.capabilities import DeviceCapabilities


@dataclass(frozen=True)
class NodeView:
    """One node: `state` is "self", "alive" or, with the reason in `problem`, "unreachable"."""

    node_id: str
    state: str
    address: str
    api_url: str = ""
    capabilities: DeviceCapabilities | None = None
    problem: str = ""
    draining: bool = False  # it is to have no part in rings


@dataclass(frozen=True)
class LinkView:
    """A connection this node keeps to a peer. `round_trip_ms` is that of the last heartbeat."""

    source: str
    target: str
    interface: str
    round_trip_ms: float | None = None


def planner_among(memory_bytes: Mapping[str, int], draining: Collection[str]) -> str:
    """Of the live nodes that do not leave, if there are any, the one with the most memory in all;
    ties go to the smallest id."""
    live = memory_bytes.keys() - draining or memory_bytes.keys()
    return min(live, key=lambda node: (-memory_bytes[node], node))


@dataclass(frozen=True)
class Topology:
    """Who is in the cluster and how they are connected."""

    self_id: str
    nodes: dict[str, NodeView] = field(default_factory=dict)
    links: tuple[LinkView, ...] = ()

    @property
    def live(self) -> dict[str, DeviceCapabilities]:
        """Capabilities of every node that can be given work, this one included."""
        return {
            node.node_id: node.capabilities
            for node in self.nodes.values()
            if node.state in ("self", "alive") and node.capabilities is not None
        }

    @property
    def planner_id(self) -> str:
        """Raises ValueError where no node is alive."""
        memory = {node: found.memory_total_bytes for node, found in self.live.items()}
        return planner_among(memory, {n for n, view in self.nodes.items() if view.draining})

    def to_json(self) -> dict[str, Any]:
        return {
            "self": self.self_id,
            "nodes": {node_id: asdict(node) for node_id, node in sorted(self.nodes.items())},
            "links": [asdict(link) for link in self.links],
        }
