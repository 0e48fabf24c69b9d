"""Answers written while they come: events or lines, keep-alives while they are waited for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from aiohttp import web

from exo.download.progress import Progress
from exo.errors import ExoError
from exo.tasks import with_pulse

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""Headers are held back this long, so that a request that fails early fails with a real HTTP
status; from then on a keep-alive this often says what is waited for."""

EVENTS = "text/event-stream; charset=utf-8"
LINES = "application/x-ndjson"


class Waiting:
    """What an answer that has not begun waits for; `note` hears of it."""

    def __init__(self, model_id: str) -> None:
        self.progress = Progress("waiting for", model_id)

    def note(self, progress: Progress) -> None:
        self.progress = progress

    def comment(self) -> bytes:
        """In an event stream: no client takes it for data."""
        return f": {self.progress}\n\n".encode()


async def streamed(
    http: web.Request,
    parts: AsyncGenerator[bytes, None],
    content_type: str,
    keep_alive: Callable[[], bytes],
    failed: Callable[[ExoError], bytes],
    last: bytes = b"",
) -> web.StreamResponse:
    """Send `parts` as they come, then `last`. Where nothing comes, `keep_alive` is sent; what ends
    them after the headers are out is sent as `failed` has it.

    Raises:
        ExoError: what ended them before.
    """
    response: web.StreamResponse | None = None

    async def send(data: bytes) -> None:
        nonlocal response
        if response is None:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            response = web.StreamResponse(headers=headers | {"Content-Type": content_type})
            await response.prepare(http)
        if data:
            await response.write(data)

    try:
        async with contextlib.aclosing(with_pulse(parts, None, PATIENCE_S)) as pulsing:
            async for part in pulsing:
                await send(keep_alive() if part is None else part)
    except ConnectionResetError:
        raise
    except Exception as error:
        if response is None:
            raise
        # The status line is out: a part is the only way left to tell the client.
        if not isinstance(error, ExoError):
            logger.exception("streaming an answer to %s", http.path)
        known = error if isinstance(error, ExoError) else ExoError("internal error")
        await send(failed(known))
    await send(last)
    assert response is not None
    await response.write_eof()
    return response
