"""Shard and RingPlan: who runs which layers of a model. Both are values that check themselves."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from exo.errors import InvalidFrame, PlanMismatch


@dataclass(frozen=True, order=True)
class Shard:
    """Layers [start_layer, end_layer) of a model of n_layers. Of a mixture's experts that only some
    tokens go through `expert_share` of the bytes is in memory, the rest on disk.

    Raises:
        InvalidFrame: the range is empty or outside [0, n_layers), or the share outside (0, 1].
    """

    model_id: str
    start_layer: int
    end_layer: int
    n_layers: int
    expert_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.expert_share <= 1:
            raise InvalidFrame(
                f"shard of {self.model_id} has {self.expert_share} of its experts in memory: "
                "expected more than 0, and at most 1"
            )
        if not 0 <= self.start_layer < self.end_layer <= self.n_layers:
            raise InvalidFrame(
                f"shard of {self.model_id} has layers [{self.start_layer}, {self.end_layer}) "
                f"of {self.n_layers}: expected 0 <= start < end <= n_layers"
            )

    @property
    def is_first(self) -> bool:
        return self.start_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.n_layers

    @property
    def layer_count(self) -> int:
        return self.end_layer - self.start_layer

    def __str__(self) -> str:
        return f"{self.model_id}[{self.start_layer}:{self.end_layer}]/{self.n_layers}"


@dataclass(frozen=True)
class RingMember:
    """One node's place in a ring."""

    node_id: str
    shard: Shard


@dataclass(frozen=True)
class RingPlan:
    """The ordered shards of one model over nodes.

    `epoch` orders plans: a later plan of the cluster has a larger one. `checkpoint` is the digest
    of the model's files that every member must hold. `left_out` maps nodes that could have
    served to the reason they do not. `predicted_step_s` is what a token of one answer alone is
    expected to take, 0 where that was not asked. `routed_share`: of a mixture's experts, those that
    a token is routed to.

    Raises:
        PlanMismatch: the shards are not contiguous, complete and disjoint, or a node is named
            twice, or they belong to another model, or the share is none.
    """

    model_id: str
    epoch: int
    planner_id: str
    checkpoint: str
    members: tuple[RingMember, ...]
    left_out: tuple[tuple[str, str], ...] = field(default=())
    predicted_step_s: float = 0.0
    routed_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.members:
            raise PlanMismatch(f"a plan of {self.model_id} has no members")
        if len({m.node_id for m in self.members}) != len(self.members):
            raise PlanMismatch(f"a plan of {self.model_id} names a node twice")
        if not 0 < self.routed_share <= 1:
            raise PlanMismatch(
                f"a plan of {self.model_id} routes a token to {self.routed_share} of the experts: "
                "expected more than 0, and at most 1"
            )
        expected_start = 0
        n_layers = self.members[0].shard.n_layers
        for member in self.members:
            shard = member.shard
            if shard.model_id != self.model_id or shard.n_layers != n_layers:
                raise PlanMismatch(f"{shard} does not belong to a plan of {self.model_id}")
            if shard.start_layer != expected_start:
                raise PlanMismatch(
                    f"plan of {self.model_id}: {shard} starts at layer {shard.start_layer}, "
                    f"expected {expected_start} (layers must be covered exactly once)"
                )
            expected_start = shard.end_layer
        if expected_start != n_layers:
            raise PlanMismatch(
                f"plan of {self.model_id} ends at layer {expected_start} of {n_layers}"
            )

    @cached_property
    def hash(self) -> str:
        """16 hex digits over everything that decides which tokens come out of the ring."""
        identity = (self.model_id, self.epoch, self.planner_id, self.checkpoint, self._places())
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def _places(self) -> list[tuple[str | int | float, ...]]:
        places: list[tuple[str | int | float, ...]] = []
        for member in self.members:
            shard = member.shard
            own = (member.node_id, shard.start_layer, shard.end_layer)
            places.append(own if shard.expert_share == 1 else (*own, shard.expert_share))
        return places

    @property
    def n_layers(self) -> int:
        return self.members[0].shard.n_layers

    @property
    def head_id(self) -> str:
        return self.members[0].node_id

    @property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(m.node_id for m in self.members)

    def shard_of(self, node_id: str) -> Shard:
        """The shard of a member; raises PlanMismatch for a node that is none."""
        for member in self.members:
            if member.node_id == node_id:
                return member.shard
        raise PlanMismatch(f"node {node_id} is not a member of plan {self.hash} ({self.model_id})")

    def next_after(self, node_id: str) -> str:
        """The node that receives what `node_id` computed; after the tail comes the head."""
        ids = self.node_ids
        return ids[(ids.index(node_id) + 1) % len(ids)]

    def others_after(self, node_id: str) -> tuple[str, ...]:
        """All other members, in the order in which a step passes them."""
        ids = self.node_ids
        own = ids.index(node_id)
        return (*ids[own + 1 :], *ids[:own])

    @property
    def expert_share(self) -> float:
        """Of the experts' bytes of a mixture, what every member has in memory at least."""
        return min(member.shard.expert_share for member in self.members)

    def same_files_and_nodes(self, other: RingPlan) -> bool:
        """True if both spread the same files over the same nodes, wherever they cut."""
        mine, others = set(self.node_ids), set(other.node_ids)
        return self.checkpoint == other.checkpoint and mine == others

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"hash": self.hash}
