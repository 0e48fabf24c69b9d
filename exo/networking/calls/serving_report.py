"""What a node computes for whom, as it tells the others with its heartbeats."""

from __future__ import annotations

import msgspec

from exo.networking.calls.messages import decoded
from exo.networking.rings.frames import MemberRoom


class CacheUse(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a ring's KV cache; `capacity` is 0 while no member has told it."""

    capacity: int = 0
    used: int = 0
    kept: int = 0
    """Of those used, held by nobody who runs: they are free when somebody needs them."""
    shared: int = 0
    """Of those used, held by several."""


class PlanReport(msgspec.Struct, frozen=True, array_like=True):
    """What the head of a ring does; `members` have told what their parts of the cache hold."""

    model_id: str
    plan_hash: str
    running: int
    waiting: int
    tokens_per_s: float
    cache: CacheUse
    members: tuple[MemberRoom, ...]


class LinkReport(msgspec.Struct, frozen=True, array_like=True):
    """From the node to the next one of a ring: bytes of hidden states and tokens a second."""

    to: str
    bytes_per_s: float
    round_trip_ms: float


class NodeReport(msgspec.Struct, frozen=True, array_like=True):
    """`busy` is the share of the last seconds in which the engine computed; `plans` are those that
    the node heads; `slowdown` says how many times as long as usual its steps take, 0 if it has
    computed none lately; `links` are those that its rings use."""

    busy: float = 0.0
    plans: tuple[PlanReport, ...] = ()
    slowdown: float = 0.0
    links: tuple[LinkReport, ...] = ()


def encode_report(report: NodeReport) -> bytes:
    return msgspec.msgpack.encode(report)


def decode_report(data: bytes) -> NodeReport:
    """Raises InvalidFrame where it cannot be read."""
    return decoded(data, NodeReport) if data else NodeReport()
