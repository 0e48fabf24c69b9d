"""Who may use the API: pages of this node and of sites that were named, programs with a key."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from exo.api.http.routes import Handler
from exo.errors import Unauthorized

_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_OPEN_PATHS = ("/", "/healthcheck", "/health", "/docs", "/docs/guide")
_OPEN_FOLDER = "/tinychat/"


@dataclass(frozen=True)
class Access:
    """`api_keys`: one of them is needed for everything but the pages and /healthcheck; none: nobody
    is asked. `origins`: sites whose pages may use the API, "*" for all."""

    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def only_with_key(keys: Sequence[str]) -> Any:
    """Refuse requests without one of the keys, as a Bearer token or in x-api-key."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in _OPEN_PATHS or request.path.startswith(_OPEN_FOLDER)
        if keys and not is_open and request.method != "OPTIONS":
            given = key_of(request)
            sent = given.encode("utf-8", "surrogateescape")  # headers may be any bytes
            # All are compared, in constant time: how long it takes tells nothing.
            matches = [hmac.compare_digest(sent, key.encode()) for key in keys]
            if not any(matches):
                said = "the API key is none of this node's" if given else "an API key is needed"
                raise Unauthorized(f"{said}: send it as `Authorization: Bearer KEY`")
        return await handler(request)

    return check


def key_of(request: web.Request) -> str:
    """What the request brings, "" for none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key", "")


def only_known_origins(origins: Sequence[str], *, loopback_only: bool) -> Any:
    """Refuse pages of sites that were not named: a browser sends their origin with what they ask of
    us, and a rebound DNS name shows in the Host header. Pages of those that were get the headers
    that they need (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = urlsplit(f"//{request.host}").hostname or ""
        if loopback_only and host not in _LOOPBACK_NAMES:
            raise web.HTTPForbidden(reason=f"this node answers on localhost only, not as {host}")
        origin = request.headers.get("Origin")
        if origin is None or urlsplit(origin).netloc == request.host:
            return await handler(request)
        if "*" not in origins and origin not in origins:
            raise web.HTTPForbidden(
                reason=f"pages of {origin} may not use this node; allow them with --cors-origin"
            )
        request["cors_origin"] = origin
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204)
        return await handler(request)

    return check


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """When an answer's headers are about to be sent, a stream's too."""
    origin = request.get("cors_origin")
    if origin is None:
        return
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Vary"] = "Origin"
    response.headers["Access-Control-Expose-Headers"] = "X-Request-Id"
    if request.method == "OPTIONS":
        wanted = request.headers.get("Access-Control-Request-Headers", "*")
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, HEAD"
        response.headers["Access-Control-Allow-Headers"] = wanted
        response.headers["Access-Control-Max-Age"] = "600"
