"""How fast an engine is: prefill, decode, batches, memory, in the manner of llama-bench."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from exo.inference.batch import ForwardBatch, Slice
from exo.inference.engine import InferenceEngine
from exo.inference.sampling import SamplingParams
from exo.models.description import read_config, vocabulary
from exo.models.tensor_table import weight_files
from exo.shard import Shard

GREEDY = SamplingParams(temperature=0)
DECODED_TOKENS = 48
"""Steps one measurement of decoding takes."""


@dataclass(frozen=True)
class Measurement:
    """Tokens a second over some repetitions; `tok_s` is the median. `context` is how many tokens
    the KV cache held before, `batch` how many sequences shared each step."""

    test: str  # "prefill" or "decode"
    n_tokens: int
    context: int
    batch: int
    threads: int
    nodes: int
    tok_s: float
    min: float
    max: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(
        cls,
        test: str,
        n_tokens: int,
        seconds: Sequence[float],
        *,
        context: int = 0,
        batch: int = 1,
        threads: int,
        nodes: int = 1,
    ) -> Measurement:
        """`n_tokens` tokens (for each sequence) took each of `seconds`."""
        speeds = [n_tokens * batch / s for s in seconds]
        middle = statistics.median(speeds)
        return cls(test, n_tokens, context, batch, threads, nodes, middle, min(speeds), max(speeds))


@dataclass(frozen=True)
class Plan:
    """What to measure: prompt lengths, contexts to decode at, numbers of sequences (decoded at the
    first of the contexts), repetitions."""

    prefill: tuple[int, ...] = (128, 512, 2048)
    decode: tuple[int, ...] = (16, 512, 2048)
    batch: tuple[int, ...] = (1, 4, 8, 16)
    repetitions: int = 3

    @property
    def decode_cases(self) -> list[tuple[int, int]]:
        """(context, batch) of each measurement of decoding."""
        several = [(self.decode[0], batch) for batch in self.batch if self.decode and batch > 1]
        return [(context, 1) for context in self.decode] + several


class EngineBenchmark:
    """One engine with a whole model in memory."""

    def __init__(
        self, engine: InferenceEngine, shard: Shard, threads: int, vocabulary: int
    ) -> None:
        self._engine = engine
        self._shard = shard
        self._threads = threads
        self._vocabulary = vocabulary

    @classmethod
    async def load(
        cls, engine: InferenceEngine, model_id: str, path: Path, threads: int
    ) -> tuple[EngineBenchmark, dict[str, Any]]:
        """The benchmark, and what loading took: seconds, bytes of the files, memory it costs."""
        description = await engine.describe(model_id, path)
        shard = Shard(model_id, 0, description.n_layers, description.n_layers)
        before, started = resident_bytes(), time.perf_counter()
        await engine.load(shard, path, lambda done, total: None)
        load_s = time.perf_counter() - started
        loaded = {
            "test": "load",
            "seconds": load_s,
            "checkpoint_bytes": sum(file.stat().st_size for file in weight_files(path)),
            "memory_bytes": resident_bytes() - before,
        }
        return cls(engine, shard, threads, vocabulary(read_config(path))), loaded

    async def run(self, plan: Plan) -> AsyncIterator[Measurement]:
        """Every measurement as it is made; one unmeasured prefill before, of as much as a step may
        have: the first grows the engine's buffers."""
        await self._prefill(("warm",), min(max((32, *plan.prefill)), self._engine.prompt_chunk))
        await self._engine.release(["warm"])
        for n in plan.prefill:
            yield await self._measure_prefill(n, plan.repetitions)
        for context, batch in plan.decode_cases:
            yield await self._measure_decode(context, batch, plan.repetitions)

    async def _measure_prefill(self, n: int, repetitions: int) -> Measurement:
        seconds = []
        for _ in range(repetitions):
            started = time.perf_counter()
            await self._prefill(("p",), n)
            seconds.append(time.perf_counter() - started)
            await self._engine.release(["p"])
        return Measurement.of("prefill", n, seconds, threads=self._threads)

    async def _measure_decode(self, context: int, batch: int, repetitions: int) -> Measurement:
        names = tuple(f"d{i}" for i in range(batch))
        seconds = []
        for _ in range(repetitions):
            tokens = await self._prefill(names, context)
            started = time.perf_counter()
            for step in range(DECODED_TOKENS):
                parts = [(name, context + step, 1) for name in names]
                tokens = await self._step(parts, tokens, sample=True)
            seconds.append(time.perf_counter() - started)
            await self._engine.release(names)
        return Measurement.of(
            "decode", DECODED_TOKENS, seconds, context=context, batch=batch, threads=self._threads
        )

    async def _prefill(self, names: tuple[str, ...], n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns the token that follows each of the prompts."""
        chunk = self._engine.prompt_chunk
        sampled = []
        for number, name in enumerate(names):
            tokens = random_tokens(n, self._vocabulary, number)
            for start in range(0, n, chunk):
                ids = tokens[start : start + chunk]
                part, is_end = (name, start, len(ids)), start + len(ids) == n
                sampled.append(await self._step([part], ids, sample=is_end))
        return np.concatenate(sampled)

    async def _step(
        self,
        parts: list[tuple[str, int, int]],
        token_ids: np.ndarray[Any, np.dtype[np.int32]],
        *,
        sample: bool,
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Returns the tokens that were sampled: an engine may have begun the step that they are the
        input of."""
        sampling = GREEDY if sample else None
        slices = tuple(Slice(name, start, length, sampling) for name, start, length in parts)
        output = await self._engine.forward(self._shard, ForwardBatch(slices, token_ids), None)
        return np.array([token.token_id for token in output.tokens], np.int32)


def random_tokens(count: int, vocabulary: int, number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [count]: ids below `vocabulary`, others for each `number`. From few ids, or the same
    for all sequences, a mixture's router would choose few experts."""
    rng = np.random.default_rng((count, number))
    return rng.integers(3, vocabulary, count).astype(np.int32)


def resident_bytes() -> int:
    """Memory this process holds."""
    return int(psutil.Process().memory_info().rss)


def read_bandwidth(read_all: Callable[[Any], int], size: int = 1 << 29) -> float:
    """Bytes a second at which `read_all` reads a buffer far larger than the caches."""
    buffer = np.ones(size, np.uint8)
    best = 0.0
    for _ in range(4):
        started = time.perf_counter()
        read_all(buffer)
        best = max(best, size / (time.perf_counter() - started))
    return best
