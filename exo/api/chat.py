"""From a request of any dialect to what is said, thought and called: template, tokens, generation,
text again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from exo import json_text
from exo.api.constraints import constraint_of
from exo.api.http.request_id import client, next_answer_id
from exo.api.prompts import Prompt, prompt_of
from exo.api.request import ChatRequest
from exo.api.sampling_defaults import sampling_defaults
from exo.api.stop_strings import StopStrings
from exo.download.hub_cache import POOLING
from exo.download.progress import OnProgress
from exo.errors import EngineFailed, PromptTooLong
from exo.inference.sampling import Constraint, SampledToken, SamplingParams
from exo.models.description import ModelDescription
from exo.models.markup.reader import (
    AnswerReader,
    CallArguments,
    CallBegun,
    Part,
    PlainReader,
    Said,
    Thought,
)
from exo.models.tokenizer import TextStream, Tokenizer, load_tokenizer
from exo.networking.calls.messages import GenerationEvent, GenerationRequest
from exo.orchestration.node import StandardNode
from exo.tasks import merged

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Something of an answer, the tokens it was made of, and at the end why it ended: "stop",
    "length" or "tool_calls", with the stop string where it was one."""

    parts: tuple[Part, ...] = ()
    tokens: tuple[SampledToken, ...] = field(default=())
    finish_reason: str | None = None
    stop_string: str | None = None

    @property
    def text(self) -> str:
        """What is said in it."""
        return "".join(part.text for part in self.parts if isinstance(part, Said))

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))


@dataclass(frozen=True)
class Call:
    """A call of a tool as a whole; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """One request's answers under way: `pieces` come with the number of the answer they belong to.
    Every generated token is in exactly one piece."""

    id: str
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    pieces: AsyncGenerator[tuple[int, Piece], None]
    cached: dict[int, int]
    """Of each answer that has begun, tokens of the prompt that were computed before."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that needed not be computed."""
        return self.cached.get(0, 0)

    def call_id(self, choice: int, number: int) -> str:
        """The name of an answer's call, counted from 0."""
        return f"call_{self.id[:20]}{choice:x}{number:x}"

    async def gather(self, choices: int = 1) -> list[Piece]:
        """Each of the answers as one piece."""
        found: list[list[Piece]] = [[] for _ in range(choices)]
        async with contextlib.aclosing(self.pieces) as pieces:
            async for index, piece in pieces:
                found[index].append(piece)
        return [
            Piece(
                tuple(part for piece in some for part in piece.parts),
                tuple(token for piece in some for token in piece.tokens),
                some[-1].finish_reason,
                some[-1].stop_string,
            )
            for some in found
        ]

    def calls_of(self, choice: int, piece: Piece) -> list[Call]:
        """The calls in a whole answer."""
        names: list[str] = []
        texts: list[str] = []
        for part in piece.parts:
            if isinstance(part, CallBegun):
                names.append(part.name)
                texts.append("")
            elif isinstance(part, CallArguments):
                texts[-1] += part.text
        return [
            Call(self.call_id(choice, i), name, texts[i] or "{}") for i, name in enumerate(names)
        ]


_EMBEDDED_AT_ONCE = 8
"""Of one request's inputs: others have their turns too."""

Events = AsyncGenerator[GenerationEvent, None]
Timed = Callable[[str, int, Events], Events]


