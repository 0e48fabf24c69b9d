"""Errors as the clients of each dialect expect them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from exo.api.http.routes import Handler
from exo.errors import ExoError, InvalidRequest

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""As nginx counts those who leave before their answer."""


def openai_error(error: ExoError) -> dict[str, Any]:
    """The JSON of an error, as https://platform.openai.com/docs/guides/error-codes has it."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    if error.http_status == 401:
        kind = "authentication_error"
    elif error.http_status == 429:
        kind = "rate_limit_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: ExoError) -> dict[str, Any]:
    """As https://docs.anthropic.com/en/api/errors has it."""
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def ollama_error(error: ExoError) -> dict[str, Any]:
    return {"error": error.message}


def _response(path: str, status: int, error: ExoError) -> web.Response:
    shape = openai_error
    if path.startswith("/v1/messages"):
        shape = anthropic_error
    elif path.startswith("/api/"):
        shape = ollama_error
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    return web.json_response(shape(error), status=status, headers=headers)


def as_errors(failed: Callable[[ExoError], None]) -> Any:
    """Every failure of a route as JSON with the right status; `failed` hears of it."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ExoError as error:
            logger.info("%s %s: %s", request.method, request.path, error.message)
            failed(error)
            return _response(request.path, error.http_status, error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _of_aiohttp(request, error)
        except ConnectionResetError:
            logger.info("%s %s: the client left", request.method, request.path)
            return web.Response(status=CLIENT_LEFT)  # which nobody reads
        except Exception as error:
            logger.exception("%s %s", request.method, request.path)
            internal = ExoError(f"internal error: {type(error).__name__}")
            failed(internal)
            return _response(request.path, 500, internal)

    return answer


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> web.Response:
    """What the library refuses by itself."""
    message = {
        404: f"there is nothing at {request.path}",
        405: f"{request.path} does not take {request.method}",
        413: f"the request body is larger than {request.client_max_size} bytes",
    }.get(error.status, error.reason)
    response = _response(request.path, error.status, InvalidRequest(message))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
