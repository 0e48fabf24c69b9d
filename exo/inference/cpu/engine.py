"""The cpu engine: exo's own kernels, for the families of families.py; MLX for the rest."""

from __future__ import annotations

import logging
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from exo.errors import CacheMiss, EngineFailed, ModelUnsupported, Overloaded
from exo.inference.batch import CacheRoom, ForwardBatch, Slice
from exo.inference.cpu import _native as native
from exo.inference.cpu.cores import usable_cores
from exo.inference.engine import InferenceEngine, OnProgress
from exo.models.description import ModelDescription, describe_checkpoint
from exo.shard import Shard

if TYPE_CHECKING:
    from exo.inference.cpu.shard_model import CheckpointModel
    from exo.inference.mlx.engine import MLXEngine

logger = logging.getLogger(__name__)


def _checkpoint(path: Path) -> CheckpointModel:
    """Imported late: all the families and layers there are, of which idle nodes need none."""
    from exo.inference.cpu.shard_model import CheckpointModel

    return CheckpointModel(path)


class CPUEngine(InferenceEngine):
    """A step is one call into C++, which computes on `threads` threads with the GIL released.

    Logits are batch-invariant: bit for bit the same whatever else was in the step and however the
    prompt was cut. `precise` keeps activations in float32 instead of 8-bit integers: slower, and
    equal to MLX's float32 up to the order of sums.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None, *, precise: bool = False) -> None:
        super().__init__()
        self._precise = precise
        self._models: dict[Shard, native.Model] = {}
        self._checkpoints: dict[str, CheckpointModel] = {}
        self._on_mlx: set[Shard] = set()
        native.set_threads(threads or usable_cores())
        logger.info("cpu engine: %s kernels on %d threads", native.isa(), native.threads())

    @property
    def kind(self) -> str:
        return f"{self.name} {native.isa()} {native.threads()}"

    @property
    def promised_bytes(self) -> int:
        return sum(checkpoint.experts_to_come for checkpoint in list(self._checkpoints.values()))

    @cached_property
    def _mlx(self) -> MLXEngine:
        from exo.inference.mlx.engine import MLXEngine

        engine = MLXEngine(packed_linears=not self._precise)
        engine.kv_memory, engine.kv_bits = self.kv_memory, self.kv_bits
        return engine

    def describe_model(self, model_id: str, path: Path) -> ModelDescription:
        try:
            checkpoint = _checkpoint(path)
        except ModelUnsupported as error:
            try:
                described = self._mlx.describe_model(model_id, path)
            except ModelUnsupported as other:
                raise ModelUnsupported(f"{error.message}; {other.message}") from other
            logger.warning("%s runs on the MLX engine, slower: %s", model_id, error.message)
            return described
        found, experts = checkpoint.architecture, checkpoint.expert_bytes
        described = describe_checkpoint(model_id, path, found.n_layers)
        if table := checkpoint.table_bytes:  # counted as an embedding, and stays on disk
            described = replace(described, first_bytes=described.first_bytes - table)
        if any(experts):
            described = replace(described, expert_bytes=experts)
        if found.uncuttable:
            return replace(described, cuts=found.cuts, uncuttable=found.uncuttable)
        return described

    def tensors_of_shard(self, shard: Shard, path: Path) -> frozenset[str]:
        try:
            model = _checkpoint(path)
        except ModelUnsupported:
            return self._mlx.tensors_of_shard(shard, path)
        return model.tensors_of(shard.start_layer, shard.end_layer)

    def load_shard(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        if shard.model_id not in self._checkpoints:
            try:
                self._checkpoints[shard.model_id] = _checkpoint(path)
            except ModelUnsupported:
                self._mlx.load_shard(shard, path, on_progress)
                self._on_mlx.add(shard)
                return
        self._checkpoints[shard.model_id].path = path
        try:
            self._models[shard] = self._checkpoints[shard.model_id].build(
                shard.start_layer,
                shard.end_layer,
                on_progress,
                precise=self._precise,
                kv_bits=self.kv_bits,
                cache_limit=lambda: self.cache_bytes("cpu"),
                expert_share=shard.expert_share,
            )
        finally:
            self._forget_unused(shard.model_id)

    def hold_shard(self, shard: Shard, path: Path) -> None:
        if any(other.model_id == shard.model_id for other in self._on_mlx):
            self._mlx.hold_shard(shard, path)
            self._on_mlx.add(shard)
        else:
            super().hold_shard(shard, path)

    def unload_shard(self, shard: Shard) -> None:
        if shard in self._on_mlx:
            self._on_mlx.discard(shard)
            self._mlx.unload_shard(shard)
        elif self._models.pop(shard, None) is not None:
            self._forget_unused(shard.model_id)

    def _forget_unused(self, model_id: str) -> None:
        shards = [shard for shard in self._models if shard.model_id == model_id]
        if shards:
            ranges = [(shard.start_layer, shard.end_layer) for shard in shards]
            self._checkpoints[model_id].keep_only(ranges)
        else:
            self._checkpoints.pop(model_id, None)

    def compute(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        if shard in self._on_mlx:
            return self._mlx.compute(shard, batch, hidden_states)
        slices = [
            native.Slice(part.sequence_id, part.start, part.length, part.logits, part.keeps)
            for part in batch.slices
        ]
        rows = None
        if hidden_states is not None:
            rows = np.ascontiguousarray(hidden_states, np.float32)
        tokens = np.ascontiguousarray(batch.token_ids, np.int32)
        try:
            return self._models[shard].forward(slices, tokens, rows)
        except native.CacheMissError as error:
            raise CacheMiss(str(error)) from error
        except native.CacheFullError as error:
            raise Overloaded(f"{error}; try again when other answers have ended") from error
        except IndexError as error:
            raise EngineFailed(f"the step holds a {error}") from error

    def measure_read_rate(self) -> float:
        """By products of one row with a packed matrix, which is what decoding consists of."""
        rows, cols, group = 32768, 8192, 64  # 151 MB: of half of it a cache of 32 MB holds too much
        scales = np.zeros(rows * (cols // group) * 2, np.uint8)
        values = np.zeros(rows * cols // 2, np.uint8)
        matrix = native.pack_affine(values, scales, scales, native.DType.F16, rows, cols, 4, group)
        x = np.ones((1, cols), np.float32)
        passed: list[float] = []
        alone: list[float] = []  # while nobody else took a core
        computed: list[float] = []
        while len(passed) < 5 or sum(passed) < 0.1:
            others, begun, used = _preemptions(), time.perf_counter(), time.process_time()
            matrix.apply(x)
            passed.append(time.perf_counter() - begun)
            computed.append((time.process_time() - used) / native.threads())
            if _preemptions() == others:
                alone.append(passed[-1])
        # As it does, not as it can. Where others compute too, their share of the time is left out:
        # they may be gone before a model is here, and the steps tell when they are not.
        return matrix.nbytes / statistics.median(alone if len(alone) >= 3 else computed)

    def final_states(self, shard: Shard) -> npt.NDArray[np.float32]:
        if shard in self._on_mlx:
            return self._mlx.final_states(shard)
        return self._models[shard].final_states()

    def take_over(self, shard: Shard, part: Slice) -> None:
        if shard in self._on_mlx:
            self._mlx.take_over(shard, part)
            return
        try:
            self._models[shard].take_over(part.sequence_id, part.takes_over, part.start)
        except native.CacheMissError as error:
            raise CacheMiss(str(error)) from error

    def cache_room(self, shard: Shard) -> CacheRoom:
        if shard in self._on_mlx:
            return self._mlx.cache_room(shard)
        model = self._models[shard]
        pages = model.cache_limit_bytes // model.page_bytes
        state_pages = -(-model.state_bytes // model.page_bytes)
        used = model.cache_pages + model.states * state_pages
        return CacheRoom(pages, used, is_paged=True, state_pages=state_pages)

    def release_sequences(self, sequence_ids: Sequence[str]) -> None:
        for model in self._models.values():
            for sequence_id in sequence_ids:
                model.release(sequence_id)
        if self._on_mlx:
            self._mlx.release_sequences(sequence_ids)

    @property
    def sequence_count(self) -> int:
        """Sequences that still have a KV cache here."""
        return sum(model.sequences for model in self._models.values())


def _preemptions() -> int:
    """How often a core was taken from this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
