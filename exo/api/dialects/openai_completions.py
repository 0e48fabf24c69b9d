"""OpenAI's older completions: a text goes on.

Format: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from exo.api import fields
from exo.api.chat import Answer, Chat, Piece
from exo.api.dialects import openai_chat
from exo.api.dialects.openai_chat import Streaming, gather, stream_events, streaming, usage
from exo.api.json_body import json_body
from exo.api.request import ChatDefaults, ChatRequest
from exo.api.streaming import Waiting
from exo.download.progress import OnProgress, unheard
from exo.errors import InvalidRequest
from exo.models.card import resolve
from exo.orchestration.node import StandardNode
from exo.tasks import merged

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64

_OF_CHATS = {"messages", "max_completion_tokens", "top_logprobs", "metadata"}
_OF_CHATS |= {"add_generation_prompt", "continue_final_message"}
_HONOURED = (openai_chat.HONOURED - _OF_CHATS) | {"prompt", "echo", "best_of"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",), "service_tier": ("auto", "default")}


def parse_completion(
    body: Any, defaults: ChatDefaults
) -> tuple[list[ChatRequest], bool, Streaming]:
    """Check a JSON body: a request for each prompt, and whether prompts are to be echoed.

    Raises:
        InvalidRequest: malformed, out of range, unknown or unsupported; `param` names the field.
    """
    given = fields.body_of(body)
    fields.check_known(given, _HONOURED, _NEUTRAL)
    logprobs = fields.typed(given, "logprobs", int, None)
    echo = bool(fields.typed(given, "echo", bool, False))
    if logprobs is not None and echo:
        raise InvalidRequest("logprobs of an echoed prompt are not supported", param="echo")
    if logprobs is not None and logprobs < 0:
        raise InvalidRequest(f"logprobs is {logprobs}; expected 0 or more", param="logprobs")
    sampling, asked = fields.sampling(
        given, defaults, logprobs=logprobs is not None, top_logprobs=logprobs or 0
    )
    count = fields.choices(given)
    if (fields.at_least_one(given, "best_of") or count) != count:
        raise InvalidRequest("best_of is supported where it equals n", param="best_of")
    first = ChatRequest(
        model=fields.required(given, "model", str),
        prompt="",
        sampling=sampling,
        asked=asked,
        max_tokens=fields.at_least_one(given, "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=fields.stop_strings(given.get("stop")),
        choices=count,
        user=fields.typed(given, "user", str, ""),
    )
    prompts = _prompts(given.get("prompt"))
    return [replace(first, prompt=prompt) for prompt in prompts], echo, streaming(given)


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str) or _is_tokens(value):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt must be a text, a list of token ids, or a list of up to {MAX_PROMPTS} of "
            "either",
            param="prompt",
        )
    for index, prompt in enumerate(value):
        if not (isinstance(prompt, str) or _is_tokens(prompt)) or not prompt:
            raise InvalidRequest(
                f"prompt[{index}] must be a text or token ids, and not empty", param="prompt"
            )
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value]


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


class OpenAICompletions:
    """The handler, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._chat = chat
        self._defaults = defaults

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/completions", self.completions)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        requests, echo, how = parse_completion(await json_body(http), self._defaults)
        model = requests[0].model
        resolve(model)
        if how.stream:
            waiting = Waiting(model)
            chunks = self._chunks(requests, echo, how, waiting.note)
            return await stream_events(http, chunks, waiting)
        answers = [await self._chat.answer(request, unheard) for request in requests]
        choices: list[dict[str, Any]] = []
        prompt_tokens = completion_tokens = 0
        for request, answer in zip(requests, answers, strict=True):
            prompt_tokens += len(answer.prompt)
            for piece in await gather(request, answer):
                completion_tokens += len(piece.tokens)
                before = _echoed(request, answer) if echo else ""
                choices.append(_choice(len(choices), before, request, answer, piece))
        envelope = _envelope(answers[0], model)
        return web.json_response(
            envelope | {"choices": choices, "usage": usage(prompt_tokens, completion_tokens)}
        )

    async def _chunks(
        self, requests: Sequence[ChatRequest], echo: bool, how: Streaming, on_progress: OnProgress
    ) -> AsyncGenerator[dict[str, Any], None]:
        answers = [await self._chat.answer(request, on_progress) for request in requests]
        envelope = _envelope(answers[0], requests[0].model)
        begun: set[int] = set()
        completion_tokens = 0
        async for number, (index, piece) in merged([answer.pieces for answer in answers]):
            request, answer = requests[number], answers[number]
            place = number * request.choices + index
            before = _echoed(request, answer) if echo and place not in begun else ""
            begun.add(place)
            completion_tokens += len(piece.tokens)
            yield envelope | {"choices": [_choice(place, before, request, answer, piece)]}
        if how.include_usage:
            prompt_tokens = sum(len(answer.prompt) for answer in answers)
            yield envelope | {"choices": [], "usage": usage(prompt_tokens, completion_tokens)}


def _envelope(answer: Answer, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def _echoed(request: ChatRequest, answer: Answer) -> str:
    if isinstance(request.prompt, str):
        return request.prompt
    return answer.tokenizer.decode(answer.prompt)


def _choice(
    index: int, before: str, request: ChatRequest, answer: Answer, piece: Piece
) -> dict[str, Any]:
    logprobs = None
    if request.sampling.logprobs:
        texts = [answer.tokenizer.token_text(token.token_id) for token in piece.tokens]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in piece.tokens],
            "top_logprobs": [
                {answer.tokenizer.token_text(i): logprob for i, logprob in token.top}
                for token in piece.tokens
            ],
            "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
        }
    return {
        "index": index,
        "text": before + piece.text,
        "logprobs": logprobs,
        "finish_reason": piece.finish_reason,
    }
