"""Ollama's API: chat and generate.

Format: https://github.com/ollama/ollama/blob/main/docs/api.md; answers come as JSON lines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from aiohttp import web

from exo.api.chat import Answer, Chat, Piece
from exo.api.dialects.ollama_models import line, now
from exo.api.dialects.ollama_types import (
    AnswerBody,
    GenerateBody,
    OllamaChatBody,
    answer_request,
    chat_request,
    ends_at_once,
    model_name,
)
from exo.api.http.bodies import read_body
from exo.api.http.errors import ollama_error
from exo.api.http.routes import Route
from exo.api.http.streaming import LINES, Waiting, streamed
from exo.api.request import ChatDefaults, ChatRequest, Message
from exo.download.progress import OnProgress, unheard
from exo.errors import InvalidRequest
from exo.models.card import resolve
from exo.models.markup.reader import CallArguments, CallBegun, Part
from exo.models.markup.tools import arguments_of
from exo.orchestration.node import StandardNode

Shown = Callable[[Answer, Piece], dict[str, Any]]


class Ollama:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._node = node
        self._chat = chat
        self._defaults = defaults

    def routes(self) -> list[Route]:
        chat = "An answer to a conversation, Ollama's way"
        generate = "An answer to a prompt, Ollama's way"
        return [
            Route("POST", "/api/chat", self.chat, chat, OllamaChatBody, streams=LINES),
            Route("POST", "/api/generate", self.generate, generate, GenerateBody, streams=LINES),
        ]

    async def chat(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http, OllamaChatBody)
        if not body.messages:
            return await self._load(body, {"message": {"role": "assistant", "content": ""}})
        return await self._answer(http, body, chat_request(body, self._defaults), _as_message)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http, GenerateBody)
        body.refuse(suffix=("",), images=([],), template=("",), width=(0,), height=(0,), steps=(0,))
        if not body.prompt:
            return await self._load(body, {"response": ""})
        prompt: list[Message] | str = body.prompt
        if not body.raw:
            prompt = [{"role": "user", "content": body.prompt}]
            if body.system:
                prompt.insert(0, {"role": "system", "content": body.system})
        request = answer_request(body, prompt, self._defaults)
        return await self._answer(http, body, request, _as_response)

    async def _load(self, body: AnswerBody, empty: dict[str, Any]) -> web.Response:
        """A request without a prompt has the model loaded, or its memory given back."""
        model = model_name(body, self._defaults)
        resolve(model)
        if ends_at_once(body.keep_alive):
            if not await self._node.unload_model(model):
                raise InvalidRequest(f"answers of {model} are running", param="model")
        else:
            await self._node.ensure_plan(model, "", unheard)
        done = {"done": True, "done_reason": "unload" if ends_at_once(body.keep_alive) else "load"}
        return web.json_response({"model": model, "created_at": now(), **empty, **done})

    async def _answer(
        self, http: web.Request, body: AnswerBody, request: ChatRequest, shown: Shown
    ) -> web.StreamResponse:
        resolve(request.model)
        if body.stream is not False:
            waiting = Waiting(request.model)
            parts = self._lines(body, request, shown, waiting.note)
            return await streamed(http, parts, LINES, lambda: b"", lambda e: line(ollama_error(e)))
        clock = _Clock()
        answer = await self._chat.answer(request, unheard)
        (piece,) = await answer.gather()
        clock.note_first()
        envelope = {"model": body.model, "created_at": now()}
        ending = clock.ending(piece, len(answer.prompt), len(piece.tokens))
        return web.json_response(envelope | shown(answer, piece) | ending)

    async def _lines(
        self, body: AnswerBody, request: ChatRequest, shown: Shown, on_progress: OnProgress
    ) -> AsyncGenerator[bytes, None]:
        clock = _Clock()
        answer = await self._chat.answer(request, on_progress)
        calls = _WholeCalls()
        count = 0
        async with contextlib.aclosing(answer.pieces) as pieces:
            async for _, piece in pieces:
                clock.note_first()
                count += len(piece.tokens)
                envelope = {"model": body.model, "created_at": now()}
                if (told := calls.told(piece)).parts:
                    yield line(envelope | shown(answer, told) | {"done": False})
                if piece.finish_reason:
                    ending = clock.ending(piece, len(answer.prompt), count)
                    yield line(envelope | shown(answer, Piece()) | ending)


class _WholeCalls:
    """Holds calls back until they are whole: this API has no parts of them."""

    def __init__(self) -> None:
        self._held: list[CallBegun | CallArguments] = []

    def told(self, piece: Piece) -> Piece:
        parts: list[Part] = []
        for part in piece.parts:
            if isinstance(part, CallArguments):
                self._held.append(part)
                continue
            parts += self._held
            self._held = []
            if isinstance(part, CallBegun):
                self._held.append(part)
            else:
                parts.append(part)
        if piece.finish_reason:
            parts += self._held
            self._held = []
        return Piece(tuple(parts))


class _Clock:
    """Durations as Ollama counts them, in nanoseconds."""

    def __init__(self) -> None:
        self._began = time.monotonic_ns()
        self._first: int | None = None

    def note_first(self) -> None:
        self._first = self._first or time.monotonic_ns()

    def ending(self, piece: Piece, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        now, first = time.monotonic_ns(), self._first or time.monotonic_ns()
        return {
            "done": True,
            "done_reason": "length" if piece.finish_reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": tokens,
            "eval_duration": max(1, now - first),
        }


def _as_message(answer: Answer, piece: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.thought:
        message["thinking"] = piece.thought
    if calls := answer.calls_of(0, piece):
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": arguments_of(call.arguments)}}
            for call in calls
        ]
    return {"message": message}


def _as_response(answer: Answer, piece: Piece) -> dict[str, Any]:
    thought = {"thinking": piece.thought} if piece.thought else {}
    return {"response": piece.text, **thought}
