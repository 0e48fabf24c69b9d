"""What the cluster is doing: topology, plans, health."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from aiohttp import web

from exo import __version__
from exo.api.http.routes import Route
from exo.errors import InvalidRequest
from exo.logs import KEPT_LINES
from exo.orchestration.files.activity import as_json
from exo.orchestration.node import StandardNode

LINES = 100
"""Of a log, where nobody says how many."""


def cluster_view(node: StandardNode) -> dict[str, Any]:
    """Nodes, links, plans, what every node is doing for a model and computes for whom, as this node
    sees them."""
    view = node.topology().to_json()
    view["plans"] = [plan.to_json() for plan in node.plans]
    view["activity"] = [as_json(progress) for progress in node.activity.everyone()]
    view["serving"] = node.reports.to_json()
    return view


class ClusterRoutes:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node

    def routes(self) -> list[Route]:
        seen = "Nodes, links, plans and activity, as this node sees them"
        return [
            Route("GET", "/v1/topology", self.topology, seen),
            Route("GET", "/v1/cluster/models", self.models, "Which nodes hold which models' files"),
            Route("POST", "/v1/nodes/{node_id}/drain", self.drain, "Take a node out of all rings"),
            Route("DELETE", "/v1/nodes/{node_id}/drain", self.undo, "Use it for rings again"),
            Route("GET", "/v1/nodes/{node_id}/log", self.log, "The last lines of a node's log"),
            Route("GET", "/healthcheck", self.healthcheck, "Whether this process lives"),
            Route("GET", "/health", self.healthcheck, "The same, by llama.cpp's and vLLM's name"),
        ]

    async def topology(self, http: web.Request) -> web.Response:
        """Nodes, links, plans, what every node is doing for a model and computes for whom, as this
        node sees them, and what it holds itself."""
        return web.json_response(cluster_view(self._node) | {"status": self._node.status()})

    async def models(self, http: web.Request) -> web.Response:
        """Which nodes hold which models' files: bytes of disk, whether all of them, and when the
        model was last used there (seconds since 1970, null if never)."""
        held = await self._node.cluster_files.held_by_model()
        data = [
            {
                "id": model_id,
                "nodes": [
                    {
                        "node_id": node_id,
                        "size": model.size,
                        "whole": model.whole,
                        "last_used": model.last_used or None,
                    }
                    for node_id, model in holders.items()
                ],
            }
            for model_id, holders in held.items()
        ]
        return web.json_response({"object": "list", "data": data})

    async def drain(self, http: web.Request) -> web.Response:
        """Others take over what the node does in rings. Asked again it tells how far that is: the
        models in whose rings it still has a part, and why some cannot be served without it."""
        return await self._drain(http, undo=False)

    async def undo(self, http: web.Request) -> web.Response:
        return await self._drain(http, undo=True)

    async def _drain(self, http: web.Request, *, undo: bool) -> web.Response:
        node_id = unquote(http.match_info["node_id"])
        state = await self._node.drain_node(node_id, undo=undo)
        return web.json_response(
            {
                "node_id": node_id,
                "draining": not undo,
                "models": list(state.models),
                "problems": state.problems,
            }
        )

    async def log(self, http: web.Request) -> web.Response:
        """The last lines of a node's log, oldest first; "?lines=" says how many at most."""
        asked = http.query.get("lines", str(LINES))
        if not asked.isdigit() or not 0 < int(asked) <= KEPT_LINES:
            said = f"lines is a number from 1 to {KEPT_LINES}, got {asked!r}"
            raise InvalidRequest(said, param="lines")
        node_id = unquote(http.match_info["node_id"])
        lines = await self._node.read_log_of(node_id, int(asked))
        return web.json_response({"node_id": node_id, "lines": lines})

    async def healthcheck(self, http: web.Request) -> web.Response:
        """This process lives; `ready` lists models out of whose ring a token has come."""
        return web.json_response(
            {
                "status": "ok",
                "version": __version__,
                "node_id": self._node.config.node_id,
                "ready": [plan.model_id for plan in self._node.plans],
            }
        )
