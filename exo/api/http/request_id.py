"""A name for each request: in its answer's headers, in the log, and in the ids of its sequences,
which every node of a ring logs. And whose it is."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from contextvars import ContextVar

from aiohttp import web

from exo.api.http.access import key_of
from exo.api.http.routes import Handler
from exo.logs import request_id

HEADER = "X-Request-Id"

client: ContextVar[str] = ContextVar("client", default="")
"""Whose request is served: among clients schedulers take turns."""

_answers: ContextVar[itertools.count[int] | None] = ContextVar("answers", default=None)


@web.middleware
async def with_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name it. What the client calls it itself is in the log beside."""
    name = uuid.uuid4().hex
    request["request_id"] = name
    request_id.set(name)
    _answers.set(itertools.count())
    client.set(client_of(request))
    return await handler(request)


def client_of(request: web.Request) -> str:
    """Whose key it brings, by a digest, or the machine it comes from."""
    if key := key_of(request):
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return request.remote or ""


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """When an answer's headers are about to be sent."""
    if (name := request.get("request_id")) is not None:
        response.headers[HEADER] = name


def next_answer_id() -> str:
    """For an answer of the request that is served: its name, with a number from the second on."""
    name, numbers = request_id.get(), _answers.get()
    if not name or numbers is None:
        return uuid.uuid4().hex
    number = next(numbers)
    return name if number == 0 else f"{name}.{number}"
