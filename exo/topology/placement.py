"""Which nodes serve a model: by predicted time for a token, and over as many as that allows.

A token passes every member in turn. Each reads its part of the weights, which is what decoding
takes its time for, and sends on; so more nodes never make one answer faster than the fastest that
holds the model alone. They hold more chats, and serve more clients, so they are worth a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from exo.errors import ModelTooLarge
from exo.shard import RingMember, Shard
from exo.topology.partitioning import (
    ModelSizes,
    Partition,
    RingMemoryWeightedPartitioningStrategy,
)

TOLERANCE = 1.15
"""A plan over more nodes may be so much slower than the fastest. More spreads models further, to
where each answer feels it; less leaves memory of nearly equal machines unused."""

KEEP_TOLERANCE = 2.0
"""The same for the nodes that serve already: rates are measured, where others compute too, and to
move layers costs seconds and what is kept of chats."""

STEP_S = 0.00025
"""What a member takes for a step beside reading weights: scheduling, sampling, Python."""

LAYER_S = 0.000035
"""What each layer takes beside reading weights: attention, norms, threads that wait for others."""

BARE_SHARE = 0.75
"""Of the rate at which bare products read weights, what decoding reaches between them."""

HOP_S = 0.00025
"""What sending hidden states takes beside half a round trip."""

HEARTBEAT_S = 0.001
"""Of a heartbeat's round trip, what both sides' programs take: hidden states, on connections of
their own, are not held up by these."""

_SLOWER = "answers are faster without it"

_CONSIDERED = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96)
"""Numbers of nodes for which a placement is looked at, and all."""


class PartitionRule(StrEnum):
    """`MEMORY`: every node gets layers, in proportion to its memory. `SPEED`: the plan that is
    predicted to be fastest. `AUTO`: of those nearly as fast the one over most nodes."""

    AUTO = "auto"
    MEMORY = "memory"
    SPEED = "speed"


@dataclass(frozen=True)
class NodePace:
    """`read_bytes_s`: of weights while decoding, 0 where that is not known; `round_trips_s`: to
    other nodes, by id."""

    read_bytes_s: float = 0.0
    round_trips_s: Mapping[str, float] = field(default_factory=dict)


def predicted_step_s(
    members: Sequence[RingMember], sizes: ModelSizes, paces: Mapping[str, NodePace]
) -> float:
    """Seconds from a token of one sequence to its next, through these members."""
    seconds = 0.0
    for index, member in enumerate(members):
        shard, pace = member.shard, paces[member.node_id]
        weights = sum(sizes.layers[shard.start_layer : shard.end_layer])
        weights -= sizes.kv_reserve * shard.layer_count
        weights -= sum(sizes.unread[shard.start_layer : shard.end_layer])
        weights += sizes.last if shard.is_last else 0
        seconds += _beside_weights_s(shard) + weights / pace.read_bytes_s
        following = members[(index + 1) % len(members)].node_id
        if following != member.node_id:
            link_s = max(0.0, pace.round_trips_s.get(following, 0.0) - HEARTBEAT_S)
            seconds += HOP_S + link_s / 2
    return seconds


def read_rate(shard: Shard, weights: int, step_s: float) -> float:
    """Bytes a second at which a node reads that takes so long for a step of one token through a
    shard of so many bytes."""
    return weights / max(1e-6, step_s - _beside_weights_s(shard))


def _beside_weights_s(shard: Shard) -> float:
    return STEP_S + LAYER_S * shard.layer_count


def is_slower(reason: str) -> bool:
    """Whether a node is left out, by this reason, of a plan that it could take part in."""
    return reason.startswith(_SLOWER)


def place(
    rule: PartitionRule,
    model_id: str,
    available_bytes: Mapping[str, int],
    sizes: ModelSizes,
    paces: Mapping[str, NodePace],
    serving: Sequence[str] = (),
) -> Partition:
    """The layers of `sizes` on nodes with `available_bytes` of free memory each. `serving` are the
    nodes that serve the model now.

    Raises:
        ModelTooLarge: no placement fits.
    """
    strategy = RingMemoryWeightedPartitioningStrategy()
    known = all(paces.get(node, NodePace()).read_bytes_s > 0 for node in available_bytes)
    if rule is PartitionRule.MEMORY or not known:
        by_memory = strategy.partition(model_id, dict(available_bytes), sizes)
        seconds = predicted_step_s(by_memory.members, sizes, paces) if known else 0.0
        return replace(by_memory, predicted_step_s=seconds)
    found = [
        replace(one, predicted_step_s=predicted_step_s(one.members, sizes, paces))
        for one in _candidates(strategy, model_id, available_bytes, sizes, paces, serving)
    ]
    if not found:  # the whole cluster's refusal says what is missing
        return strategy.partition(model_id, dict(available_bytes), sizes)
    fastest = min(one.predicted_step_s for one in found)
    chosen = _chosen(rule, found, fastest, serving)
    return replace(chosen, left_out=(*chosen.left_out, *_slower(chosen, found, available_bytes)))


def _candidates(
    strategy: RingMemoryWeightedPartitioningStrategy,
    model_id: str,
    available_bytes: Mapping[str, int],
    sizes: ModelSizes,
    paces: Mapping[str, NodePace],
    serving: Sequence[str],
) -> Iterator[Partition]:
    """Placements over the fastest one, two, … nodes, and over those that serve: by memory, and by
    rates."""
    order = sorted(
        available_bytes,
        key=lambda node: (-paces[node].read_bytes_s, -available_bytes[node], node),
    )
    counts = sorted({*(n for n in _CONSIDERED if n < len(order)), len(order)})
    groups = [order[:count] for count in counts]
    if serving and set(serving) <= set(order):
        groups.append(list(serving))
    for group in groups:
        memory = {node: available_bytes[node] for node in group}
        for weights in (None, {node: paces[node].read_bytes_s for node in group}):
            try:
                yield strategy.partition(model_id, memory, sizes, weights)
            except ModelTooLarge:
                continue  # with more nodes it may fit


def _chosen(
    rule: PartitionRule, found: Sequence[Partition], fastest: float, serving: Sequence[str]
) -> Partition:
    if rule is PartitionRule.SPEED:
        return min(found, key=lambda one: (one.predicted_step_s, len(one.members)))

    def worth(one: Partition) -> tuple[int, float]:
        return -len(one.members), one.predicted_step_s

    near = [one for one in found if one.predicted_step_s <= TOLERANCE * fastest]
    chosen = min(near, key=worth)
    kept = [
        one
        for one in found
        if {member.node_id for member in one.members} == set(serving)
        and one.predicted_step_s <= KEEP_TOLERANCE * fastest
    ]
    if kept and len(kept[0].members) >= len(chosen.members):
        return min(kept, key=worth)
    return chosen


def _slower(
    chosen: Partition, found: Sequence[Partition], nodes: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Why the other nodes are left out."""
    own = {member.node_id for member in chosen.members} | {node for node, _ in chosen.left_out}
    others = [one for one in found if len(one.members) > len(chosen.members)]
    why = _SLOWER
    if others:
        with_more = min(one.predicted_step_s for one in others)
        why += (
            f": {1 / chosen.predicted_step_s:.0f} tokens a second are predicted on "
            f"{len(chosen.members)} node(s), {1 / with_more:.0f} on more"
        )
    return [
        (node, f"{why} (--partition memory uses every node)") for node in nodes if node not in own
    ]
