"""Routes as data: what is served where, for the server and for /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from exo.api.http.bodies import Body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """`path` as aiohttp has it. `body`: what is sent; `content`: the type of what comes
    back; `streams`: the content type of a streamed answer."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[Body] | None = None
    content: str = "application/json"
    streams: str = ""


def add_routes(app: web.Application, routes: Sequence[Route]) -> None:
    for route in routes:
        if route.method == "GET":  # HEAD comes along, which monitors ask
            app.router.add_get(route.path, route.handler)
        else:
            app.router.add_route(route.method, route.path, route.handler)