class Chat:
    """Answers requests on a node's cluster; keeps the tokenizers it has loaded. Each sequence's
    events go through `timed`, with its model and the number of its prompt's tokens."""

    def __init__(self, node: StandardNode, timed: Timed) -> None:
        self._node = node
        self._timed = timed
        self._loaded: dict[str, _Loaded] = {}
        self._loading = asyncio.Lock()

    async def answer(self, request: ChatRequest, on_progress: OnProgress) -> Answer:
        """Begin an answer: everything that can be refused is refused here.

        Raises:
            ModelNotFound: nobody has the model.
            PromptTooLong: the conversation does not fit the context.
            InvalidRequest: the chat template refuses it, a token is none of the model's, or a
                grammar cannot be held to.
        """
        description, loaded = await self._load(request.model, on_progress)
        tokenizer, context = loaded.tokenizer, description.context_length
        prompt, constraint = await asyncio.to_thread(_prepared, tokenizer, request, context)
        room = context - len(prompt.tokens)
        if room < 1:
            raise PromptTooLong(
                f"the prompt is {len(prompt.tokens)} tokens, {1 - room} more than fit: the context "
                f"of {request.model} is {context}, and the answer needs room in it",
                param="messages" if isinstance(request.prompt, list) else "prompt",
            )
        ends = tokenizer.eos_token_ids | request.ends
        sampling = msgspec.structs.replace(
            _with_defaults(request, loaded.defaults), constraint=constraint
        )
        if sampling.min_tokens:
            sampling = msgspec.structs.replace(sampling, ends=tuple(sorted(ends)))
        chat_id = next_answer_id()
        sequences = [
            GenerationRequest(
                f"{chat_id}-{i}",
                prompt.tokens,
                msgspec.structs.replace(sampling, seed=(sampling.seed + i) % 2**64),
                min(request.max_tokens or room, room),
                request.ends if request.ignores_end else ends,
                client.get(),
                request.shortcuts,
            )
            for i in range(request.choices)
        ]
        logger.info(
            "%s: %s, %d tokens in%s",
            chat_id,
            request.model,
            len(prompt.tokens),
            f", user {request.user}" if request.user else "",
        )
        cached: dict[int, int] = {}
        pieces = [
            self._pieces(
                tokenizer, request, prompt, sequence, partial(cached.setdefault, i), on_progress
            )
            for i, sequence in enumerate(sequences)
        ]
        return Answer(chat_id, tokenizer, prompt.tokens, merged(pieces), cached)

    async def count_tokens(self, request: ChatRequest, on_progress: OnProgress) -> int:
        """Tokens of a prompt. Raises as `answer` does."""
        description, loaded = await self._load(request.model, on_progress)
        context = description.context_length
        return len((await asyncio.to_thread(prompt_of, loaded.tokenizer, request, context)).tokens)

    async def tokenizer(self, model_id: str, on_progress: OnProgress) -> Tokenizer:
        """A model's. Raises ModelNotFound where nobody has the model."""
        return (await self.tokenizer_and_context(model_id, on_progress))[0]

    async def tokenizer_and_context(
        self, model_id: str, on_progress: OnProgress
    ) -> tuple[Tokenizer, int]:
        """With how many tokens fit its context. Raises ModelNotFound where nobody has the model."""
        description, loaded = await self._load(model_id, on_progress)
        return loaded.tokenizer, description.context_length

    async def embed(
        self, model_id: str, inputs: Sequence[str | tuple[int, ...]], on_progress: OnProgress
    ) -> tuple[list[npt.NDArray[np.float32]], int]:
        """A vector of length 1 for each input, [hidden], pooled as the model's makers say, else the
        mean of its final hidden states; and the tokens of all inputs.

        Raises:
            PromptTooLong: an input does not fit the context.
            InvalidRequest: a token is none of the model's, or the model cannot be asked for them.
        """
        description, loaded = await self._load(model_id, on_progress)
        requests = [ChatRequest(model_id, one, SamplingParams()) for one in inputs]
        context, tokenizer = description.context_length, loaded.tokenizer
        prompts = await asyncio.to_thread(
            lambda: [prompt_of(tokenizer, one, context).tokens for one in requests]
        )
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= context:
                raise PromptTooLong(
                    f"input {i} is {len(prompt)} tokens; expected 1 to {context}, the context of "
                    f"{model_id}",
                    param="input",
                )
        places = asyncio.Semaphore(_EMBEDDED_AT_ONCE)
        name = next_answer_id()

        async def vector(number: int, prompt: tuple[int, ...]) -> npt.NDArray[np.float32]:
            wanted = GenerationRequest(
                f"{name}-{number}",
                prompt,
                SamplingParams(pooling=loaded.pooling),
                max_tokens=1,
                client=client.get(),
            )
            async with places:
                generated = self._node.generate(model_id, wanted, on_progress)
                async with contextlib.aclosing(generated):
                    async for event in generated:
                        assert event.token is not None
                        found = np.frombuffer(event.token.vector, "<f4")
                        length = max(float(np.linalg.norm(found)), 1e-12)
                        return (found / length).astype(np.float32)
            raise EngineFailed(f"no vector came of input {number}")

        tasks = [asyncio.ensure_future(vector(i, prompt)) for i, prompt in enumerate(prompts)]
        try:
            return await asyncio.gather(*tasks), sum(map(len, prompts))
        finally:  # the first that fails ends the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pieces(
        self,
        tokenizer: Tokenizer,
        request: ChatRequest,
        prompt: Prompt,
        wanted: GenerationRequest,
        on_begin: Callable[[int], object],
        on_progress: OnProgress,
    ) -> AsyncGenerator[Piece, None]:
        """What comes. Closing this cancels the sequence on every node. `on_begin` is called with
        the tokens of the prompt that were computed before."""
        text = TextStream(tokenizer, _shown(tokenizer, request))
        output = _Output(_reader(tokenizer, request, prompt), request.stop)
        waiting: list[SampledToken] = []
        generated = self._node.generate(request.model, wanted, on_progress)
        events = self._timed(request.model, len(wanted.prompt), generated)
        async with contextlib.aclosing(generated), contextlib.aclosing(events):
            async for event in events:
                ready = ""
                on_begin(event.cached_tokens)  # only the first counts
                if event.token is not None:
                    waiting.append(event.token)
                    ready = text.add(event.token.token_id)
                if event.finish_reason:
                    ready += text.finish()
                parts = output.add(ready)
                if event.finish_reason and output.stop_string is None:
                    parts += output.finish()
                if output.stop_string is not None:
                    yield Piece(tuple(parts), tuple(waiting), "stop", output.stop_string)
                    return
                if event.finish_reason:
                    reason = event.finish_reason
                    if output.called and reason == "stop":
                        reason = "tool_calls"
                    yield Piece(tuple(parts), tuple(waiting), reason)
                    return
                if parts:
                    yield Piece(tuple(parts), tuple(waiting))
                    waiting = []

    async def _load(
        self, model_id: str, on_progress: OnProgress
    ) -> tuple[ModelDescription, _Loaded]:
        path, description = await self._node.describe(model_id, on_progress)
        async with self._loading:
            loaded = self._loaded.get(description.model_id)
            if loaded is None or loaded.path != path:
                loaded = await asyncio.to_thread(_read, description.model_type, path)
                self._loaded[description.model_id] = loaded
            return description, loaded


