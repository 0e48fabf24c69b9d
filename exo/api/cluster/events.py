"""What happens in the cluster, as it happens: one stream of events for who shows it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web

from exo.api.cluster.state import cluster_view
from exo.api.http.routes import Route
from exo.api.http.streaming import EVENTS
from exo.errors import InvalidRequest
from exo.orchestration.files.activity import as_json
from exo.orchestration.node import StandardNode

KEEP_ALIVE_S = 5.0
"""A client of the stream hears something at least this often."""

LOOK_S = 1.0
"""The cluster is looked at this often."""

KINDS = ("progress", "cluster")


class EventRoutes:
    """The handler, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node

    def routes(self) -> list[Route]:
        summary = "What every node brings, and the cluster, as it happens"
        return [Route("GET", "/v1/events", self.events, summary, streams=EVENTS)]

    async def events(self, http: web.Request) -> web.StreamResponse:
        """Server-sent events: "progress", what a node does for a model, and "cluster", the cluster
        as /v1/topology has it without what this node holds itself. Each when it changes, all of
        them at first, so whoever connects again has missed nothing. "?of=progress" asks for one
        kind."""
        wanted = http.query.getall("of", list(KINDS))
        if unknown := set(wanted) - set(KINDS):
            said = f"of is {' or '.join(KINDS)}, got {sorted(unknown)[0]!r}"
            raise InvalidRequest(said, param="of")
        headers = {"Content-Type": EVENTS, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(http)
        now = asyncio.get_running_loop().time
        told: dict[tuple[str, ...], dict[str, Any]] = {}
        said_at = looked_at = 0.0
        while True:
            change = self._node.activity.next_change()  # before looking: nothing is missed
            items = self._progress() if "progress" in wanted else {}
            if "cluster" in wanted and now() - looked_at >= LOOK_S:
                looked_at = now()
                items["cluster",] = cluster_view(self._node)
            for key, item in items.items():
                if told.get(key) != item:
                    told[key], said_at = item, now()
                    await response.write(_event(key[0], item))
            if now() - said_at >= KEEP_ALIVE_S:
                said_at = now()
                await response.write(b": still here\n\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await change.wait()

    def _progress(self) -> dict[tuple[str, ...], dict[str, Any]]:
        everyone = self._node.activity.everyone()
        return {("progress", each.node_id, each.model_id): as_json(each) for each in everyone}


def _event(kind: str, item: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(item)}\n\n".encode()
