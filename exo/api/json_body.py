"""Bodies of requests as JSON."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from exo.errors import InvalidRequest


async def json_body(http: web.Request) -> Any:
    """Raises InvalidRequest if the body is not JSON."""
    try:
        return json.loads(await http.read())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not JSON: {error}") from error


async def json_with_model(http: web.Request) -> dict[str, Any]:
    """An object that names a model. Raises InvalidRequest if the body is none."""
    body = await json_body(http)
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise InvalidRequest("expected a JSON object with a model", param="model")
    return body
