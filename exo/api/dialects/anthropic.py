"""Anthropic's Messages: created, streamed, counted. Texts only as yet.

Format: https://docs.anthropic.com/en/api/messages, .../messages-streaming
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from exo.api import fields
from exo.api.chat import Chat, Piece
from exo.api.dialects.openai_chat import gather, text_of
from exo.api.errors import anthropic_error
from exo.api.json_body import json_body
from exo.api.request import ChatDefaults, ChatRequest, Message
from exo.api.streaming import EVENTS, Waiting, streamed
from exo.download.progress import OnProgress, unheard
from exo.errors import InvalidRequest
from exo.models.card import resolve
from exo.orchestration.node import StandardNode

_HONOURED = frozenset(
    {
        "model",
        "messages",
        "max_tokens",
        "system",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "metadata",
    }
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),  # without tools there is nothing to choose
    "thinking": ({"type": "disabled"},),
    "service_tier": ("auto", "standard_only"),
}


def parse_message(body: Any, defaults: ChatDefaults, *, counts: bool = False) -> ChatRequest:
    """Check a JSON body; one that only `counts` tokens needs no max_tokens.

    Raises:
        InvalidRequest: malformed, out of range, unknown or unsupported; `param` names the field.
    """
    given = fields.body_of(body)
    fields.check_known(given, _HONOURED, _NEUTRAL)
    messages = _messages(given.get("messages"))
    if (system := given.get("system")) is not None:
        messages.insert(0, {"role": "system", "content": text_of("system", system)})
    sampling, asked = fields.sampling(given, defaults, logprobs=False, top_logprobs=0)
    limit = fields.at_least_one(given, "max_tokens")
    if limit is None and not counts:
        raise InvalidRequest("max_tokens is missing", param="max_tokens")
    metadata = fields.typed(given, "metadata", dict, {})
    return ChatRequest(
        model=fields.required(given, "model", str),
        prompt=defaults.introduced(messages),
        sampling=sampling,
        asked=asked,
        max_tokens=limit,
        stop=fields.stop_strings(given.get("stop_sequences"), "stop_sequences"),
        # "If the final message uses the assistant role, the response continues from it."
        continues=messages[-1]["role"] == "assistant",
        user=fields.typed(metadata, "user_id", str, ""),
    )


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    found: list[Message] = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise InvalidRequest(f"{where} must be of the role user or assistant", param=where)
        content = text_of(f"{where}.content", message.get("content"))
        if found and found[-1]["role"] == message["role"]:
            # Templates want the roles to alternate, this API joins what follows itself.
            found[-1]["content"] += "\n" + content
        else:
            found.append({"role": message["role"], "content": content})
    return found


class Anthropic:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._chat = chat
        self._defaults = defaults

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/messages", self.messages)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)

    async def messages(self, http: web.Request) -> web.StreamResponse:
        body = await json_body(http)
        request = parse_message(body, self._defaults)
        resolve(request.model)
        if fields.typed(body, "stream", bool, False):
            waiting = Waiting(request.model)
            return await streamed(
                http,
                self._events(request, waiting.note),
                EVENTS,
                lambda: _event("ping", {}),
                lambda error: _event("error", anthropic_error(error)),
            )
        answer = await self._chat.answer(request, unheard)
        (piece,) = await gather(request, answer)
        message = _message(answer.id, request.model, len(answer.prompt))
        message |= _ending(piece) | {"content": [{"type": "text", "text": piece.text}]}
        message["usage"]["output_tokens"] = len(piece.tokens)
        return web.json_response(message)

    async def _events(
        self, request: ChatRequest, on_progress: OnProgress
    ) -> AsyncGenerator[bytes, None]:
        answer = await self._chat.answer(request, on_progress)
        message = _message(answer.id, request.model, len(answer.prompt))
        output_tokens = 0
        begun = False
        async with contextlib.aclosing(answer.pieces) as pieces:
            async for _, piece in pieces:
                if not begun:
                    begun = True
                    yield _event("message_start", {"message": message})
                    block = {"type": "text", "text": ""}
                    yield _event("content_block_start", {"index": 0, "content_block": block})
                output_tokens += len(piece.tokens)
                if piece.text:
                    delta = {"type": "text_delta", "text": piece.text}
                    yield _event("content_block_delta", {"index": 0, "delta": delta})
                if piece.finish_reason:
                    yield _event("content_block_stop", {"index": 0})
                    usage = {"output_tokens": output_tokens}
                    yield _event("message_delta", {"delta": _ending(piece), "usage": usage})
        yield _event("message_stop", {})

    async def count_tokens(self, http: web.Request) -> web.Response:
        request = parse_message(await json_body(http), self._defaults, counts=True)
        resolve(request.model)
        count = await self._chat.count_tokens(request, unheard)
        return web.json_response({"input_tokens": count})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    text = json.dumps({"type": kind, **data}, ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


def _message(chat_id: str, model: str, input_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{chat_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": input_tokens, "output_tokens": 0},
    }


def _ending(piece: Piece) -> dict[str, Any]:
    if piece.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_string}
    reason = "max_tokens" if piece.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
