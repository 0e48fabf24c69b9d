"""The MLX engine: any architecture mlx-lm has, by layer range. Metal, CUDA, or CPU."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import psutil

from exo.inference.batch import PAGE_TOKENS, CacheRoom, ForwardBatch, Slice
from exo.inference.engine import InferenceEngine, OnProgress
from exo.inference.mlx import caches as kv
from exo.inference.mlx import cuda, cuda_linear
from exo.inference.mlx.host_linear import (
    dense_bytes,
    forget,
    move_to_host,
    move_to_host_when_called,
)
from exo.inference.mlx.sequences import ShardSequences
from exo.inference.mlx.steps import ShardSteps
from exo.inference.mlx.together import Together, works
from exo.models.description import (
    ModelDescription,
    describe_checkpoint,
    spare_tensors,
)
from exo.models.tensor_table import all_tensors, is_gguf
from exo.shard import Shard

if TYPE_CHECKING:
    from exo.inference.mlx.cut_model import CutModel

logger = logging.getLogger(__name__)

DENSE_MEMORY_SHARE = 0.5
"""Share of the free memory that float32 copies of a shard's weights may take on a CPU. Larger
shards keep their packed weights and MLX's own, slower, kernels."""


@dataclass(frozen=True)
class _Probed:
    """Matrices by which the rate is measured: together more than caches hold."""

    rows: int
    cols: int
    count: int


PROBED_ON_CPU = _Probed(16384, 1024, 1)
PROBED_ON_GPU = _Probed(14336, 4096, 12)
"""Of the shape that an 8B model has: a GPU reads larger ones faster."""

GPU_CHUNK = 2048
"""Tokens of a prompt that fill a GPU, as mlx-lm's own `prefill_step_size`."""

_CANNOT = (ValueError, TypeError, AttributeError, IndexError, RuntimeError)
"""What mlx-lm's classes raise where they cannot compute with keys and values of 8 bits: for heads
that are no multiple of 64 wide, and where they look into them themselves."""

KV_STEP = 256
"""Tokens for which mlx-lm's caches take memory at a time."""


@dataclass
class _Loaded:
    """One checkpoint and the live shards of it, which share the layers they have in common."""

    model: CutModel
    shards: set[Shard] = field(default_factory=set)
    in_memory: set[int] = field(default_factory=set)
    steps: dict[Shard, ShardSteps] = field(default_factory=dict)
    """Of the shards that compute; others only stand by."""


