"""Ollama's care of models: tags, ps, show, pull, delete, copy.

Format: https://github.com/ollama/ollama/blob/main/docs/api.md; progress comes as JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from exo import __version__
from exo.api.chat import Chat
from exo.api.dialects.ollama_types import ModelBody, model_name
from exo.api.http.bodies import read_body
from exo.api.http.errors import ollama_error
from exo.api.http.routes import Route
from exo.api.http.streaming import LINES, streamed
from exo.api.request import ChatDefaults
from exo.download.progress import Progress, unheard
from exo.errors import ExoError, InvalidRequest
from exo.models.card import resolve
from exo.models.description import read_config
from exo.models.tokenizer import Tokenizer
from exo.orchestration.node import StandardNode
from exo.tasks import with_pulse

_PULL_LOOK_S = 0.2


class OllamaModels:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._node = node
        self._chat = chat
        self._defaults = defaults

    def routes(self) -> list[Route]:
        delete = "Delete a model's files"
        return [
            Route("GET", "/api/tags", self.tags, "Models on this machine"),
            Route("GET", "/api/ps", self.running, "Models that are loaded"),
            Route("GET", "/api/version", self.version, "This program's version"),
            Route("POST", "/api/show", self.show, "What is known of a model", ModelBody),
            Route("POST", "/api/pull", self.pull, "Bring a model", ModelBody, streams=LINES),
            Route("DELETE", "/api/delete", self.delete, delete, ModelBody),
            *(
                Route("POST", f"/api/{name}", self.refuse, "Not supported")
                for name in ("push", "create", "copy")
            ),
        ]

    async def tags(self, http: web.Request) -> web.Response:
        """Models on this machine."""
        here = await self._node.models_here()
        return web.json_response(
            {"models": [_tag(model.model_id, model.size, model.last_used) for model in here]}
        )

    async def running(self, http: web.Request) -> web.Response:
        """Models that are loaded."""
        held = self._node.rings.held_bytes()
        models = [_tag(plan.model_id, held.get(plan.model_id, 0)) for plan in self._node.plans]
        for model in models:
            model |= {"expires_at": now(), "size_vram": 0}
        return web.json_response({"models": models})

    async def version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def show(self, http: web.Request) -> web.Response:
        model = model_name(await read_body(http, ModelBody), self._defaults)
        resolve(model)
        path, description = await self._node.describe(model, unheard)
        config = {} if model == "dummy" else await asyncio.to_thread(read_config, path)
        family = description.model_type
        return web.json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": _details(family),
                "model_info": {
                    "general.architecture": family,
                    f"{family}.context_length": description.context_length,
                    f"{family}.block_count": description.n_layers,
                    f"{family}.embedding_length": config.get("hidden_size", 0),
                },
                "capabilities": _capabilities(await self._chat.tokenizer(model, unheard)),
            }
        )

    async def pull(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http, ModelBody)
        model = model_name(body, self._defaults)
        resolve(model)
        if body.stream is not False:
            parts = self._pulled(model)
            return await streamed(http, parts, LINES, lambda: b"", lambda e: line(ollama_error(e)))
        async with contextlib.aclosing(self._pulled(model)) as parts:
            async for _ in parts:
                pass
        return web.json_response({"status": "success"})

    async def _pulled(self, model: str) -> AsyncGenerator[bytes, None]:
        """Progress as lines, until the files are here."""

        async def bring() -> AsyncGenerator[ExoError | None, None]:
            ends = await self._node.cluster_files.download(model, everywhere=False)
            yield ends[self._node.config.node_id]

        yield line({"status": "pulling manifest"})
        async with contextlib.aclosing(with_pulse(bring(), False, _PULL_LOOK_S)) as events:
            async for event in events:
                if isinstance(event, ExoError):
                    raise event
                if event is False and (now := self._progress_of(model)) is not None:
                    digest = f"sha256:{hashlib.sha256(model.encode()).hexdigest()}"
                    counts = {"digest": digest, "total": now.total, "completed": now.done}
                    yield line({"status": f"{now.phase} {model}", **counts})
        yield line({"status": "success"})

    def _progress_of(self, model: str) -> Progress | None:
        own = (progress for progress in self._node.activity.own() if progress.model_id == model)
        return next((progress for progress in own if progress.total), None)

    async def delete(self, http: web.Request) -> web.Response:
        model = model_name(await read_body(http, ModelBody), self._defaults)
        await self._node.cluster_files.remove(model)
        return web.Response()

    async def refuse(self, http: web.Request) -> web.Response:
        raise InvalidRequest(f"{http.path} is not supported by exo")


def _capabilities(tokenizer: Tokenizer) -> list[str]:
    thinks = ["thinking"] if tokenizer.markup.thinks else []
    return ["completion", "tools", *thinks]


def _tag(model_id: str, size: int, modified: float = 0.0) -> dict[str, Any]:
    return {
        "name": model_id,
        "model": model_id,
        "modified_at": _time(modified),
        "size": size,
        "digest": hashlib.sha256(model_id.encode()).hexdigest(),
        "details": _details(""),
    }


def _details(family: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def now() -> str:
    return _time(time.time())


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def line(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, ensure_ascii=False) + "\n").encode()