class _Output:
    """One answer's text through its reader and its stop strings, which look at what is said."""

    def __init__(self, reader: AnswerReader, stops: tuple[str, ...]) -> None:
        self._reader = reader
        self._stops = StopStrings(stops)
        self.stop_string: str | None = None
        self.called = False

    def add(self, text: str) -> list[Part]:
        return self._checked(self._reader.add(text))

    def finish(self) -> list[Part]:
        parts = self._checked(self._reader.finish())
        if self.stop_string is None and (held := self._stops.finish()):
            parts.append(Said(held))
        return parts

    def _checked(self, parts: list[Part]) -> list[Part]:
        checked: list[Part] = []
        for part in parts:
            if not isinstance(part, Said):
                self.called = self.called or isinstance(part, CallBegun)
                if held := self._stops.finish():
                    checked.append(Said(held))
                checked.append(part)
                continue
            text, self.stop_string = self._stops.add(part.text)
            if text:
                checked.append(Said(text))
            if self.stop_string is not None:
                break
        return checked


@dataclass(frozen=True)
class _Loaded:
    """What is read of a model's folder to talk to it."""

    path: Path
    tokenizer: Tokenizer
    defaults: dict[str, float]
    pooling: Literal["mean", "last"]


def _read(model_type: str, path: Path) -> _Loaded:
    tokenizer, defaults = load_tokenizer(model_type, path), sampling_defaults(path)
    return _Loaded(path, tokenizer, defaults, _pooling(path))


def _pooling(path: Path) -> Literal["mean", "last"]:
    """As sentence-transformers says it of a model."""
    try:
        said = json_text.object_in(path / POOLING)
        return "last" if said.get("pooling_mode_lasttoken") else "mean"
    except FileNotFoundError:
        return "mean"
    except (OSError, ValueError) as error:
        logger.warning("%s is not used: %s", path / POOLING, error)
        return "mean"


def _prepared(
    tokenizer: Tokenizer, request: ChatRequest, context: int
) -> tuple[Prompt, Constraint | None]:
    prompt = prompt_of(tokenizer, request, context)
    return prompt, constraint_of(tokenizer, request, prompt)


def _reader(tokenizer: Tokenizer, request: ChatRequest, prompt: Prompt) -> AnswerReader:
    if not isinstance(request.prompt, list) or request.continues or request.shows_special:
        return PlainReader()
    return tokenizer.markup.reader(
        request.tools, thinks=prompt.thinks, enforced=request.tool_choice.mode == "required"
    )


def _shown(tokenizer: Tokenizer, request: ChatRequest) -> Mapping[int, str]:
    if request.shows_special:
        return {i: text for text, i in tokenizer.special_tokens.items()}
    return tokenizer.markup.shown_tokens if isinstance(request.prompt, list) else {}


def _with_defaults(request: ChatRequest, defaults: dict[str, float]) -> SamplingParams:
    """What the request leaves open is as the model's makers say."""
    open_ = {name: value for name, value in defaults.items() if name not in request.asked}
    return msgspec.structs.replace(request.sampling, **open_)
