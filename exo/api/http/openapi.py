"""/openapi.json, made of the routes and of the types that check the bodies, and a page that shows
it.

Format: https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from exo import __version__
from exo.api.http.bodies import Body
from exo.api.http.pages import Pages
from exo.api.http.routes import Route

_REF = "#/components/schemas/{name}"
_JSON = "application/json"

# By status: what it means. Every route may answer so.
_ERRORS = {
    400: "The request is wrong; the message says what and where",
    401: "An API key is needed",
    403: "Not for pages of this site, or the hub does not give the model to this machine",
    404: "There is no such model, or nothing at this path",
    405: "This path does not take this method",
    409: "It was cancelled",
    413: "The body is too large",
    429: "Too many requests wait already",
    500: "Something failed inside",
    502: "The model could not be brought",
    503: "A node is gone or memory is short; try again",
    504: "Something did not move until its deadline",
    507: "The disk is full",
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(msgspec.Struct):
    error: ErrorDetail


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI description of some routes."""
    bodies = sorted({route.body for route in routes if route.body}, key=lambda one: one.__name__)
    _, schemas = msgspec.json.schema_components([*bodies, OpenAIError], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "exo",
            "version": __version__,
            "description": "One cluster out of the machines you own. OpenAI's, Anthropic's and "
            "Ollama's APIs, and what the cluster does.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    content: dict[str, Any] = {route.content: {"schema": {}}}
    if route.streams:
        content[route.streams.split(";")[0]] = {}
    responses: dict[str, Any] = {
        "200": {"description": "What was asked for", "content": content},
        **({"202": {"description": "It was begun"}} if path == "/v1/download" else {}),
    }
    error = {_JSON: {"schema": {"$ref": _REF.format(name="OpenAIError")}}}
    own_shape = path.startswith(("/v1/messages", "/api/"))
    for status, meaning in _ERRORS.items():
        shape = {_JSON: {"schema": {"type": "object"}}} if own_shape else error
        responses[str(status)] = {"description": meaning, "content": shape}
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_")
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": name,
        "responses": responses,
    }
    if parameters := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": one, "in": "path", "required": True, "schema": {"type": "string"}}
            for one in parameters
        ]
    if route.body is not None:
        schema = {"$ref": _REF.format(name=_name(route.body))}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


def _name(body: type[Body]) -> str:
    return body.__name__


def openapi_routes(routes: Sequence[Route], pages: Pages) -> list[Route]:
    """The description of `routes` and of these, and the pages that show it and the guide."""

    async def described(http: web.Request) -> web.Response:
        return web.json_response(whole())

    own = [
        Route("GET", "/openapi.json", described, "This description"),
        Route("GET", "/docs", pages.page("docs.html"), "The same for people", content="text/html"),
        Route(
            "GET", "/docs/guide", pages.page("guide.html"), "How to use exo", content="text/html"
        ),
    ]
    whole = cache(lambda: document([*routes, *own]))  # made when somebody asks, not at each start
    return own
