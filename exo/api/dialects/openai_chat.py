"""OpenAI's chat completions, streamed or whole, and its list of models.

Format: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from exo.api import fields
from exo.api.chat import Answer, Chat, Piece
from exo.api.errors import openai_error
from exo.api.json_body import json_body
from exo.api.request import ChatDefaults, ChatRequest, Message
from exo.api.streaming import EVENTS, Waiting, streamed
from exo.download.progress import OnProgress, unheard
from exo.errors import InvalidRequest, ModelNotFound
from exo.inference.sampling import SampledToken
from exo.models.card import registry, resolve
from exo.models.tokenizer import Tokenizer
from exo.orchestration.node import StandardNode

_ROLES = {"system", "developer", "user", "assistant"}

# Known to OpenAI's API, and what is served here are the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to do in parallel
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
HONOURED = frozenset(
    {
        "model",
        "messages",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "add_generation_prompt",
        "continue_final_message",
        "user",  # a label of the client's, written to the log with the request
        "metadata",
    }
)


@dataclass(frozen=True)
class Streaming:
    """How the client wants the answer."""

    stream: bool = False
    include_usage: bool = False


def parse_chat(body: Any, defaults: ChatDefaults) -> tuple[ChatRequest, Streaming]:
    """Check a JSON body: every field honoured or refused by name.

    Raises:
        InvalidRequest: malformed, out of range, unknown or unsupported; `param` names the field.
    """
    given = fields.body_of(body)
    fields.check_known(given, HONOURED, NEUTRAL)
    messages = _messages(given.get("messages"))
    logprobs = fields.typed(given, "logprobs", bool, False)
    top_logprobs = fields.typed(given, "top_logprobs", int, 0)
    if top_logprobs and not logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    sampling, asked = fields.sampling(given, defaults, logprobs=logprobs, top_logprobs=top_logprobs)
    limit = fields.at_least_one(given, "max_completion_tokens")
    limit = limit or fields.at_least_one(given, "max_tokens") or defaults.max_tokens
    request = ChatRequest(
        model=fields.required(given, "model", str),
        prompt=defaults.introduced(messages),
        sampling=sampling,
        asked=asked,
        max_tokens=limit,
        stop=fields.stop_strings(given.get("stop")),
        choices=fields.choices(given),
        continues=_continues(given, messages),
        user=fields.typed(given, "user", str, ""),
    )
    return request, streaming(given)


def streaming(given: dict[str, Any]) -> Streaming:
    options = fields.typed(given, "stream_options", dict, {})
    return Streaming(
        fields.typed(given, "stream", bool, False),
        fields.typed(options, "include_usage", bool, False),
    )


def _continues(given: dict[str, Any], messages: list[Message]) -> bool:
    """vLLM's pair of flags: whether the last message is gone on with."""
    goes_on = bool(fields.typed(given, "continue_final_message", bool, False))
    begins = fields.typed(given, "add_generation_prompt", bool, not goes_on)
    if goes_on and begins:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if not begins and not goes_on:
        raise InvalidRequest(
            "add_generation_prompt=false needs continue_final_message=true",
            param="add_generation_prompt",
        )
    if goes_on and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant's",
            param="continue_final_message",
        )
    return goes_on


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role is {role!r}; expected one of {sorted(_ROLES)}", param=f"{where}.role"
        )
    for key, value in message.items():
        if key not in ("role", "content", "name", "refusal") and value not in (None, []):
            raise InvalidRequest(f"{where}.{key} is not supported", param=f"{where}.{key}")
    # Chat templates know "system"; OpenAI renamed it for newer models.
    return {
        "role": "system" if role == "developer" else role,
        "content": text_of(f"{where}.content", message.get("content")),
    }


def text_of(where: str, content: Any) -> str:
    """A text, or the texts of a list of parts. Raises InvalidRequest for parts of other kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a text or a list of text parts", param=where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequest(
                f"{where}[{index}] is {kind!r}; only text parts are supported", param=where
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{index}].text must be a text", param=where)
        texts.append(part["text"])
    return "".join(texts)


class OpenAIChat:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._node = node
        self._chat = chat
        self._defaults = defaults
        self._started = int(time.time())

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model_id:.+}", self.model)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        request, how = parse_chat(await json_body(http), self._defaults)
        resolve(request.model)
        if not how.stream:
            answer = await self._chat.answer(request, unheard)
            return web.json_response(await _whole(request, answer))
        waiting = Waiting(request.model)
        return await stream_events(http, self._chunks(request, how, waiting.note), waiting)

    async def _chunks(
        self, request: ChatRequest, how: Streaming, on_progress: OnProgress
    ) -> AsyncGenerator[dict[str, Any], None]:
        answer = await self._chat.answer(request, on_progress)
        envelope = {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

        def chunk(index: int, delta: dict[str, str], piece: Piece) -> dict[str, Any]:
            choice = {
                "index": index,
                "delta": delta,
                "logprobs": _logprobs(request, answer.tokenizer, piece.tokens),
                "finish_reason": piece.finish_reason,
            }
            return envelope | {"choices": [choice]}

        begun: set[int] = set()
        completion_tokens = 0
        async with contextlib.aclosing(answer.pieces) as pieces:
            async for index, piece in pieces:
                completion_tokens += len(piece.tokens)
                if index not in begun:
                    begun.add(index)
                    yield chunk(index, {"role": "assistant", "content": ""}, Piece())
                yield chunk(index, {"content": piece.text} if piece.text else {}, piece)
        if how.include_usage:
            yield envelope | {"choices": [], "usage": usage(len(answer.prompt), completion_tokens)}

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


async def stream_events(
    http: web.Request, chunks: AsyncGenerator[dict[str, Any], None], waiting: Waiting
) -> web.StreamResponse:
    """OpenAI's server-sent events: data alone, comments while nothing comes, [DONE] at the end."""

    async def parts() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield _event(chunk)

    return await streamed(
        http,
        parts(),
        EVENTS,
        lambda: f": {waiting.progress}\n\n".encode(),
        lambda error: _event(openai_error(error)),
        b"data: [DONE]\n\n",
    )


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def _whole(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """The answers in one piece."""
    gathered = await gather(request, answer)
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": _logprobs(request, answer.tokenizer, piece.tokens),
                "finish_reason": piece.finish_reason,
            }
            for index, piece in enumerate(gathered)
        ],
        "usage": usage(len(answer.prompt), sum(len(piece.tokens) for piece in gathered)),
    }


async def gather(request: ChatRequest, answer: Answer) -> list[Piece]:
    """Each of a request's answers as one piece."""
    parts: list[list[Piece]] = [[] for _ in range(request.choices)]
    async with contextlib.aclosing(answer.pieces) as pieces:
        async for index, piece in pieces:
            parts[index].append(piece)
    return [
        Piece(
            "".join(piece.text for piece in some),
            tuple(token for piece in some for token in piece.tokens),
            some[-1].finish_reason,
            some[-1].stop_string,
        )
        for some in parts
    ]


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
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
