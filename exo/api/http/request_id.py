"""A name for each request: in its answer's headers, in the log, and in the ids of its sequences,
which every node of a ring logs."""

from __future__ import annotations

import itertools
import uuid
from contextvars import ContextVar

from aiohttp import web

from exo.api.http.routes import Handler
from exo.logs import request_id

HEADER = "X-Request-Id"

_answers: ContextVar[itertools.count[int] | None] = ContextVar("answers", default=None)


@web.middleware
async def with_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name it. What the client calls it itself is in the log beside."""
    name = uuid.uuid4().hex
    request["request_id"] = name
    request_id.set(name)
    _answers.set(itertools.count())
    return await handler(request)


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
