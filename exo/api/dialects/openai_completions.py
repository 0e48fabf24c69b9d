"""OpenAI's older completions: a text goes on.

Format: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from exo.api.chat import Answer, Chat, Piece
from exo.api.dialects.openai_chat import stream_events, usage
from exo.api.dialects.openai_request import format_grammar
from exo.api.dialects.openai_types import GenerationFields
from exo.api.dialects.sampling_fields import TokenId, TopLogprobs, token_limit
from exo.api.http.bodies import read_body
from exo.api.http.routes import Route
from exo.api.http.streaming import EVENTS, Waiting
from exo.api.request import MAX_CHOICES, ChatDefaults, ChatRequest
from exo.download.progress import OnProgress, unheard
from exo.errors import InvalidRequest
from exo.models.card import resolve
from exo.orchestration.node import StandardNode
from exo.tasks import merged

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64


class CompletionBody(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None


def completion_requests(body: CompletionBody, defaults: ChatDefaults) -> list[ChatRequest]:
    """A request for each prompt. Of `best_of` answers to each the likeliest are given.

    Raises:
        InvalidRequest: what contradicts itself or is not served; `param` names the field.
    """
    if body.logprobs is not None and body.echo:
        raise InvalidRequest("logprobs of an echoed prompt are not supported", param="echo")
    wanted, made = body.n or 1, body.best_of or body.n or 1
    if made < wanted:
        raise InvalidRequest(f"best_of is {made}, less than n, {wanted}", param="best_of")
    if made > wanted and body.stream:
        raise InvalidRequest("best_of larger than n cannot be streamed", param="best_of")
    top_logprobs = body.logprobs if made == wanted else body.logprobs or 0
    first = ChatRequest(
        model=defaults.model(body.model),
        prompt="",
        sampling=body.params(defaults, top_logprobs),
        asked=body.asked,
        max_tokens=token_limit(
            DEFAULT_MAX_TOKENS, max_tokens=body.max_tokens, n_predict=body.n_predict
        ),
        stop=body.stops,
        choices=made,
        user=body.user or "",
        grammar=format_grammar(body),
        ends=frozenset(body.stop_token_ids or ()),
        ignores_end=bool(body.ignore_eos),
        shortcuts=body.cache_prompt is not False,
        shows_special=body.skip_special_tokens is False,
    )
    return [replace(first, prompt=prompt) for prompt in _prompts(body.prompt)]


def _prompts(value: str | list[Any]) -> list[str | tuple[int, ...]]:
    """One prompt or several, each a text or token ids."""
    several = value if isinstance(value, list) and not _is_tokens(value) else [value]
    if not 0 < len(several) <= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt has {len(several)} prompts; expected 1 to {MAX_PROMPTS}", param="prompt"
        )
    for index, prompt in enumerate(several):
        if not (isinstance(prompt, str) or _is_tokens(prompt)) or not prompt:
            raise InvalidRequest(
                f"prompt[{index}] must be a text or token ids, and not empty", param="prompt"
            )
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in several]


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, int) for one in value)


class OpenAICompletions:
    """The handler, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._chat = chat
        self._defaults = defaults

    def routes(self) -> list[Route]:
        path, summary = "/v1/completions", "Texts that go on from prompts"
        return [Route("POST", path, self.completions, summary, CompletionBody, streams=EVENTS)]

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http, CompletionBody)
        resolve(self._defaults.model(body.model))
        requests = completion_requests(body, self._defaults)
        if body.suffix:
            requests = [await self._filling(request, body.suffix) for request in requests]
        if body.stream:
            waiting = Waiting(requests[0].model)
            chunks = self._chunks(body, requests, waiting.note)
            return await stream_events(http, chunks, waiting.comment)
        answers = [await self._chat.answer(request, unheard) for request in requests]
        choices: list[dict[str, Any]] = []
        prompt_tokens = completion_tokens = cached = 0
        for request, answer in zip(requests, answers, strict=True):
            prompt_tokens += len(answer.prompt)
            cached += answer.cached_tokens
            pieces = await answer.gather(request.choices)
            completion_tokens += sum(len(piece.tokens) for piece in pieces)
            for piece in _best(pieces, body.n or 1):
                before = _echoed(request, answer) if body.echo else ""
                choices.append(_choice(len(choices), before, body, answer, piece))
        envelope = _envelope(answers[0], body.model)
        return web.json_response(
            envelope
            | {"choices": choices, "usage": usage(prompt_tokens, completion_tokens, cached)}
        )

    async def _filling(self, request: ChatRequest, suffix: str) -> ChatRequest:
        """The prompt of a model that fills in the middle, by its own tokens for that.

        Raises:
            InvalidRequest: it has none.
        """
        tokenizer = await self._chat.tokenizer(request.model, unheard)
        for before, after, middle in _FILL_IN:
            if all(token in tokenizer.added_tokens for token in (before, after, middle)):
                prompt = request.prompt
                if not isinstance(prompt, str):
                    raise InvalidRequest("a suffix needs a prompt that is a text", param="prompt")
                text = f"{before}{prompt}{after}{suffix}{middle}"
                return replace(request, prompt=tuple(tokenizer.encode_rendered(text)))
        raise InvalidRequest(
            f"{request.model} has no tokens to fill in the middle of a text with", param="suffix"
        )

    async def _chunks(
        self, body: CompletionBody, requests: Sequence[ChatRequest], on_progress: OnProgress
    ) -> AsyncGenerator[dict[str, Any], None]:
        answers = [await self._chat.answer(request, on_progress) for request in requests]
        envelope = _envelope(answers[0], body.model)
        begun: set[int] = set()
        completion_tokens = 0
        async for number, (index, piece) in merged([answer.pieces for answer in answers]):
            request, answer = requests[number], answers[number]
            place = number * request.choices + index
            before = _echoed(request, answer) if body.echo and place not in begun else ""
            begun.add(place)
            completion_tokens += len(piece.tokens)
            yield envelope | {"choices": [_choice(place, before, body, answer, piece)]}
        if body.stream_options and body.stream_options.include_usage:
            prompt_tokens = sum(len(answer.prompt) for answer in answers)
            cached = sum(answer.cached_tokens for answer in answers)
            counted = usage(prompt_tokens, completion_tokens, cached)
            yield envelope | {"choices": [], "usage": counted}


# What comes before the prompt, before the suffix, and before what is to be written between them, by
# the families that were trained on it (Qwen and CodeLlama-like, StarCoder and Granite, DeepSeek).
_FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


def _best(pieces: list[Piece], count: int) -> list[Piece]:
    """The likeliest, by the mean logarithm of their tokens' probabilities."""

    def likelihood(piece: Piece) -> float:
        return sum(token.logprob for token in piece.tokens) / max(1, len(piece.tokens))

    return pieces if count == len(pieces) else sorted(pieces, key=likelihood, reverse=True)[:count]


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
    index: int, before: str, body: CompletionBody, answer: Answer, piece: Piece
) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
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
