"""Anthropic's Messages: created, streamed, counted.

Format: https://docs.anthropic.com/en/api/messages, .../messages-streaming
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from exo.api.chat import Answer, Chat, Piece
from exo.api.dialects.anthropic_types import CountBody, MessagesBody, message_request
from exo.api.http.bodies import read_body
from exo.api.http.errors import anthropic_error
from exo.api.http.routes import Route
from exo.api.http.streaming import EVENTS, Waiting, streamed
from exo.api.request import ChatDefaults, ChatRequest
from exo.download.progress import OnProgress, unheard
from exo.models.card import resolve
from exo.models.markup.reader import CallArguments, CallBegun, Part, Said
from exo.models.markup.tools import arguments_of
from exo.orchestration.node import StandardNode


class Anthropic:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._chat = chat
        self._defaults = defaults

    def routes(self) -> list[Route]:
        path = "/v1/messages"
        return [
            Route(
                "POST",
                path,
                self.messages,
                "An answer, Anthropic's way",
                MessagesBody,
                streams=EVENTS,
            ),
            Route(
                "POST", f"{path}/count_tokens", self.count_tokens, "Tokens of a prompt", CountBody
            ),
        ]

    async def messages(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http, MessagesBody)
        request = message_request(body, self._defaults)
        resolve(request.model)
        if body.stream:
            waiting = Waiting(request.model)
            return await streamed(
                http,
                self._events(body, request, waiting.note),
                EVENTS,
                lambda: _event("ping", {}),
                lambda error: _event("error", anthropic_error(error)),
            )
        answer = await self._chat.answer(request, unheard)
        (piece,) = await answer.gather()
        message = _message(answer, body.model)
        message |= _ending(piece) | {"content": _content(answer, piece)}
        message["usage"] = _input_usage(answer) | {"output_tokens": len(piece.tokens)}
        return web.json_response(message)

    async def _events(
        self, body: MessagesBody, request: ChatRequest, on_progress: OnProgress
    ) -> AsyncGenerator[bytes, None]:
        answer = await self._chat.answer(request, on_progress)
        blocks = _Blocks(answer)
        output_tokens = 0
        begun = False
        async with contextlib.aclosing(answer.pieces) as pieces:
            async for _, piece in pieces:
                if not begun:
                    begun = True
                    yield _event("message_start", {"message": _message(answer, body.model)})
                output_tokens += len(piece.tokens)
                for part in piece.parts:
                    for event in blocks.of(part):
                        yield event
                if piece.finish_reason:
                    for event in blocks.end():
                        yield event
                    usage = _input_usage(answer) | {"output_tokens": output_tokens}
                    yield _event("message_delta", {"delta": _ending(piece), "usage": usage})
        yield _event("message_stop", {})

    async def count_tokens(self, http: web.Request) -> web.Response:
        request = message_request(await read_body(http, CountBody), self._defaults)
        resolve(request.model)
        count = await self._chat.count_tokens(request, unheard)
        return web.json_response({"input_tokens": count})


class _Blocks:
    """Parts of an answer as content blocks: a new one wherever the kind changes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._index = -1
        self._kind = ""
        self._calls = 0

    def of(self, part: Part) -> list[bytes]:
        if isinstance(part, CallBegun):
            call_id = self._answer.call_id(0, self._calls)
            self._calls += 1
            block = {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}
            return self._begin("tool_use", block)
        if isinstance(part, CallArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": part.text})]
        if isinstance(part, Said):
            begun = [] if self._kind == "text" else self._begin("text", _text_block(""))
            return [*begun, self._delta({"type": "text_delta", "text": part.text})]
        block = {"type": "thinking", "thinking": "", "signature": ""}
        begun = [] if self._kind == "thinking" else self._begin("thinking", block)
        return [*begun, self._delta({"type": "thinking_delta", "thinking": part.text})]

    def end(self) -> list[bytes]:
        """The answer is over; it has at least one block."""
        begun = [] if self._kind else self._begin("text", _text_block(""))
        return [*begun, self._stop()]

    def _begin(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        stop = [self._stop()] if self._kind else []
        self._index += 1
        self._kind = kind
        start = {"index": self._index, "content_block": block}
        return [*stop, _event("content_block_start", start)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        return _event("content_block_stop", {"index": self._index})


def _content(answer: Answer, piece: Piece) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if piece.thought:
        blocks.append({"type": "thinking", "thinking": piece.thought, "signature": ""})
    calls = answer.calls_of(0, piece)
    if piece.text or not (calls or piece.thought):
        blocks.append(_text_block(piece.text))
    for call in calls:
        given = {"name": call.name, "input": arguments_of(call.arguments)}
        blocks.append({"type": "tool_use", "id": call.id, **given})
    return blocks


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _event(kind: str, data: dict[str, Any]) -> bytes:
    text = json.dumps({"type": kind, **data}, ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


def _message(answer: Answer, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _input_usage(answer) | {"output_tokens": 0},
    }


def _ending(piece: Piece) -> dict[str, Any]:
    if piece.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_string}
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons.get(piece.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _input_usage(answer: Answer) -> dict[str, int]:
    """What was read from the cache is counted apart; before the first token nothing was, yet."""
    cached = answer.cached_tokens
    return {"input_tokens": len(answer.prompt) - cached, "cache_read_input_tokens": cached}
