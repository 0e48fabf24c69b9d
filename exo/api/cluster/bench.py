"""Measurements on a running cluster: what `exo bench` asks for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from aiohttp import web
from msgspec import Meta

from exo.api.http.bodies import Body, read_body
from exo.api.http.routes import Route
from exo.download.progress import unheard
from exo.models.card import resolve
from exo.orchestration.benchmark import measure
from exo.orchestration.node import StandardNode


class BenchBody(Body, kw_only=True):
    """POST /v1/bench."""

    model: str
    context: Annotated[int, Meta(ge=1, le=131072)] = 1
    tokens: Annotated[int, Meta(ge=1, le=4096)] = 1
    batch: Annotated[int, Meta(ge=1, le=64)] = 1


class BenchRoutes:
    """The handler, over one node."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node

    def routes(self) -> list[Route]:
        return [Route("POST", "/v1/bench", self.bench, "Time a model's answers", BenchBody)]

    async def bench(self, http: web.Request) -> web.Response:
        """-> {"first_token_s", "decode_tok_s", "nodes"}."""
        body = await read_body(http, BenchBody)
        resolve(body.model)
        timing = await measure(
            self._node, body.model, body.context, body.tokens, body.batch, unheard
        )
        plans = (plan for plan in self._node.plans if plan.model_id == body.model)
        nodes = max((len(plan.members) for plan in plans), default=1)
        return web.json_response({**asdict(timing), "nodes": nodes})
