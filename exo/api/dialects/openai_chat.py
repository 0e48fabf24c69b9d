"""OpenAI's chat completions, streamed or whole.

Format: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from aiohttp import web

from exo.api.chat import Answer, Chat, Piece
from exo.api.dialects.openai_request import chat_request
from exo.api.dialects.openai_types import ChatBody
from exo.api.http.bodies import read_body
from exo.api.http.errors import openai_error
from exo.api.http.routes import Route
from exo.api.http.streaming import EVENTS, Waiting, streamed
from exo.api.request import ChatDefaults, ChatRequest
from exo.download.progress import OnProgress, Progress, unheard
from exo.inference.sampling import SampledToken
from exo.models.card import resolve
from exo.models.markup.reader import CallArguments, CallBegun, Part, Said
from exo.models.tokenizer import Tokenizer
from exo.orchestration.node import StandardNode


class OpenAIChat:
    """The handler, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._chat = chat
        self._defaults = defaults

    def routes(self) -> list[Route]:
        summary = "An answer to a conversation"
        path = "/v1/chat/completions"
        return [Route("POST", path, self.chat_completions, summary, ChatBody, streams=EVENTS)]

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http, ChatBody)
        request = chat_request(body, self._defaults)
        resolve(request.model)
        if not body.stream:
            answer = await self._chat.answer(request, unheard)
            return web.json_response(await self._whole(body, request, answer))
        waiting, told = Waiting(request.model), _Envelope(body)
        chunks = self._chunks(body, request, told, waiting.note)

        def keep_alive() -> bytes:
            if body.return_progress and (chunk := told.prompt_progress(waiting.progress)):
                return _event(chunk)
            return waiting.comment()

        return await stream_events(http, chunks, keep_alive)

    async def _chunks(
        self, body: ChatBody, request: ChatRequest, told: _Envelope, on_progress: OnProgress
    ) -> AsyncGenerator[dict[str, Any], None]:
        answer = await self._chat.answer(request, on_progress)
        envelope = told.of_chunks(answer)
        deltas = [_Deltas(answer, i, body) for i in range(request.choices)]
        completion_tokens = 0
        async with contextlib.aclosing(answer.pieces) as pieces:
            async for index, piece in pieces:
                completion_tokens += len(piece.tokens)
                for choice in deltas[index].of(request, piece):
                    yield envelope | {"choices": [choice]}
        if body.stream_options and body.stream_options.include_usage:
            yield envelope | {
                "choices": [],
                "usage": usage(len(answer.prompt), completion_tokens, answer.cached_tokens),
            }

    async def _whole(self, body: ChatBody, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        gathered = await answer.gather(request.choices)
        return {
            **_Envelope(body).of_whole(answer),
            "choices": [
                {
                    "index": i,
                    "message": _message(answer, i, piece, body),
                    "logprobs": _logprobs(request, answer.tokenizer, piece.tokens),
                    "finish_reason": _reason(piece, body),
                }
                for i, piece in enumerate(gathered)
            ],
            "usage": usage(
                len(answer.prompt),
                sum(len(piece.tokens) for piece in gathered),
                answer.cached_tokens,
            ),
        }


class _Envelope:
    """What an answer's chunks have in common, once it has begun."""

    def __init__(self, body: ChatBody) -> None:
        self._body = body
        self._began = time.monotonic()
        self._chunk: dict[str, Any] = {}

    def of_whole(self, answer: Answer) -> dict[str, Any]:
        return self._of(answer, "chat.completion")

    def of_chunks(self, answer: Answer) -> dict[str, Any]:
        self._chunk = self._of(answer, "chat.completion.chunk")
        return self._chunk

    def prompt_progress(self, progress: Progress) -> dict[str, Any] | None:
        """How much of the prompt is read, as llama.cpp's server tells it; None before any is."""
        if progress.phase != "reading" or not self._chunk:
            return None
        delta = {"role": "assistant", "content": None}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        read = {
            "total": progress.total,
            "cache": dict(progress.by_source).get("cache", 0),
            "processed": progress.done,
            "time_ms": round(1000 * (time.monotonic() - self._began)),
        }
        return self._chunk | {"choices": [choice], "prompt_progress": read}

    def _of(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": kind,
            "created": int(time.time()),
            "model": self._body.model,
        }


class _Deltas:
    """One answer's pieces as deltas: the role first, calls counted from 0."""

    def __init__(self, answer: Answer, index: int, body: ChatBody) -> None:
        self._answer = answer
        self._index = index
        self._old_style = body.functions is not None
        self._hides_thoughts = body.include_reasoning is False
        self._body = body
        self._begun = False
        self._calls = 0

    def of(self, request: ChatRequest, piece: Piece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in piece.parts:
            if (delta := self._delta(part)) is not None:
                deltas.append(delta)
        if piece.finish_reason or not deltas:
            deltas.append({})
        if not self._begun:
            self._begun = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        no_tokens = _logprobs(request, self._answer.tokenizer, ())
        choices: list[dict[str, Any]] = [
            {"index": self._index, "delta": delta, "logprobs": no_tokens, "finish_reason": None}
            for delta in deltas
        ]
        choices[-1]["finish_reason"] = _reason(piece, self._body)
        # A piece's tokens go with its last delta: they are those of all of them.
        choices[-1]["logprobs"] = _logprobs(request, self._answer.tokenizer, piece.tokens)
        return choices

    def _delta(self, part: Part) -> dict[str, Any] | None:
        if isinstance(part, Said):
            return {"content": part.text}
        if isinstance(part, CallBegun):
            self._calls += 1
            if self._old_style:
                return {"function_call": {"name": part.name, "arguments": ""}}
            call = {
                "index": self._calls - 1,
                "id": self._answer.call_id(self._index, self._calls - 1),
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        if isinstance(part, CallArguments):
            if self._old_style:
                return {"function_call": {"arguments": part.text}}
            return {
                "tool_calls": [{"index": self._calls - 1, "function": {"arguments": part.text}}]
            }
        return None if self._hides_thoughts else {"reasoning_content": part.text}


def _message(answer: Answer, index: int, piece: Piece, body: ChatBody) -> dict[str, Any]:
    calls = answer.calls_of(index, piece)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": piece.text if piece.text or not calls else None,
        "refusal": None,
    }
    if piece.thought and body.include_reasoning is not False:
        message["reasoning_content"] = piece.thought
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    if calls and body.functions is not None:
        message["function_call"] = functions[0]
    elif calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return message


def _reason(piece: Piece, body: ChatBody) -> str | None:
    if piece.finish_reason == "tool_calls" and body.functions is not None:
        return "function_call"
    return piece.finish_reason


async def stream_events(
    http: web.Request,
    chunks: AsyncGenerator[dict[str, Any], None],
    keep_alive: Callable[[], bytes],
) -> web.StreamResponse:
    """OpenAI's server-sent events: data alone, `keep_alive` while nothing comes, [DONE] at the
    end."""

    async def parts() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield _event(chunk)

    return await streamed(
        http,
        parts(),
        EVENTS,
        keep_alive,
        lambda error: _event(openai_error(error)),
        b"data: [DONE]\n\n",
    )


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """As chat completions and completions count."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _logprobs(
    request: ChatRequest, tokenizer: Tokenizer, tokens: Sequence[SampledToken]
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
