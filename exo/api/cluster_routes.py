"""What the cluster is doing: topology, plans, health."""

from __future__ import annotations

from aiohttp import web

from exo import __version__
from exo.orchestration.activity import as_json
from exo.orchestration.node import StandardNode


class ClusterRoutes:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/topology", self.topology)
        app.router.add_get("/healthcheck", self.healthcheck)

    async def topology(self, http: web.Request) -> web.Response:
        """Nodes, links, plans and what every node is doing for a model, as this node sees them,
        and what it holds itself."""
        view = self._node.topology().to_json()
        view["plans"] = [plan.to_json() for plan in self._node.plans]
        view["activity"] = [as_json(progress) for progress in self._node.activity.everyone()]
        view["status"] = self._node.status()
        return web.json_response(view)

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
