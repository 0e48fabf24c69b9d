"""OpenAI's list of models, and vLLM's tokenize and detokenize."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from exo.api.chat import Chat
from exo.api.dialects.openai_request import chat_request
from exo.api.dialects.openai_types import ChatBody, ChatMessage, CustomTool, FunctionTool
from exo.api.dialects.sampling_fields import TokenId
from exo.api.http.bodies import Body, read_body
from exo.api.http.routes import Route
from exo.api.prompts import prompt_of
from exo.api.request import ChatDefaults
from exo.download.progress import unheard
from exo.errors import InvalidRequest, ModelNotFound
from exo.models.card import registry, resolve
from exo.orchestration.node import StandardNode


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: a prompt or a conversation."""

    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[FunctionTool | CustomTool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: list[TokenId]


class OpenAIModels:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._node = node
        self._chat = chat
        self._defaults = defaults
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/models", self.models, "Models that can be chatted with now"),
            Route("GET", "/v1/models/{model_id:.+}", self.model, "One model"),
            Route("POST", "/tokenize", self.tokenize, "Token ids of a text", TokenizeBody),
            Route("POST", "/detokenize", self.detokenize, "The text of tokens", DetokenizeBody),
        ]

    async def models(self, http: web.Request) -> web.Response:
        """Models that can be chatted with now: those here, fetchable, or served by the cluster, and
        the further names they have."""
        available = await asyncio.to_thread(self._node.store.available)
        ids = [card.model_id for card in available]
        ids += sorted({plan.model_id for plan in self._node.plans} - set(ids))
        models = [self._model(model_id, model_id) for model_id in ids]
        models += [
            self._model(alias, model_id) for alias, model_id in self._defaults.aliases.items()
        ]
        last = models[-1]["id"] if models else None
        listed = {"has_more": False, "first_id": models[0]["id"] if models else None}
        return web.json_response({"object": "list", "data": models, **listed, "last_id": last})

    async def model(self, http: web.Request) -> web.Response:
        name = unquote(http.match_info["model_id"])
        model_id = self._defaults.model(name)
        card = resolve(model_id)
        here = await asyncio.to_thread(self._node.store.find, model_id)
        if here is None and card not in await asyncio.to_thread(self._node.store.available):
            raise ModelNotFound(f"{model_id} is not on this machine", param="model")
        return web.json_response(self._model(name, model_id))

    def _model(self, name: str, model_id: str) -> dict[str, Any]:
        shown = registry()[model_id].name if model_id in registry() else model_id
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "exo",
            "name": shown,
            "ready": any(plan.model_id == model_id for plan in self._node.plans),
            # What Anthropic's clients read.
            "type": "model",
            "display_name": shown,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
        }

    async def tokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http, TokenizeBody)
        model = self._defaults.model(body.model)
        resolve(model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("expected either a prompt or messages", param="prompt")
        tokenizer, context = await self._chat.tokenizer_and_context(model, unheard)
        if body.messages is not None:
            chat = ChatBody(model=model, messages=body.messages, tools=body.tools)
            request = chat_request(chat, ChatDefaults())
            tokens = list((await asyncio.to_thread(prompt_of, tokenizer, request, 2**31)).tokens)
        elif body.add_special_tokens is False:
            tokens = tokenizer.encode_rendered(body.prompt or "")
        else:
            tokens = tokenizer.encode(body.prompt or "")
        texts = [tokenizer.token_text(i) for i in tokens] if body.return_token_strs else None
        counted = {"count": len(tokens), "max_model_len": context}
        return web.json_response({**counted, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http, DetokenizeBody)
        model = self._defaults.model(body.model)
        resolve(model)
        tokenizer = await self._chat.tokenizer(model, unheard)
        if unknown := [i for i in body.tokens if i >= tokenizer.vocabulary_size]:
            raise InvalidRequest(
                f"token {unknown[0]} is none of this model's, which are 0 to "
                f"{tokenizer.vocabulary_size - 1}",
                param="tokens",
            )
        return web.json_response({"prompt": tokenizer.decode(body.tokens)})
