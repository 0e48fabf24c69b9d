"""A shard of a checkpoint as the native model: tensors found, packed, put in their places."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.canonical import CanonicalCheckpoint
from exo.inference.cpu.cold_experts import ColdExperts
from exo.inference.cpu.families.architecture import Architecture, architecture
from exo.inference.cpu.families.rope import RopeTable
from exo.inference.cpu.file_guard import FileGuard
from exo.inference.cpu.layers import alt_up, hyper, token_input
from exo.inference.cpu.layers.layer import (
    build_layer,
    check_experts_of_layer,
    check_table_of_layer,
    expert_reader,
    expert_tensors_of_layer,
    tensors_of_layer,
    tensors_read_later,
    unread_tensors,
)
from exo.inference.cpu.packing import DTYPES, GGML, OnBytes, Packer, as_list, norm
from exo.inference.cpu.quantization import Quantization
from exo.models.checkpoint import INTEGERS, Checkpoint
from exo.models.description import read_config, text_config
from exo.models.hadamard import Hadamard
from exo.models.prism import PACK, check_all_turned, config_of_pack
from exo.models.quantizers import NVFP4, quantizer_of


class CheckpointModel:
    """One checkpoint and what of it is in memory, shared by all shards built from it.

    Raises:
        ModelUnsupported: the cpu engine cannot run the checkpoint; the message says why.
    """

    def __init__(self, path: Path) -> None:
        config = read_config(path)
        if config["model_type"] == PACK:
            config = config_of_pack(config, path)
        self.architecture: Architecture = architecture(config)
        self._quantization = Quantization.of(config)
        self._quantizer = quantizer_of(text_config(config))
        self._hadamard = hadamard = Hadamard.of(config)
        self._turning: native.Hadamard | None = None
        if hadamard is not None:
            signs = {width: as_list(own) for width, own in hadamard.signs.items()}
            self._turning = native.Hadamard(hadamard.block, signs)
        self._config = config
        self.path = path  # may be set anew: to where more of its files are
        self._layers: dict[int, native.Layer] = {}
        self._matrices: dict[str, native.Matrix] = {}
        self._cold = ColdExperts()
        ropes = {rope for rope in self.architecture.ropes if rope is not None}
        self._ropes = sorted(ropes, key=lambda rope: rope.frequencies)
        with self._opened() as checkpoint:
            self.tied = self._is_tied(checkpoint)
            self._check(checkpoint)
            layers = range(self.architecture.n_layers)
            self.expert_bytes = tuple(self._expert_bytes(checkpoint, layer) for layer in layers)
            """Of each layer, what experts take that only some tokens go through."""
            self.table_bytes = sum(map(checkpoint.nbytes, self._read_later(checkpoint, layers)))
            """What stays on disk, and rows of it are read."""

    def bytes_of_a_token(self) -> int:
        """Of the checkpoint's bytes, those that decoding one token reads: of a table no more than a
        row, so none, and of experts those it is routed to."""
        arch = self.architecture
        layers = range(arch.n_layers)
        looked_up = {token_input.EMBEDDING} | (set() if self.tied else {"model.embed_tokens"})
        modules = [m for m in self._outer_modules(0, arch.n_layers) if m not in looked_up]
        with self._opened() as checkpoint:
            always = self._tensors_of(checkpoint, layers, modules, arch.n_layers, False)
            routed = (
                name
                for index in layers
                for name in expert_tensors_of_layer(arch, checkpoint, index)
            )
            read, of_experts = (sum(map(checkpoint.nbytes, names)) for names in (always, routed))
        return read + of_experts * arch.experts_per_token // max(arch.expert_count, 1)

    @contextmanager
    def _opened(self) -> Iterator[CanonicalCheckpoint]:
        guard = FileGuard()
        try:
            with Checkpoint(self.path, guard.add) as checkpoint:
                yield self._canonical(checkpoint, guard)
        finally:
            guard.close()

    def _canonical(self, checkpoint: Checkpoint, guard: FileGuard) -> CanonicalCheckpoint:
        arch = self.architecture
        return CanonicalCheckpoint(
            checkpoint, arch.family.renames, arch.guessing_layers, self._quantizer, guard.check
        )

    def _lasting_packer(self) -> Packer:
        """For experts that are read later: files stay open, also when they have other names."""
        guard = FileGuard()
        checkpoint = Checkpoint(self.path, guard.add)
        weakref.finalize(checkpoint, guard.close)
        return self._packer(self._canonical(checkpoint, guard), lambda count: None)

    def _packer(self, checkpoint: CanonicalCheckpoint, on_bytes: OnBytes) -> Packer:
        factors = self.architecture.raw_factors if checkpoint.is_raw else {}
        return Packer(checkpoint, self._quantization, factors, on_bytes, self._turning)

    def build(
        self,
        start: int,
        end: int,
        on_progress: Callable[[int, int], None],
        *,
        precise: bool,
        kv_bits: int = 16,
        cache_limit: Callable[[], int],
        expert_share: float = 1.0,
    ) -> native.Model:
        """The shard of layers [start, end), reading and packing what is not in memory yet.
        `on_progress` is called with (bytes read, bytes to read); `cache_limit`, when all is in
        memory, gives the bytes that the KV cache may grow to. Of the experts' bytes only
        `expert_share` is to be in memory at once; where it is below 1 they are read as they are
        asked for."""
        arch = self.architecture
        with self._opened() as checkpoint:
            cold = self._cold if expert_share < 1 else None
            total, done = self._missing_bytes(checkpoint, start, end, cold is None), 0
            on_progress(0, total)

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                on_progress(done, total)

            packer = self._packer(checkpoint, on_bytes)
            lasting = self._lasting_packer() if cold else None
            missing = [index for index in range(start, end) if index not in self._layers]
            for position, index in enumerate(missing):
                for following in missing[position + 1 : position + 2]:
                    for name in tensors_of_layer(arch, checkpoint, following, cold is None):
                        checkpoint.read_ahead(name)
                rope = arch.ropes[index]
                place = -1 if rope is None else self._ropes.index(rope)
                layer = build_layer(arch, packer, index, place, self._lasting_packer)
                if index in arch.expert_layers:
                    if cold and lasting:
                        reader = expert_reader(arch, lasting, index)
                        cold.add(index, layer, reader, self.expert_bytes[index])
                    else:
                        reader = expert_reader(arch, packer, index)
                        layer.experts = [reader.pack(i) for i in range(arch.expert_count)]
                checkpoint.check()
                self._layers[index] = layer
            self._cold.set_share(expert_share)
            for module in self._outer_modules(start, end):
                if module not in self._matrices:
                    matrix = packer.matrix(module)
                    checkpoint.check()
                    self._matrices[module] = matrix
            model = native.Model(self._spec(precise, kv_bits, cache_limit()))
            model.ropes = [_native_rope(rope) for rope in self._ropes]
            if self._hadamard is not None and self._turning is not None:
                model.set_hadamard(self._turning, self._hadamard.embedding)
            model.layers = [self._layers[index] for index in range(start, end)] * arch.loops
            if arch.loops > 1 and arch.norms_loops:
                model.norm_every = arch.n_layers
            if start == 0:
                model.embedding = self._matrices["model.embed_tokens"]
                if arch.family.embedding_norm:
                    model.embedding_norm = [1.0] * arch.hidden
                if arch.token_input_dim:
                    outer = (token_input.EMBEDDING, token_input.PROJECTION)
                    model.token_inputs = token_input.build_inputs(
                        arch, packer, *(self._matrices[module] for module in outer)
                    )
                if arch.alt_up:
                    model.streams = alt_up.build_streams(arch, self._matrices.__getitem__)
            if end == arch.n_layers:
                model.head = self._matrices["model.embed_tokens" if self.tied else "lm_head"]
                if arch.ends_in_norm:
                    model.final_norm = norm(
                        arch.family, packer, "model.norm.weight", arch.family.final_norm_offset
                    )
                if "model.norm.bias" in self._ending(checkpoint):
                    model.final_norm_bias = as_list(packer.floats("model.norm.bias"))
                if arch.hyper and (last := hyper.build_last(packer, arch.hyper)):
                    model.last_streams = last
            checkpoint.check()
            try:
                model.check_sizes()
            except ValueError as error:
                text = "is not what its config.json describes"
                raise ModelUnsupported(f"the checkpoint in {self.path} {text}: {error}") from error
            on_progress(total, total)
        return model

    @property
    def experts_read(self) -> int:
        """Experts that were read when steps asked for them, so far."""
        return self._cold.memory.packed

    @property
    def experts_to_come(self) -> int:
        """Bytes of experts that are not in memory yet and may come."""
        return self._cold.to_come

    def tensors_of(self, start: int, end: int) -> frozenset[str]:
        """Names of the tensors that layers [start, end) read."""
        with self._opened() as checkpoint:
            layers, modules = range(start, end), self._outer_modules(start, end)
            names = [
                *self._tensors_of(checkpoint, layers, modules, end),
                *self._read_later(checkpoint, layers),
            ]
            return frozenset(map(checkpoint.own_name, names))

    def keep_only(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Forget what no shard of these layer ranges uses."""
        kept = list(ranges)
        layers = {index for start, end in kept for index in range(start, end)}
        modules = {module for start, end in kept for module in self._outer_modules(start, end)}
        self._layers = {i: layer for i, layer in self._layers.items() if i in layers}
        self._cold.keep_only(layers)
        self._matrices = {m: matrix for m, matrix in self._matrices.items() if m in modules}

    def _outer_modules(self, start: int, end: int) -> list[str]:
        """What a shard needs besides its layers."""
        first, last = start == 0, end == self.architecture.n_layers
        embedding = ["model.embed_tokens"] if first or (last and self.tied) else []
        if first and self.architecture.token_input_dim:
            embedding += [token_input.EMBEDDING, token_input.PROJECTION]
        if first:
            embedding += alt_up.modules(self.architecture)
        return embedding + (["lm_head"] if last and not self.tied else [])

    def _missing_bytes(
        self, checkpoint: CanonicalCheckpoint, start: int, end: int, with_experts: bool
    ) -> int:
        layers = [i for i in range(start, end) if i not in self._layers]
        modules = [m for m in self._outer_modules(start, end) if m not in self._matrices]
        names = self._tensors_of(checkpoint, layers, modules, end, with_experts)
        return sum(map(checkpoint.nbytes, names))

    def _tensors_of(
        self,
        checkpoint: CanonicalCheckpoint,
        layers: Iterable[int],
        modules: Iterable[str],
        end: int,
        with_experts: bool = True,
    ) -> Iterator[str]:
        """Of these layers and outer modules, and what comes before the head where `end` is the
        model's."""
        for index in layers:
            yield from tensors_of_layer(self.architecture, checkpoint, index, with_experts)
        for module in modules:
            yield from checkpoint.parts(module)
            if module == token_input.PROJECTION:
                yield token_input.NORM
        if end == self.architecture.n_layers:
            yield from self._ending(checkpoint)

    def _read_later(self, checkpoint: CanonicalCheckpoint, layers: Iterable[int]) -> Iterator[str]:
        for index in layers:
            yield from tensors_read_later(self.architecture, checkpoint, index)

    def _ending(self, checkpoint: CanonicalCheckpoint) -> list[str]:
        """What comes after the last layer and is no matrix."""
        arch = self.architecture
        has_bias = arch.family.layer_norm and "model.norm.bias" in checkpoint
        found = ["model.norm.weight"] if arch.ends_in_norm else []
        if has_bias:
            found.append("model.norm.bias")
        return [*found, *(hyper.last_tensors(checkpoint, arch.hyper) if arch.hyper else [])]

    def _spec(self, precise: bool, kv_bits: int, cache_limit_bytes: int) -> native.Spec:
        arch = self.architecture
        spec = native.Spec()
        spec.hidden, spec.heads = arch.hidden, arch.heads
        spec.kv_heads, spec.head_dim = arch.kv_heads, arch.head_dim
        spec.layer_norm, spec.norm_eps = arch.layer_norm, arch.norm_eps
        spec.after_norm_eps = arch.after_norm_eps
        spec.attention_scale = arch.attention_scale
        spec.attention_soft_cap = arch.attention_soft_cap
        spec.activation = native.Activation[arch.family.activation]
        spec.embedding_scale = arch.embedding_scale
        spec.residual_scale = arch.residual_scale
        spec.logits_scale = arch.logits_scale
        spec.logits_soft_cap = arch.logits_soft_cap
        spec.experts_per_token = arch.experts_per_token
        spec.routing = native.Routing[arch.routing]
        spec.expert_scale, spec.expert_band = arch.expert_scale, arch.expert_band
        experts = arch.family.experts
        spec.weighs_inputs = experts is not None and experts.weighs_inputs
        spec.limits_inputs = arch.family.limits_inputs
        if (sizes := arch.hyper) is not None:
            spec.streams, spec.sinkhorn_rounds = sizes.streams, sizes.rounds
            spec.stream_eps, spec.stream_least = sizes.eps, sizes.least
            spec.stream_magnitude = sizes.magnitude
        groups, chosen, judged = arch.expert_groups
        spec.expert_groups, spec.groups_per_token = groups, chosen
        spec.judged_per_group = judged
        spec.precise = precise
        # Where all else is float32, a float16 cache would be what is inexact.
        spec.kv_bits = 32 if precise or (self.is_float32 and kv_bits == 16) else kv_bits
        spec.cache_limit_bytes = cache_limit_bytes
        return spec

    def _is_tied(self, checkpoint: CanonicalCheckpoint) -> bool:
        if self.architecture.tied is None:
            return "lm_head.weight" not in checkpoint
        return self.architecture.tied

    def _check(self, checkpoint: CanonicalCheckpoint) -> None:
        """Every tensor known and none missing, and of a type the kernels read: a wrong token is
        worse than a slower engine."""
        arch = self.architecture
        for heads, (kv_heads, _) in zip(arch.query_heads, arch.head_shapes, strict=True):
            if heads % kv_heads:
                raise ModelUnsupported(f"{heads} heads over {kv_heads} KV heads")
        of_some_rows = any(not isinstance(factor, float) for factor in arch.raw_factors.values())
        if of_some_rows and checkpoint.is_raw and isinstance(self._quantizer, NVFP4):
            raise ModelUnsupported("factors for some rows of NVFP4 weights, of one scale each")
        scales = [name for name in checkpoint.names() if name.endswith(".scales")]
        packed = (checkpoint.own_module(name.removesuffix(".scales")) for name in scales)
        check_all_turned(self._config, (f"{module}.weight" for module in packed))
        layers = range(arch.n_layers)
        known = set(
            self._tensors_of(checkpoint, layers, self._outer_modules(0, len(layers)), len(layers))
        )
        known |= set(self._read_later(checkpoint, layers))
        if "lm_head.weight" in checkpoint:
            known |= set(checkpoint.parts("lm_head"))
        unread = {name for i in layers for name in unread_tensors(arch, checkpoint, i)}
        if self._hadamard is not None:  # which has them
            unread |= {name for name in checkpoint.names() if name.endswith(".signs")}
        names = set(checkpoint.names()) - unread
        if missing := known - names:
            raise ModelUnsupported(f"the checkpoint has no tensor {min(missing)}")
        if unknown := names - known:
            name = checkpoint.own_name(min(unknown))
            raise ModelUnsupported(f"the cpu engine does not know the tensor {name}")
        for index in arch.expert_layers:
            check_experts_of_layer(arch, checkpoint, index)
        for index in layers:
            check_table_of_layer(arch, checkpoint, index)
        for name in known:
            dtype = checkpoint.dtype(name)
            is_known = dtype in DTYPES or dtype in GGML or dtype in ("U32", "I32")
            module, _, part = name.rpartition(".")
            if self._quantizer is not None and checkpoint.is_packed(module):
                is_known = dtype in DTYPES or dtype in INTEGERS
                if part == "weight":
                    self._quantizer.check(module, checkpoint.shapes(module))
            elif part.endswith(("_blocks", "_scales")):
                is_known = dtype == "U8"
            elif part == "scales":
                words = checkpoint.shape(f"{module}.weight")[-1]
                own, groups = checkpoint.own_module(module), checkpoint.shape(name)[-1]
                how = self._quantization.of_module(own, words, groups)
                is_known = dtype in DTYPES if how.mode == "affine" else dtype == "U8"
            if not is_known:
                raise ModelUnsupported(f"tensor {name} is of type {dtype}")
        self.is_float32 = all(checkpoint.dtype(name) in ("F32", "I32") for name in known)

    def _expert_bytes(self, checkpoint: CanonicalCheckpoint, index: int) -> int:
        """Of a layer; 0 where one expert cannot be read without the others."""
        names = list(expert_tensors_of_layer(self.architecture, checkpoint, index))
        is_single = any(".experts.0." in name for name in names)
        if self._quantizer is not None and not is_single:
            return 0  # its stacks are unpacked as a whole
        return sum(map(checkpoint.nbytes, names))


def _native_rope(table: RopeTable) -> native.Rope:
    rope = native.Rope()
    rope.frequencies = list(table.frequencies)
    rope.scale, rope.interleaved = table.scale, table.interleaved
    return rope
