"""The engine contract: one step of a ragged batch through one shard.

An engine runs on one node and holds the shards that live plans need. It knows nothing of nodes,
plans or HTTP. Everything it does runs on its own single thread, so an accelerator's state has one
owner and the event loop never waits for arithmetic.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from exo.errors import CacheMiss, EngineFailed, ExoError, InvalidFrame
from exo.inference.batch import CacheRoom, ForwardBatch, Slice, StepOutput
from exo.inference.constrained import ConstrainedAnswers
from exo.inference.one_thread import OneThread
from exo.inference.read_rate import once_a_machine
from exo.inference.sampling import SampledToken, sample
from exo.inference.step_times import StepTimes
from exo.models.description import ModelDescription, with_kv_in_bytes
from exo.models.tensor_table import absent_tensors
from exo.models.tokenizer import Tokenizer, load_tokenizer
from exo.shard import Shard
from exo.topology.capabilities import free_memory

Result = TypeVar("Result")
CACHE_MEMORY_SHARE = 0.5
"""Share of the memory free after a shard is loaded that its KV cache may take."""

OnProgress = Callable[[int, int], None]
"""Called from the engine's thread with (bytes done, bytes in all)."""


class InferenceEngine(ABC):
    """Loads shards and answers steps. Subclasses write the abstract methods, all of which
    run on the engine's thread; an exception that is not an ExoError becomes EngineFailed."""

    name: str
    prompt_chunk = 256
    """Tokens of a prompt in one step that make the most of what computes it."""

    def __init__(self) -> None:
        self._thread = OneThread(f"engine-{self.name}")
        self._histories: dict[str, list[int]] = {}
        self._paths: dict[str, Path] = {}
        self._constrained = ConstrainedAnswers(self.tokenizer_of)
        self.kv_memory: int | None = None
        """Bytes for the KV cache of a shard; None: half of what is free once it is loaded."""
        self.kv_bits = 16
        """Of a key or value in the KV cache, where it can be so: 16 or 8."""
        self.busy_s = 0.0
        """Seconds in which steps were computed."""
        self.times = StepTimes()
        self.read_rates: Path | None = None
        """Where processes of this machine tell each other how fast they read; None: nowhere."""
        self._read_rate: float | None = None

    async def read_rate(self) -> float:
        """Bytes of weights that decoding reads a second, as far as can be told without a model."""
        if self._read_rate is None:
            measure = self.measure_read_rate
            if self.read_rates is not None:
                measure = partial(once_a_machine, self.read_rates, self.kind, measure)
            self._read_rate = await self._begin("measuring", measure)
        return self._read_rate

    @property
    def promised_bytes(self) -> int:
        """Of memory that shards which are loaded will take, and have not taken yet, beside their KV
        caches. May be asked from any thread."""
        return 0

    @property
    def kind(self) -> str:
        """Another word for each engine that would be another speed on the same machine."""
        return self.name

    async def describe(self, model_id: str, path: Path) -> ModelDescription:
        """Sizes and allowed cuts of a checkpoint, without reading its weights.

        Raises:
            ModelUnsupported: this engine cannot run the checkpoint at all.
        """
        found = await self._begin("describe", partial(self.describe_model, model_id, path))
        return with_kv_in_bytes(found) if self.kv_bits == 8 else found

    async def needed_tensors(self, shard: Shard, path: Path) -> frozenset[str]:
        """Names of the checkpoint's tensors that the shard reads, as `exo.models.tensor_table` has
        them. Only the weight files' headers are looked at."""
        return await self._begin("needed_tensors", partial(self.tensors_of_shard, shard, path))

    async def load(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        """Read the shard's tensors, and only those, into memory. Layers already there stay.

        Raises:
            EngineFailed: the checkpoint is damaged, a file is not here, or memory ran out.
        """
        await self._begin("load", partial(self._load, shard, path, on_progress))

    async def stand_by(self, shard: Shard, path: Path) -> None:
        """Read the shard's tensors, so that to load one with the same layers takes no time; it
        computes nothing itself, and is given back by `unload`. Raises what `load` raises."""
        await self._begin("stand_by", partial(self._hold, shard, path))

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

    def begin_room(self, shard: Shard, on_done: Callable[[CacheRoom | ExoError], None]) -> None:
        """What the shard's KV cache may hold and holds, without waiting: as `begin_forward`."""
        self._post("room", partial(self.cache_room, shard), on_done)

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
    def tensors_of_shard(self, shard: Shard, path: Path) -> frozenset[str]:
        """See `needed_tensors`."""

    @abstractmethod
    def load_shard(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        """See `load`."""

    def hold_shard(self, shard: Shard, path: Path) -> None:
        """See `stand_by`."""
        self.load_shard(shard, path, lambda done, total: None)

    @abstractmethod
    def unload_shard(self, shard: Shard) -> None:
        """See `unload`."""

    @abstractmethod
    def compute(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        """Hidden states [tokens, hidden], or on the last shard float32 logits [rows that are
        wanted, vocabulary], those of each slice's last tokens (`Slice.logits`), in order."""

    @abstractmethod
    def measure_read_rate(self) -> float:
        """See `read_rate`; takes less than a second."""

    @abstractmethod
    def final_states(self, shard: Shard) -> npt.NDArray[np.float32]:
        """[tokens, hidden] of the step computed last, on the last shard: what its head would read,
        after the final norm. Only the rows of slices that pool are told right."""

    @abstractmethod
    def take_over(self, shard: Shard, part: Slice) -> None:
        """Have `part`'s sequence begin with the first `part.start` tokens of the one it takes over,
        whose cache stays as it is unless `part.moves`. Raises CacheMiss where that cannot be."""

    @abstractmethod
    def cache_room(self, shard: Shard) -> CacheRoom:
        """See `begin_room`."""

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

    def cache_bytes(self, accelerator: str) -> int:
        """That the KV cache of a shard which is loaded now may take."""
        if self.kv_memory is not None:
            return self.kv_memory
        free = free_memory(accelerator) - self.promised_bytes
        return int(max(0, free) * CACHE_MEMORY_SHARE)

    def _load(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        self._check_here(shard, path)
        self.load_shard(shard, path, on_progress)
        self._paths[shard.model_id] = path

    def _hold(self, shard: Shard, path: Path) -> None:
        self._check_here(shard, path)
        self.hold_shard(shard, path)

    def _check_here(self, shard: Shard, path: Path) -> None:
        if (absent := absent_tensors(path)) and (
            missing := absent & self.tensors_of_shard(shard, path)
        ):
            raise EngineFailed(
                f"{shard} needs {min(missing)} and {len(missing) - 1} more tensors that are "
                "not on this machine"
            )

    def _step(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> StepOutput:
        rows = len(batch.token_ids)
        if not shard.is_first and (hidden_states is None or hidden_states.shape[0] != rows):
            got = None if hidden_states is None else list(hidden_states.shape)
            raise InvalidFrame(f"{shard} expects hidden states of {rows} tokens, got {got}")
        begun = time.perf_counter()
        computed_s = 0.0
        try:
            for part in batch.slices:
                if part.takes_over:
                    self._take_over(shard, part)
            computed = self.compute(shard, batch, hidden_states)
            computed_s = time.perf_counter() - begun
            if not shard.is_last:
                return StepOutput(hidden_states=computed)
            return StepOutput(tokens=tuple(self._sample_rows(shard, batch, computed)))
        except BaseException:
            # A cache that stopped halfway through a step is worth nothing.
            self._release(tuple({part.sequence_id for part in batch.slices}))
            raise
        finally:
            passed_s = time.perf_counter() - begun
            self.busy_s += passed_s
            if computed_s:
                self.times.took(shard, batch, computed_s, passed_s)

    def _take_over(self, shard: Shard, part: Slice) -> None:
        if shard.is_last:
            held = self._histories.get(part.takes_over, [])
            if len(held) < part.start:
                raise cache_miss(part, len(held))
            self._histories[part.sequence_id] = held[: part.start]
        self.take_over(shard, part)

    def _sample_rows(
        self, shard: Shard, batch: ForwardBatch, logits: npt.NDArray[Any]
    ) -> Iterator[SampledToken]:
        row = 0
        for part, rows in batch:
            history = self._histories.setdefault(part.sequence_id, [])
            if len(history) < part.start:
                raise cache_miss(part, len(history))
            tokens = batch.token_ids[rows].tolist()
            certain = part.length - part.drafts
            history[part.start :] = tokens[:certain]
            if part.logits:
                yield from self._verified(
                    shard, part, history, logits[row : row + part.logits], tokens[certain:]
                )
                row += part.logits
            elif part.sampling is not None:
                states = self.final_states(shard)[rows].astype("<f4")
                pooled = states.sum(0) if part.sampling.pooling == "mean" else states[-1]
                yield SampledToken(0, sequence_id=part.sequence_id, vector=pooled.tobytes())

    def _verified(
        self,
        shard: Shard,
        part: Slice,
        history: list[int],
        logits: npt.NDArray[Any],
        drafts: list[int],
    ) -> Iterator[SampledToken]:
        """The token after the certain ones, and as long as it is what was guessed, the next."""
        for row, draft in zip(logits, [*drafts, None], strict=True):
            token = self.sample(shard, row, part, history)
            yield token
            if token.token_id != draft:
                return
            history.append(draft)

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
