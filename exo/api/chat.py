"""From a request of any dialect to pieces of text: template, tokens, generation, text again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from exo.api.request import ChatRequest
from exo.api.sampling_defaults import sampling_defaults
from exo.api.stop_strings import StopStrings
from exo.download.progress import OnProgress
from exo.errors import InvalidRequest, PromptTooLong
from exo.inference.sampling import SampledToken, SamplingParams
from exo.models.description import ModelDescription
from exo.models.tokenizer import TextStream, Tokenizer, load_tokenizer
from exo.networking.calls.messages import GenerationRequest
from exo.orchestration.node import StandardNode
from exo.tasks import merged

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Some text, the tokens it was made of, and at the end why it ended: "stop" or "length", with
    the stop string where it was one."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = field(default=())
    finish_reason: str | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Answer:
    """One request's answers under way: `pieces` come with the number of the answer they belong to.
    Every generated token is in exactly one piece."""

    id: str
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    pieces: AsyncGenerator[tuple[int, Piece], None]


class Chat:
    """Answers requests on a node's cluster; keeps the tokenizers it has loaded."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node
        self._loaded: dict[str, _Loaded] = {}
        self._loading = asyncio.Lock()

    async def answer(self, request: ChatRequest, on_progress: OnProgress) -> Answer:
        """Begin an answer: everything that can be refused is refused here.

        Raises:
            ModelNotFound: nobody has the model.
            PromptTooLong: the conversation does not fit the context.
            InvalidRequest: the chat template refuses it, or a token is none of the model's.
        """
        path, description = await self._node.describe(request.model, on_progress)
        loaded = await self._load(description, path)
        prompt = await asyncio.to_thread(_prompt, loaded.tokenizer, request)
        room = description.context_length - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"the prompt is {len(prompt)} tokens, {1 - room} more than fit: the context of "
                f"{request.model} is {description.context_length}, and the answer needs room in it",
                param="messages" if isinstance(request.prompt, list) else "prompt",
            )
        chat_id = uuid.uuid4().hex
        sampling = _with_defaults(request, loaded.defaults)
        sequences = [
            GenerationRequest(
                f"{chat_id}-{i}",
                prompt,
                msgspec.structs.replace(sampling, seed=(sampling.seed + i) % 2**64),
                min(request.max_tokens or room, room),
                loaded.tokenizer.eos_token_ids,
            )
            for i in range(request.choices)
        ]
        logger.info(
            "%s: %s, %d tokens in%s",
            chat_id,
            request.model,
            len(prompt),
            f", user {request.user}" if request.user else "",
        )
        pieces = [self._pieces(loaded.tokenizer, request, one, on_progress) for one in sequences]
        return Answer(chat_id, loaded.tokenizer, prompt, merged(pieces))

    async def count_tokens(self, request: ChatRequest, on_progress: OnProgress) -> int:
        """Tokens of a prompt. Raises as `answer` does."""
        path, description = await self._node.describe(request.model, on_progress)
        loaded = await self._load(description, path)
        return len(await asyncio.to_thread(_prompt, loaded.tokenizer, request))

    async def _pieces(
        self,
        tokenizer: Tokenizer,
        request: ChatRequest,
        wanted: GenerationRequest,
        on_progress: OnProgress,
    ) -> AsyncGenerator[Piece, None]:
        """Text as it comes. Closing this cancels the sequence on every node."""
        text = TextStream(tokenizer)
        stops = StopStrings(request.stop)
        waiting: list[SampledToken] = []
        events = self._node.generate(request.model, wanted, on_progress)
        async with contextlib.aclosing(events):
            async for event in events:
                ready = ""
                if event.token is not None:
                    waiting.append(event.token)
                    ready = text.add(event.token.token_id)
                if event.finish_reason:
                    ready += text.finish()
                ready, stop_string = stops.add(ready)
                if stop_string is not None:
                    yield Piece(ready, tuple(waiting), "stop", stop_string)
                    return
                if event.finish_reason:
                    yield Piece(ready + stops.finish(), tuple(waiting), event.finish_reason)
                    return
                if ready:
                    yield Piece(ready, tuple(waiting))
                    waiting = []

    async def _load(self, description: ModelDescription, path: Path) -> _Loaded:
        async with self._loading:
            loaded = self._loaded.get(description.model_id)
            if loaded is None or loaded.path != path:
                loaded = await asyncio.to_thread(_read, description.model_type, path)
                self._loaded[description.model_id] = loaded
            return loaded


@dataclass(frozen=True)
class _Loaded:
    """What is read of a model's folder to talk to it."""

    path: Path
    tokenizer: Tokenizer
    defaults: dict[str, float]


def _read(model_type: str, path: Path) -> _Loaded:
    return _Loaded(path, load_tokenizer(model_type, path), sampling_defaults(path))


def _prompt(tokenizer: Tokenizer, request: ChatRequest) -> tuple[int, ...]:
    prompt = request.prompt
    if isinstance(prompt, list):
        return tuple(tokenizer.encode_chat(prompt, continues=request.continues))
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    unknown = [token for token in prompt if not 0 <= token < tokenizer.vocabulary_size]
    if unknown:
        raise InvalidRequest(
            f"token {unknown[0]} is none of this model's, which are 0 to "
            f"{tokenizer.vocabulary_size - 1}",
            param="prompt",
        )
    return prompt


def _with_defaults(request: ChatRequest, defaults: dict[str, float]) -> SamplingParams:
    """What the request leaves open is as the model's makers say."""
    open_ = {name: value for name, value in defaults.items() if name not in request.asked}
    return msgspec.structs.replace(request.sampling, **open_)
