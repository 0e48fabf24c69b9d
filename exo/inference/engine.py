"""The engine contract: one step of a ragged batch through one shard.

An engine runs on one node and holds the shards that live plans need. It knows nothing of nodes,
plans or HTTP. Everything it does runs on its own single thread, so an accelerator's state has one
owner and the event loop never waits for arithmetic.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from exo.errors import CacheMiss, EngineFailed, ExoError, InvalidFrame
from exo.inference.constrained import ConstrainedAnswers
from exo.inference.one_thread import OneThread
from exo.inference.sampling import Index, SampledToken, SamplingParams, sample
from exo.models.description import ModelDescription, absent_weights
from exo.models.tokenizer import Tokenizer, load_tokenizer
from exo.shard import Shard

Result = TypeVar("Result")
OnProgress = Callable[[int, int], None]
"""Called from the engine's thread with (bytes done, bytes in all)."""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """`length` consecutive tokens of one sequence, the first at position `start`.

    `sampling` asks for the token that follows the last of them; None asks for nothing.
    `prompt_length` tells where the prompt ends and generated tokens begin.
    """

    sequence_id: str
    start: Index
    length: Index
    sampling: SamplingParams | None = None
    prompt_length: Index = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def wants_logits(self) -> bool:
        return self.sampling is not None and not self.sampling.pooling

    @property
    def pools(self) -> bool:
        return self.sampling is not None and bool(self.sampling.pooling)


class ForwardBatch(msgspec.Struct, frozen=True):
    """One ragged step: slices one after the other, no padding.

    `token_ids`: int32 [tokens], on every shard: the first embeds them, the last keeps them as the
    history that penalties look at, and some architectures read them in every layer.

    Raises:
        InvalidFrame: the slices' lengths do not add up to the tokens.
    """

    slices: tuple[Slice, ...]
    token_ids: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        total, are_possible = 0, True
        for part in self.slices:
            total += part.length
            are_possible = are_possible and part.length >= 1 and part.start >= 0
        if total != len(self.token_ids) or not are_possible:
            raise InvalidFrame(
                f"a step of {len(self.token_ids)} tokens has slices "
                f"{[(s.start, s.length) for s in self.slices]}: "
                "expected positive lengths that add up to the tokens"
            )

    def __iter__(self) -> Iterator[tuple[Slice, slice]]:
        """Each slice with its rows in `token_ids` and in the hidden states."""
        row = 0
        for part in self.slices:
            yield part, slice(row, row + part.length)
            row += part.length


class StepOutput(msgspec.Struct, frozen=True):
    """What leaves a shard: hidden states [tokens, hidden], or on the last shard sampled tokens."""

    hidden_states: npt.NDArray[Any] | None = None
    tokens: tuple[SampledToken, ...] = ()


class InferenceEngine(ABC):
    """Loads shards and answers steps. Subclasses write the abstract methods, all of which
    run on the engine's thread; an exception that is not an ExoError becomes EngineFailed."""

    name: str

    def __init__(self) -> None:
        self._thread = OneThread(f"engine-{self.name}")
        self._histories: dict[str, list[int]] = {}
        self._paths: dict[str, Path] = {}
        self._constrained = ConstrainedAnswers(self.tokenizer_of)

    async def describe(self, model_id: str, path: Path) -> ModelDescription:
        """Sizes and allowed cuts of a checkpoint, without reading its weights.

        Raises:
            ModelUnsupported: this engine cannot run the checkpoint at all.
        """
        return await self._begin("describe", partial(self.describe_model, model_id, path))

    async def needed_weights(self, shard: Shard, path: Path) -> frozenset[str]:
        """Names of the checkpoint's weight files that hold what the shard reads. Only their headers
        are looked at."""
        return await self._begin("needed_weights", partial(self.weights_of_shard, shard, path))

    async def load(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        """Read the shard's tensors, and only those, into memory. Layers already there stay.

        Raises:
            EngineFailed: the checkpoint is damaged, a file is not here, or memory ran out.
        """
        await self._begin("load", partial(self._load, shard, path, on_progress))

    async def unload(self, shard: Shard) -> None:
        """Give back the memory of a shard no live plan needs."""
        await self._begin("unload", partial(self.unload_shard, shard))

    async def forward(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> StepOutput:
        """One step. `hidden_states` is None on the first shard, else [tokens, hidden].

        Each slice's `start` is the truth: smaller than what the cache holds truncates it, equal
        appends.

        Raises:
            CacheMiss: a start is larger than what the cache holds.
            EngineFailed: the engine raised; the caches of the batch's sequences are dropped.
        """
        step = partial(self._step, shard, batch, hidden_states)
        return await self._begin("forward", step)

    def begin_forward(
        self,
        shard: Shard,
        batch: ForwardBatch,
        hidden_states: npt.NDArray[Any] | None,
        on_done: Callable[[StepOutput | ExoError], None],
    ) -> None:
        """The same, without waiting: `on_done` gets the outcome, on the engine's thread, and raises
        nothing. What was begun first is done first. Raises EngineFailed if the engine is closed."""
        self._post("forward", partial(self._step, shard, batch, hidden_states), on_done)

    async def release(self, sequence_ids: Iterable[str]) -> None:
        """Free the KV cache of sequences; unknown ones are fine."""
        await self._begin("release", partial(self._release, tuple(sequence_ids)))

    def begin_release(
        self, sequence_ids: Iterable[str], on_done: Callable[[ExoError | None], None]
    ) -> None:
        """The same, without waiting: as `begin_forward`."""
        self._post("release", partial(self._release, tuple(sequence_ids)), on_done)

    async def close(self) -> None:
        """Free everything. The thread ends once the step it is in has ended."""
        self._thread.close()

    # What an engine is made of -----------------------------------------------------------------

    @abstractmethod
    def describe_model(self, model_id: str, path: Path) -> ModelDescription:
        """See `describe`."""

    @abstractmethod
    def weights_of_shard(self, shard: Shard, path: Path) -> frozenset[str]:
        """See `needed_weights`."""

    @abstractmethod
    def load_shard(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        """See `load`."""

    @abstractmethod
    def unload_shard(self, shard: Shard) -> None:
        """See `unload`."""

    @abstractmethod
    def compute(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        """Hidden states [tokens, hidden], or on the last shard float32 logits [slices that want
        them, vocabulary], one row for the last token of each, in order."""

    @abstractmethod
    def final_states(self, shard: Shard) -> npt.NDArray[np.float32]:
        """[tokens, hidden] of the step computed last, on the last shard: what its head would read,
        after the final norm. Only the rows of slices that pool are told right."""

    @abstractmethod
    def release_sequences(self, sequence_ids: Sequence[str]) -> None:
        """See `release`."""

    # The same for all engines ------------------------------------------------------------------

    def sample(
        self, shard: Shard, logits: npt.NDArray[np.float32], part: Slice, history: Sequence[int]
    ) -> SampledToken:
        """The token after `part`; `history` is the whole sequence so far."""
        how, place = part.sampling, (history, part.prompt_length)
        assert how is not None
        if how.constraint is None:
            token = sample(logits, how, *place)
        else:
            answer = self._constrained.of(part.sequence_id, shard.model_id, how.constraint)
            token = answer.sample(logits, how, *place)
        return token.of_sequence(part.sequence_id)

    def tokenizer_of(self, model_id: str) -> Tokenizer:
        """The tokenizer of a model that is loaded, for constraints."""
        return load_tokenizer("", self._paths[model_id])

    def _load(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        if (absent := absent_weights(path)) and (
            missing := absent & self.weights_of_shard(shard, path)
        ):
            raise EngineFailed(f"{shard} needs {', '.join(sorted(missing))}, not on this machine")
        self.load_shard(shard, path, on_progress)
        self._paths[shard.model_id] = path

    def _step(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> StepOutput:
        rows = len(batch.token_ids)
        if not shard.is_first and (hidden_states is None or hidden_states.shape[0] != rows):
            got = None if hidden_states is None else list(hidden_states.shape)
            raise InvalidFrame(f"{shard} expects hidden states of {rows} tokens, got {got}")
        try:
            computed = self.compute(shard, batch, hidden_states)
            if not shard.is_last:
                return StepOutput(hidden_states=computed)
            return StepOutput(tokens=tuple(self._sample_rows(shard, batch, computed)))
        except BaseException:
            # A cache that stopped halfway through a step is worth nothing.
            self._release(tuple({part.sequence_id for part in batch.slices}))
            raise

    def _sample_rows(
        self, shard: Shard, batch: ForwardBatch, logits: npt.NDArray[Any]
    ) -> Iterator[SampledToken]:
        row = 0
        for part, rows in batch:
            history = self._histories.setdefault(part.sequence_id, [])
            if len(history) < part.start:
                raise cache_miss(part, len(history))
            history[part.start :] = batch.token_ids[rows].tolist()
            if part.wants_logits:
                yield self.sample(shard, logits[row], part, history)
                row += 1
            elif part.sampling is not None:
                states = self.final_states(shard)[rows].astype("<f4")
                pooled = states.sum(0) if part.sampling.pooling == "mean" else states[-1]
                yield SampledToken(0, sequence_id=part.sequence_id, vector=pooled.tobytes())

    def _release(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self._histories.pop(sequence_id, None)
            self._constrained.forget(sequence_id)
        self.release_sequences(sequence_ids)

    def _begin(self, what: str, call: Callable[[], Result]) -> asyncio.Future[Result]:
        return self._thread.submit(partial(self._guarded, what, call))

    def _post(
        self, what: str, call: Callable[[], Result], on_done: Callable[[Result | ExoError], None]
    ) -> None:
        def run() -> None:
            outcome: Result | ExoError
            try:
                self._thread.check_open()
                outcome = self._guarded(what, call)
            except ExoError as error:
                outcome = error
            on_done(outcome)

        self._thread.post(run)

    def _guarded(self, what: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except ExoError:
            raise
        except Exception as error:
            raise EngineFailed(
                f"engine {self.name} failed in {what}: {type(error).__name__}: {error}"
            ) from error


def cache_miss(part: Slice, cached: int) -> CacheMiss:
    """The error for a slice that starts after the `cached` tokens an engine holds of it."""
    return CacheMiss(
        f"sequence {part.sequence_id} starts at {part.start}, the KV cache holds {cached} tokens"
    )
