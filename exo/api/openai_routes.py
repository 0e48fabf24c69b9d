"""OpenAI's dialect: chat completions, streamed or whole, and the list of models.

Format: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from exo.api.chat import Answer, Chat, Piece
from exo.api.chat_request import ChatDefaults, ChatRequest, parse_chat_request
from exo.api.errors import error_body
from exo.api.json_body import json_body
from exo.download.progress import Progress, unheard
from exo.errors import ExoError, ModelNotFound
from exo.inference.sampling import SampledToken
from exo.models.card import registry, resolve
from exo.models.tokenizer import Tokenizer
from exo.orchestration.node import StandardNode
from exo.tasks import with_pulse

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""A stream's headers are held back this long, so that a request that fails early fails with a real
HTTP status; from then on a comment this often says what is waited for."""


class OpenAIRoutes:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, defaults: ChatDefaults) -> None:
        self._node = node
        self._chat = Chat(node)
        self._defaults = defaults
        self._started = int(time.time())

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model_id:.+}", self.model)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        request = parse_chat_request(await json_body(http), self._defaults)
        resolve(request.model)
        if request.stream:
            return await _Stream(http, request, self._chat).respond()
        answer = await self._chat.answer(request, unheard)
        return web.json_response(await _whole(request, answer))

    async def models(self, http: web.Request) -> web.Response:
        """Models that can be chatted with now: those here, fetchable, or served by the cluster."""
        available = await asyncio.to_thread(self._node.store.available)
        ids = [card.model_id for card in available]
        ids += sorted({plan.model_id for plan in self._node.plans} - set(ids))
        return web.json_response({"object": "list", "data": [self._model(i) for i in ids]})

    async def model(self, http: web.Request) -> web.Response:
        model_id = unquote(http.match_info["model_id"])
        card = resolve(model_id)
        here = await asyncio.to_thread(self._node.store.find, model_id)
        if here is None and card not in await asyncio.to_thread(self._node.store.available):
            raise ModelNotFound(f"{model_id} is not on this machine", param="model")
        return web.json_response(self._model(model_id))

    def _model(self, model_id: str) -> dict[str, Any]:
        return {
            "id": model_id,
            "object": "model",
            "created": self._started,
            "owned_by": "exo",
            "name": registry()[model_id].name if model_id in registry() else model_id,
            "ready": any(plan.model_id == model_id for plan in self._node.plans),
        }


async def _whole(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """The answer in one piece."""
    texts: list[str] = []
    tokens: list[SampledToken] = []
    finish_reason = None
    async with contextlib.aclosing(answer.pieces) as pieces:
        async for piece in pieces:
            texts.append(piece.text)
            tokens += piece.tokens
            finish_reason = piece.finish_reason
    return {
        "id": answer.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(texts), "refusal": None},
                "logprobs": _logprobs(request, answer.tokenizer, tokens),
                "finish_reason": finish_reason,
            }
        ],
        "usage": _usage(answer, len(tokens)),
    }


class _Stream:
    """One streamed answer: server-sent events, keep-alives while it waits."""

    def __init__(self, http: web.Request, request: ChatRequest, chat: Chat) -> None:
        self._http = http
        self._request = request
        self._chat = chat
        self._created = int(time.time())
        self._response: web.StreamResponse | None = None
        self._progress = Progress("waiting for", request.model)

    async def respond(self) -> web.StreamResponse:
        try:
            pulsing = with_pulse(self._events(), None, PATIENCE_S)
            async with contextlib.aclosing(pulsing) as events:
                async for event in events:
                    if event is None:
                        await (await self._begun()).write(f": {self._progress}\n\n".encode())
                    else:
                        await self._send(event)
        except ConnectionResetError:
            raise
        except Exception as error:
            if self._response is None:
                raise
            # The status line is out: an event is the only way left to tell the client.
            if not isinstance(error, ExoError):
                logger.exception("streaming an answer of %s", self._request.model)
            known = error if isinstance(error, ExoError) else ExoError("internal error")
            await self._send(error_body(known))
        response = await self._begun()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        answer = await self._chat.answer(self._request, self._note)
        async with contextlib.aclosing(answer.pieces) as pieces:
            first = True
            completion_tokens = 0
            async for piece in pieces:
                completion_tokens += len(piece.tokens)
                if first:
                    yield self._chunk(answer, {"role": "assistant", "content": ""}, Piece())
                    first = False
                yield self._chunk(answer, {"content": piece.text} if piece.text else {}, piece)
        if self._request.include_usage:
            yield self._envelope(answer) | {
                "choices": [],
                "usage": _usage(answer, completion_tokens),
            }

    def _chunk(self, answer: Answer, delta: dict[str, str], piece: Piece) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(self._request, answer.tokenizer, piece.tokens),
            "finish_reason": piece.finish_reason,
        }
        return self._envelope(answer) | {"choices": [choice]}

    def _envelope(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.model,
        }

    def _note(self, progress: Progress) -> None:
        self._progress = progress

    async def _begun(self) -> web.StreamResponse:
        """The response, its headers sent."""
        if self._response is None:
            self._response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-cache",
                    "X-Accel-Buffering": "no",
                }
            )
            await self._response.prepare(self._http)
        return self._response

    async def _send(self, event: dict[str, Any]) -> None:
        response = await self._begun()
        await response.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())


def _usage(answer: Answer, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": answer.prompt_tokens + completion_tokens,
    }


def _logprobs(
    request: ChatRequest,
    tokenizer: Tokenizer,
    tokens: list[SampledToken] | tuple[SampledToken, ...],
) -> dict[str, Any] | None:
    if not request.sampling.logprobs:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            entry(token.token_id, token.logprob)
            | {"top_logprobs": [entry(i, logprob) for i, logprob in token.top]}
            for token in tokens
        ]
    }
