"""A running node's API, as the terminal commands use it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp

from exo.cli.keys import API_KEY
from exo.errors import ExoError, PeerUnavailable, error_from_code


def session(timeout: aiohttp.ClientTimeout | None = None) -> aiohttp.ClientSession:
    """For requests to the node on this machine."""
    key = os.environ.get(API_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        timeout=timeout or aiohttp.ClientTimeout(total=300), headers=headers
    )


@dataclass(frozen=True)
class ChatEvent:
    """A piece of text or of a thought, what the answer is waiting for, why it ended, or the API's
    numbers of tokens."""

    text: str = ""
    thought: str = ""
    waiting: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] | None = None


async def node_at(port: int) -> str | None:
    """The URL of the node on this machine that answers on `port`, or None."""
    url = f"http://127.0.0.1:{port}"
    timeout = aiohttp.ClientTimeout(total=1)
    try:
        async with (
            session(timeout) as opened,
            opened.get(f"{url}/healthcheck") as response,
        ):
            return url if "node_id" in await response.json() else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


async def get_json(port: int, path: str) -> Any:
    """GET from the node on this machine. Raises what `send_json` raises."""
    return await send_json(port, "GET", path)


async def send_json(port: int, method: str, path: str) -> Any:
    """A request without a body to the node on this machine.

    Raises:
        PeerUnavailable: no node answers there.
        ExoError: what the node answered with.
    """
    url = await node_at(port)
    if url is None:
        raise PeerUnavailable(f"no exo node answers on port {port} of this machine; start `exo`")
    async with session() as opened, opened.request(method, url + path) as response:
        body = await response.json()
        if response.status != 200:
            raise _error(body)
        return body


async def stream_chat(url: str, body: dict[str, Any]) -> AsyncGenerator[ChatEvent, None]:
    """One streamed answer.

    Raises:
        ExoError: what the node answered with.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    try:
        async with (
            session(timeout) as opened,
            opened.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise _error(await response.json())
            async for line in response.content:
                if (event := _event(line.decode().rstrip("\n"))) is not None:
                    yield event
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerUnavailable(f"the node at {url} stopped answering: {error}") from error


def _event(line: str) -> ChatEvent | None:
    if line.startswith(":"):
        return ChatEvent(waiting=line[1:].strip())
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    data = json.loads(line[6:])
    if "error" in data:
        raise _error(data)
    if data.get("usage"):
        return ChatEvent(usage=data["usage"])
    (choice,) = data["choices"]
    delta = choice["delta"]
    return ChatEvent(
        delta.get("content", ""),
        delta.get("reasoning_content", ""),
        finish_reason=choice["finish_reason"] or "",
    )


def _error(body: dict[str, Any]) -> ExoError:
    error = body["error"]
    return error_from_code(error["code"], error["message"], error.get("param"))
