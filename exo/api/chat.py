"""A chat request through the cluster: messages to tokens, tokens to text. Every dialect's core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from exo.api.chat_request import ChatRequest
from exo.api.stop_strings import StopStrings
from exo.download.progress import OnProgress
from exo.errors import PromptTooLong
from exo.inference.sampling import SampledToken
from exo.models.description import ModelDescription
from exo.models.tokenizer import TextStream, Tokenizer, load_tokenizer
from exo.networking.calls.messages import GenerationRequest
from exo.orchestration.node import StandardNode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Text that is complete, the tokens it came from, and on the last one why it ended."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = field(default=())
    finish_reason: str | None = None


@dataclass(frozen=True)
class Answer:
    """One answer under way. Every generated token is in exactly one piece."""

    id: str
    tokenizer: Tokenizer
    prompt_tokens: int
    pieces: AsyncGenerator[Piece, None]


class Chat:
    """Answers chat requests on a node's cluster; keeps the tokenizers it has loaded."""

    def __init__(self, node: StandardNode) -> None:
        self._node = node
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading = asyncio.Lock()

    async def answer(self, request: ChatRequest, on_progress: OnProgress) -> Answer:
        """Begin an answer: everything that can be refused is refused here.

        Raises:
            ModelNotFound: nobody has the model.
            PromptTooLong: the conversation does not fit the context.
            InvalidRequest: the chat template refuses it.
        """
        path, description = await self._node.describe(request.model, on_progress)
        tokenizer = await self._tokenizer(description, path)
        prompt = await asyncio.to_thread(tokenizer.encode_chat, request.messages)
        room = description.context_length - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"the conversation is {len(prompt)} tokens; the context of {request.model} is "
                f"{description.context_length}, and the answer needs room in it",
                param="messages",
            )
        wanted = GenerationRequest(
            f"chatcmpl-{uuid.uuid4().hex}",
            tuple(prompt),
            request.sampling,
            min(request.max_tokens or room, room),
            tokenizer.eos_token_ids,
        )
        logger.info(
            "%s: %s, %d tokens in%s",
            wanted.sequence_id,
            request.model,
            len(prompt),
            f", user {request.user}" if request.user else "",
        )
        pieces = self._pieces(tokenizer, request, wanted, on_progress)
        return Answer(wanted.sequence_id, tokenizer, len(prompt), pieces)

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
                ready, stopped = stops.add(ready)
                if stopped:
                    yield Piece(ready, tuple(waiting), "stop")
                    return
                if event.finish_reason:
                    yield Piece(ready + stops.finish(), tuple(waiting), event.finish_reason)
                    return
                if ready:
                    yield Piece(ready, tuple(waiting))
                    waiting = []

    async def _tokenizer(self, description: ModelDescription, path: Path) -> Tokenizer:
        async with self._loading:
            tokenizer = self._tokenizers.get(description.model_id)
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(load_tokenizer, description.model_type, path)
                self._tokenizers[description.model_id] = tokenizer
            return tokenizer
