"""Measurements on a running cluster: what `exo bench` asks for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from exo.api.json_body import json_with_model
from exo.download.progress import unheard
from exo.errors import InvalidRequest
from exo.orchestration.benchmark import measure
from exo.orchestration.node import StandardNode

LIMITS = {"context": 131072, "tokens": 4096, "batch": 64}


class BenchRoutes:
    """The handler, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/bench", self.bench)

    async def bench(self, http: web.Request) -> web.Response:
        """{"model", "context", "tokens", "batch"} -> {"first_token_s", "decode_tok_s", "nodes"}."""
        body = await json_with_model(http)
        context, tokens, batch = (_count(body, name) for name in LIMITS)
        timing = await measure(self._node, body["model"], context, tokens, batch, unheard)
        plans = (plan for plan in self._node.plans if plan.model_id == body["model"])
        nodes = max((len(plan.members) for plan in plans), default=1)
        return web.json_response({**asdict(timing), "nodes": nodes})


def _count(body: dict[str, Any], name: str) -> int:
    value = body.get(name, 1)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LIMITS[name]:
        raise InvalidRequest(f"{name} is {value!r}; expected 1 to {LIMITS[name]}", param=name)
    return value
