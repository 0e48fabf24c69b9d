"""What every node computes for whom, for people to see."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from exo.inference.engine import InferenceEngine
from exo.networking.calls.serving_report import LinkReport, NodeReport, PlanReport
from exo.orchestration.serving.rings import Rings

SAMPLE_S = 1.0
"""Rates are over at least so long."""


class Reports:
    """This node's report, and what the others have said."""

    def __init__(
        self,
        node_id: str,
        rings: Rings,
        engine: InferenceEngine,
        round_trips_s: Callable[[], Mapping[str, float]],
    ) -> None:
        self._node_id = node_id
        self._rings = rings
        self._engine = engine
        self._round_trips_s = round_trips_s
        self._others: dict[str, NodeReport] = {}
        self._at = time.monotonic()
        self._busy_s = engine.busy_s
        self._tokens: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._busy = 0.0
        self._sent: dict[str, int] = {}
        self._links: tuple[LinkReport, ...] = ()

    def own(self) -> NodeReport:
        self._sample()
        plans = tuple(
            PlanReport(
                scheduler.plan.model_id,
                scheduler.plan.hash,
                (load := scheduler.load).running,
                load.waiting,
                self._rates.get(scheduler.plan.hash, 0.0),
                load.cache,
                scheduler.rooms,
            )
            for scheduler in self._rings.schedulers
        )
        return NodeReport(self._busy, plans, self._engine.times.slowdown, self._links)

    def slowdowns(self) -> dict[str, float]:
        """By node, how many times as long as usual its steps take; 0 where nobody knows."""
        heard = {node_id: report.slowdown for node_id, report in self._others.items()}
        return {self._node_id: self._engine.times.slowdown, **heard}

    @property
    def busy_s(self) -> float:
        """Seconds in which this node's engine computed steps."""
        return self._engine.busy_s

    def heard(self, node_id: str, report: NodeReport) -> None:
        self._others[node_id] = report

    def lost(self, node_id: str) -> None:
        self._others.pop(node_id, None)

    def to_json(self) -> dict[str, Any]:
        """By node."""
        everyone = {self._node_id: self.own(), **self._others}
        return {node_id: _plain(report) for node_id, report in everyone.items()}

    def _sample(self) -> None:
        now = time.monotonic()
        passed = now - self._at
        if passed < SAMPLE_S:
            return
        busy_s = self._engine.busy_s
        self._busy = min(1.0, (busy_s - self._busy_s) / passed)
        tokens = {each.plan.hash: each.load.tokens for each in self._rings.schedulers}
        self._rates = {
            plan: (count - self._tokens.get(plan, 0)) / passed for plan, count in tokens.items()
        }
        sent = self._rings.sent_bytes()
        # (Rings that ended take their counts with them.)
        rates = {to: max(0, count - self._sent.get(to, 0)) / passed for to, count in sent.items()}
        if rates != {link.to: link.bytes_per_s for link in self._links}:
            trips = self._round_trips_s()
            self._links = tuple(
                LinkReport(to, rate, 1000 * trips.get(to, 0.0)) for to, rate in rates.items()
            )
        self._at, self._busy_s, self._tokens, self._sent = now, busy_s, tokens, sent


def _plain(report: NodeReport) -> dict[str, Any]:
    return {
        "busy": round(report.busy, 3),
        "slowdown": round(report.slowdown, 1),
        "plans": [
            {
                "model_id": plan.model_id,
                "plan_hash": plan.plan_hash,
                "running": plan.running,
                "waiting": plan.waiting,
                "tokens_per_s": round(plan.tokens_per_s, 1),
                "kv_pages": _fields(plan.cache),
                "members": [
                    {"node_id": member.node_id, "kv_pages": _fields(member.room)}
                    for member in plan.members
                ],
            }
            for plan in report.plans
        ],
        "links": [
            {
                "to": link.to,
                "bytes_per_s": round(link.bytes_per_s),
                "round_trip_ms": round(link.round_trip_ms, 2),
            }
            for link in report.links
        ],
    }


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)
