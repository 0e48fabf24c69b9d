"""Embeddings: OpenAI's, and Ollama's two.

Format: https://platform.openai.com/docs/api-reference/embeddings,
https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from aiohttp import web
from msgspec import Meta

from exo.api.chat import Chat
from exo.api.dialects.ollama_types import EmbedBody, EmbeddingsBody, model_name
from exo.api.dialects.sampling_fields import Count, TokenId
from exo.api.http.bodies import Body, read_body
from exo.api.http.routes import Route
from exo.api.request import ChatDefaults
from exo.download.progress import unheard
from exo.errors import InvalidRequest
from exo.models.card import resolve
from exo.orchestration.node import StandardNode

MAX_INPUTS = 2048

Vector = npt.NDArray[np.float32]


class EmbeddingBody(Body, kw_only=True):
    """POST /v1/embeddings."""

    model: str
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


class Embeddings:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._chat = chat
        self._defaults = defaults

    def routes(self) -> list[Route]:
        summary, older = "Vectors of texts", "The vector of a text"
        return [
            Route("POST", "/v1/embeddings", self.embeddings, summary, EmbeddingBody),
            Route("POST", "/api/embed", self.embed, f"{summary}, Ollama's way", EmbedBody),
            Route("POST", "/api/embeddings", self.embed_one, older, EmbeddingsBody),
        ]

    async def embeddings(self, http: web.Request) -> web.Response:
        body = await read_body(http, EmbeddingBody)
        model = self._defaults.model(body.model)
        resolve(model)
        vectors, tokens = await self._chat.embed(model, _inputs(body.input), unheard)
        data = [
            {"object": "embedding", "index": i, "embedding": _encoded(vector, body)}
            for i, vector in enumerate(_cut(vectors, body.dimensions))
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response(
            {"object": "list", "data": data, "model": body.model, "usage": usage}
        )

    async def embed(self, http: web.Request) -> web.Response:
        body = await read_body(http, EmbedBody)
        model, began = model_name(body, self._defaults), time.monotonic_ns()
        resolve(model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors, tokens = await self._chat.embed(model, _inputs([*texts]), unheard)
        found = [vector.tolist() for vector in _cut(vectors, body.dimensions)]
        took = {"total_duration": time.monotonic_ns() - began, "load_duration": 0}
        return web.json_response(
            {"model": body.model, "embeddings": found, **took, "prompt_eval_count": tokens}
        )

    async def embed_one(self, http: web.Request) -> web.Response:
        body = await read_body(http, EmbeddingsBody)
        model = model_name(body, self._defaults)
        resolve(model)
        vectors, _ = await self._chat.embed(model, _inputs(body.prompt), unheard)
        return web.json_response({"embedding": vectors[0].tolist()})


def _inputs(given: str | list[Any]) -> list[str | tuple[int, ...]]:
    """One or several, each a text or token ids."""
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len(several) > MAX_INPUTS:
        raise InvalidRequest(
            f"input has {len(several)} texts; expected up to {MAX_INPUTS}", param="input"
        )
    found: list[str | tuple[int, ...]] = []
    for i, one in enumerate(several):
        is_tokens = isinstance(one, list) and all(isinstance(token, int) for token in one)
        if not (isinstance(one, str) or is_tokens) or not one:
            raise InvalidRequest(
                f"input[{i}] must be a text or token ids, and not empty", param="input"
            )
        found.append(one if isinstance(one, str) else tuple(one))
    return found


def _cut(vectors: list[Vector], dimensions: int | None) -> list[Vector]:
    """The first dimensions alone, of length 1 again (Matryoshka, https://arxiv.org/abs/2205.13147).

    Raises:
        InvalidRequest: the model has fewer.
    """
    if dimensions is None:
        return vectors
    if dimensions > len(vectors[0]):
        raise InvalidRequest(
            f"dimensions is {dimensions}; the model's vectors have {len(vectors[0])}",
            param="dimensions",
        )
    cut = [vector[:dimensions] for vector in vectors]
    return [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in cut]


def _encoded(vector: Vector, body: EmbeddingBody) -> Any:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
