"""Ollama's API: chat, generate, and its care of models. Texts only as yet.

Format: https://github.com/ollama/ollama/blob/main/docs/api.md; answers come as JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from exo import __version__
from exo.api import fields
from exo.api.chat import Chat, Piece
from exo.api.dialects.openai_chat import gather
from exo.api.errors import ollama_error
from exo.api.json_body import json_body
from exo.api.request import ChatDefaults, ChatRequest, Message
from exo.api.streaming import LINES, Waiting, streamed
from exo.download.progress import OnProgress, Progress, unheard
from exo.errors import ExoError, InvalidRequest
from exo.models.card import resolve
from exo.models.description import read_config
from exo.orchestration.node import StandardNode
from exo.tasks import with_pulse

_COMMON = frozenset({"model", "stream", "options", "keep_alive"})
_CHAT = _COMMON | {"messages"}
_GENERATE = _COMMON | {"prompt", "system", "raw"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "format": ("",),
    "tools": ([],),
    "think": (False,),
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "context": ([],),
}
_ROLES = ("system", "user", "assistant")

# Of Ollama's options, those that say how to sample, by the names used here. The others say how to
# load a model, which the cluster decides.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}

_PULL_LOOK_S = 0.2


def parse_ollama(
    given: dict[str, Any], prompt: list[Message] | str, defaults: ChatDefaults
) -> ChatRequest:
    """What chat and generate have in common.

    Raises:
        InvalidRequest: a field is malformed or out of range; `param` names it.
    """
    options = fields.typed(given, "options", dict, {})
    said = {ours: options[name] for name, ours in _OPTIONS.items() if options.get(name) is not None}
    sampling, asked = fields.sampling(said, defaults, logprobs=False, top_logprobs=0)
    limit = fields.typed(options, "num_predict", int, -1)
    return ChatRequest(
        model=model_name(given),
        prompt=defaults.introduced(prompt) if isinstance(prompt, list) else prompt,
        sampling=sampling,
        asked=asked,
        max_tokens=limit if limit > 0 else defaults.max_tokens,  # -1 and -2: as long as it likes
        stop=fields.stop_strings(options.get("stop"), "options.stop"),
    )


def model_name(given: dict[str, Any]) -> str:
    """Clients add the tag ":latest" to names without one."""
    name = given.get("model") or given.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("model is missing", param="model")
    return name.removesuffix(":latest")


def _messages(given: dict[str, Any]) -> list[Message]:
    found = []
    for index, message in enumerate(fields.typed(given, "messages", list, [])):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise InvalidRequest(f"{where}.role must be one of {_ROLES}", param=where)
        for name, value in message.items():
            if name not in ("role", "content") and value:
                raise InvalidRequest(f"{where}.{name} is not supported", param=where)
        if not isinstance(message.get("content"), str):
            raise InvalidRequest(f"{where}.content must be a text", param=where)
        found.append({"role": message["role"], "content": message["content"]})
    return found


class Ollama:
    """The handlers, over one node."""

    def __init__(self, node: StandardNode, chat: Chat, defaults: ChatDefaults) -> None:
        self._node = node
        self._chat = chat
        self._defaults = defaults

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/api/chat", self.chat)
        app.router.add_post("/api/generate", self.generate)
        app.router.add_get("/api/tags", self.tags)
        app.router.add_get("/api/ps", self.running)
        app.router.add_get("/api/version", self.version)
        app.router.add_post("/api/show", self.show)
        app.router.add_post("/api/pull", self.pull)
        app.router.add_delete("/api/delete", self.delete)
        for path in ("push", "create", "copy", "embed", "embeddings"):
            app.router.add_post(f"/api/{path}", self.refuse)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        given = fields.body_of(await json_body(http))
        fields.check_known(given, _CHAT, _NEUTRAL)
        messages = _messages(given)
        if not messages:
            return await self._load(given, {"message": {"role": "assistant", "content": ""}})
        request = parse_ollama(given, messages, self._defaults)
        request = replace(request, continues=messages[-1]["role"] == "assistant")
        return await self._answer(http, given, request, _as_message)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        given = fields.body_of(await json_body(http))
        fields.check_known(given, _GENERATE, _NEUTRAL)
        text = fields.typed(given, "prompt", str, "")
        if not text:
            return await self._load(given, {"response": ""})
        prompt: list[Message] | str = text
        if not fields.typed(given, "raw", bool, False):
            system = fields.typed(given, "system", str, "")
            prompt = [{"role": "user", "content": text}]
            if system:
                prompt.insert(0, {"role": "system", "content": system})
        request = parse_ollama(given, prompt, self._defaults)
        return await self._answer(http, given, request, lambda text: {"response": text})

    async def _load(self, given: dict[str, Any], empty: dict[str, Any]) -> web.Response:
        """A request without a prompt has the model loaded."""
        model = model_name(given)
        resolve(model)
        await self._node.ensure_plan(model, "", unheard)
        done = {"done": True, "done_reason": "load"}
        return web.json_response({"model": model, "created_at": _now(), **empty, **done})

    async def _answer(
        self,
        http: web.Request,
        given: dict[str, Any],
        request: ChatRequest,
        shown: Callable[[str], dict[str, Any]],
    ) -> web.StreamResponse:
        resolve(request.model)
        if fields.typed(given, "stream", bool, True):
            waiting = Waiting(request.model)
            parts = self._lines(request, shown, waiting.note)
            return await streamed(http, parts, LINES, lambda: b"", lambda e: _line(ollama_error(e)))
        clock = _Clock()
        answer = await self._chat.answer(request, unheard)
        (piece,) = await gather(request, answer)
        clock.note_first()
        envelope = {"model": request.model, "created_at": _now()}
        ending = clock.ending(piece, len(answer.prompt), len(piece.tokens))
        return web.json_response(envelope | shown(piece.text) | ending)

    async def _lines(
        self,
        request: ChatRequest,
        shown: Callable[[str], dict[str, Any]],
        on_progress: OnProgress,
    ) -> AsyncGenerator[bytes, None]:
        clock = _Clock()
        answer = await self._chat.answer(request, on_progress)
        count = 0
        async with contextlib.aclosing(answer.pieces) as pieces:
            async for _, piece in pieces:
                clock.note_first()
                count += len(piece.tokens)
                envelope = {"model": request.model, "created_at": _now()}
                if piece.text or not piece.finish_reason:
                    yield _line(envelope | shown(piece.text) | {"done": False})
                if piece.finish_reason:
                    ending = clock.ending(piece, len(answer.prompt), count)
                    yield _line(envelope | shown("") | ending)

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
            model |= {"expires_at": _now(), "size_vram": 0}
        return web.json_response({"models": models})

    async def version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def show(self, http: web.Request) -> web.Response:
        given = fields.body_of(await json_body(http))
        model = model_name(given)
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
                "capabilities": ["completion"],
            }
        )

    async def pull(self, http: web.Request) -> web.StreamResponse:
        given = fields.body_of(await json_body(http))
        fields.check_known(given, frozenset({"model", "name", "stream", "insecure"}), {})
        model = model_name(given)
        resolve(model)
        if fields.typed(given, "stream", bool, True):
            parts = self._pulled(model)
            return await streamed(http, parts, LINES, lambda: b"", lambda e: _line(ollama_error(e)))
        async with contextlib.aclosing(self._pulled(model)) as parts:
            async for _ in parts:
                pass
        return web.json_response({"status": "success"})

    async def _pulled(self, model: str) -> AsyncGenerator[bytes, None]:
        """Progress as lines, until the files are here."""

        async def bring() -> AsyncGenerator[ExoError | None, None]:
            ends = await self._node.cluster_files.download(model, everywhere=False)
            yield ends[self._node.config.node_id]

        yield _line({"status": "pulling manifest"})
        async with contextlib.aclosing(with_pulse(bring(), False, _PULL_LOOK_S)) as events:
            async for event in events:
                if isinstance(event, ExoError):
                    raise event
                if event is False and (now := self._progress_of(model)) is not None:
                    digest = f"sha256:{hashlib.sha256(model.encode()).hexdigest()}"
                    counts = {"digest": digest, "total": now.total, "completed": now.done}
                    yield _line({"status": f"{now.phase} {model}", **counts})
        yield _line({"status": "success"})

    def _progress_of(self, model: str) -> Progress | None:
        own = (progress for progress in self._node.activity.own() if progress.model_id == model)
        return next((progress for progress in own if progress.total), None)

    async def delete(self, http: web.Request) -> web.Response:
        await self._node.cluster_files.remove(model_name(fields.body_of(await json_body(http))))
        return web.Response()

    async def refuse(self, http: web.Request) -> web.Response:
        raise InvalidRequest(f"{http.path} is not supported by exo")


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
            "done_reason": piece.finish_reason,
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": tokens,
            "eval_duration": max(1, now - first),
        }


def _as_message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


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


def _now() -> str:
    return _time(time.time())


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _line(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, ensure_ascii=False) + "\n").encode()