class MLXEngine(InferenceEngine):
    """Each chunk of a prompt runs through mlx-lm's model on its own prompt cache, and sequences
    that decode run together where the model's class can do that; the graphs are built first and
    evaluated at once. In company a sequence's numbers are rounded otherwise than alone.

    On a CPU, `packed_linears` gives quantized linear layers to the cpu engine's kernels; without,
    everything is float32 and this engine is what the other is measured against."""

    name = "mlx"

    def __init__(
        self,
        *,
        packed_linears: bool = False,
        precise: bool = False,
        kernels: Path | None = None,
        looks_ahead: bool | None = None,
    ) -> None:
        """`precise`: float32 on a GPU too. `kernels`: where those that are compiled for this
        machine's GPU are kept. `looks_ahead`: begin a step before it is asked for; None: on a
        GPU."""
        super().__init__()
        self._packed_linears = packed_linears
        self._on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self._on_cuda = cuda.is_used()
        self._looks_ahead = not self._on_cpu if looks_ahead is None else looks_ahead
        if not self._on_cpu:
            self.prompt_chunk = GPU_CHUNK
        # float16 products on a CPU are 30 times slower than float32 ones.
        self._dtype = mx.float32 if self._on_cpu or precise else None
        if precise:
            os.environ.setdefault("MLX_ENABLE_TF32", "0")  # 10 bits of a float's 23
        if self._on_cuda and kernels is not None:
            cuda.keep_kernels(kernels)
        self._loaded: dict[str, _Loaded] = {}

    def describe_model(self, model_id: str, path: Path) -> ModelDescription:
        model = self._cut_model(path)
        found = describe_checkpoint(model_id, path, model.n_layers)
        layers = found.layer_bytes
        if model.is_repacked:
            in_memory = [model.parameter_bytes(i) + found.kv_bytes for i in range(model.n_layers)]
            layers = tuple(map(max, layers, in_memory))
        return replace(found, layer_bytes=layers, cuts=model.cuts, uncuttable=model.uncuttable)

    def _cut_model(self, path: Path, absent: frozenset[str] | None = None) -> CutModel:
        # mlx-lm brings transformers along: a second that a node's start need not wait for.
        from exo.inference.mlx.cut_model import CutModel

        return CutModel(path, self._dtype, absent)

    def tensors_of_shard(self, shard: Shard, path: Path) -> frozenset[str]:
        """Names only suggest which tensors a shard can do without: a class may put them together as
        it likes. Its own lazy graph decides."""
        start, end = shard.start_layer, shard.end_layer
        names = frozenset(all_tensors(path))
        bold, careful = spare_tensors(names, start, end, shard.n_layers)
        if is_gguf(path):
            return names - careful  # all that belongs to no layer is read: `CutModel.read_outer`
        for spare in (bold, careful):
            if not spare or not self._cut_model(path, spare).needs_absent(start, end):
                return names - spare
        return names

    def load_shard(self, shard: Shard, path: Path, on_progress: OnProgress) -> None:
        loaded, missing = self._begun(shard, path)
        try:
            self._read_layers(loaded.model, missing, on_progress)
            page_bytes = self._page_bytes(shard, loaded.model)
            if self._on_cuda:
                self._make_ready(shard, loaded.model)
            pages = self.cache_bytes("cuda" if self._on_cuda else "cpu") // page_bytes
            together = None
            if works(loaded.model, shard.start_layer, shard.end_layer):
                used = loaded.model.used_leaves(shard.start_layer, shard.end_layer)
                together = Together(used)
            sequences = ShardSequences(loaded.model, together, pages, page_bytes)
            loaded.steps[shard] = ShardSteps(
                shard, loaded.model, sequences, looks_ahead=self._looks_ahead
            )
        except BaseException:
            self.unload_shard(shard)
            raise

    def hold_shard(self, shard: Shard, path: Path) -> None:
        loaded, missing = self._begun(shard, path)
        try:
            self._read_layers(loaded.model, missing, lambda done, total: None)
        except BaseException:
            self.unload_shard(shard)
            raise

    def _begun(self, shard: Shard, path: Path) -> tuple[_Loaded, list[int]]:
        """The shard's model, and which of its layers are to be read."""
        loaded = self._loaded.get(shard.model_id)
        if loaded is None:
            loaded = self._loaded[shard.model_id] = _Loaded(self._cut_model(path))
            loaded.model.kv_bits = self.kv_bits
        else:
            loaded.model.reopen(path, loaded.in_memory)
        wanted = set(range(shard.start_layer, shard.end_layer))
        missing = sorted(wanted - loaded.in_memory)
        loaded.shards.add(shard)
        loaded.in_memory |= wanted
        return loaded, missing

    def _read_layers(self, model: CutModel, missing: list[int], on_progress: OnProgress) -> None:
        total = sum(model.parameter_bytes(index) for index in missing)
        done = 0
        on_progress(done, total)
        dense = self._on_cpu and self._dense_fits(model, missing)
        packed = self._on_cpu and self._packed_linears
        twin = None
        if missing and (dense or packed):
            for module in model.outer_modules():
                move_to_host_when_called(module, packed=packed, dense=dense)
            twin, _ = model.build()
        for index in missing:
            model.read_layer(index, twin)
            if twin is not None:
                move_to_host(model.layers[index], twin.layers[index], packed=packed, dense=dense)
                model.keep_of_twin(index, twin)
                twin.layers[index].clear()
            else:
                mx.eval(model.layers[index].parameters())
            done += model.parameter_bytes(index)
            on_progress(done, total)

    def _dense_fits(self, model: CutModel, missing: list[int]) -> bool:
        """Whether memory has room for float32 copies of what BLAS would compute."""
        layers = [model.layers[index] for index in missing]
        need = sum(dense_bytes(layer, packed=self._packed_linears) for layer in layers)
        free = psutil.virtual_memory().available
        if need > DENSE_MEMORY_SHARE * free:
            logger.info("weights stay packed: %d bytes as float32, %d free", need, free)
            return False
        return True

    def _page_bytes(self, shard: Shard, model: CutModel) -> int:
        """That a page of its KV cache takes. Keys and values are kept as bytes where that is wished
        and where mlx-lm's class can compute with such."""
        try:
            return self._read_the_rest(shard, model)
        except _CANNOT as error:
            if model.kv_bits != 8:
                raise
            logger.warning("%s keeps 16 bits in its KV cache: %s", shard.model_id, error)
            model.kv_bits = 16
            return self._read_the_rest(shard, model)

    def _read_the_rest(self, shard: Shard, model: CutModel) -> int:
        """A first token brings in what of embedding, norms and head this shard uses. The bytes that
        a page of its KV cache takes; windows and states, which do not grow, count as if they did.
        """
        if shard.is_first or shard.is_last:
            model.read_outer()
        caches = self._prompt(shard, model, 1)
        allocated = sum(array.nbytes for array in kv.arrays(caches))
        return max(1, allocated * PAGE_TOKENS // KV_STEP)

    def _prompt(self, shard: Shard, model: CutModel, tokens: int) -> list[Any]:
        """Compute one of so many tokens; the caches it filled."""
        rows = None
        if not shard.is_first:
            rows = mx.zeros((tokens, model.boundaries[shard.start_layer - 1].features))
        ids, caches = mx.zeros((tokens,), mx.int32), model.new_caches()
        mx.eval(model.forward(shard.start_layer, shard.end_layer, ids, rows, caches, logits=1))
        return caches

    def _make_ready(self, shard: Shard, model: CutModel) -> None:
        """What the first prompts would wait for, and products as fast as they can be."""
        layers = model.layers[shard.start_layer : shard.end_layer]
        modules = [module for layer in layers for module in layer.modules()]
        with cuda.who_waits_is_told():
            cuda_linear.multiply_fast(
                modules + model.outer_modules(), partial(self._prompt, shard, model, 1)
            )
            for rows in cuda.COMPILED_ROWS:
                self._prompt(shard, model, rows)
        mx.clear_cache()

    def unload_shard(self, shard: Shard) -> None:
        loaded = self._loaded.get(shard.model_id)
        if loaded is None:
            return
        loaded.shards.discard(shard)
        loaded.steps.pop(shard, None)
        if not loaded.shards:
            del self._loaded[shard.model_id]
            mx.clear_cache()
            return
        needed = {i for s in loaded.shards for i in range(s.start_layer, s.end_layer)}
        gone = loaded.in_memory - needed
        for index in gone:
            forget(loaded.model.layers[index])
        loaded.model.drop_layers(gone)
        loaded.in_memory = needed
        mx.clear_cache()

    def compute(
        self, shard: Shard, batch: ForwardBatch, hidden_states: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any]:
        return self._steps_of(shard).compute(batch, hidden_states)

    def measure_read_rate(self) -> float:
        """By products of one row with a packed matrix, which is what decoding consists of."""
        probed = PROBED_ON_CPU if self._on_cpu else PROBED_ON_GPU
        dense = mx.zeros((probed.rows, probed.cols), mx.float16)
        matrices = [mx.quantize(dense + i, group_size=64, bits=4) for i in range(probed.count)]
        mx.eval(matrices)
        x = mx.zeros((1, probed.cols), mx.float32 if self._on_cpu else mx.float16)
        best_s = float("inf")
        for _ in range(6):
            begun = time.perf_counter()
            products = [mx.quantized_matmul(x, *m, group_size=64, bits=4) for m in matrices * 2]
            mx.eval(products)
            best_s = min(best_s, time.perf_counter() - begun)
        return 2 * sum(part.nbytes for matrix in matrices for part in matrix) / best_s

    def final_states(self, shard: Shard) -> npt.NDArray[np.float32]:
        return self._steps_of(shard).final_states()

    async def close(self) -> None:
        self._thread.close(_end_thread)

    def take_over(self, shard: Shard, part: Slice) -> None:
        self._steps_of(shard).sequences.take_over(part)

    def cache_room(self, shard: Shard) -> CacheRoom:
        return self._steps_of(shard).sequences.room()

    def release_sequences(self, sequence_ids: Sequence[str]) -> None:
        for loaded in self._loaded.values():
            for steps in loaded.steps.values():
                steps.sequences.release(sequence_ids)
        if self.sequence_count == 0:
            mx.clear_cache()

    @property
    def sequence_count(self) -> int:
        """Sequences that still have a KV cache here, each counted for every shard of it."""
        steps = [steps for one in self._loaded.values() for steps in one.steps.values()]
        return sum(len(each.sequences) for each in steps)

    def _steps_of(self, shard: Shard) -> ShardSteps:
        return self._loaded[shard.model_id].steps[shard]


def _end_thread() -> None:
    """A process that ends while something is computed is aborted, and so is one whose thread has a
    state of MLX's that wants the interpreter's lock when the interpreter is gone."""
    mx.synchronize()
    mx.clear_streams()
