"""A shard of a checkpoint as the native model: tensors found, packed, put in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exo.errors import ModelUnsupported
from exo.inference.cpu import _native as native
from exo.inference.cpu.families import Architecture, architecture
from exo.models.checkpoint import Checkpoint, Tensor
from exo.models.description import read_config

_DTYPES = {"F32": native.DType.F32, "F16": native.DType.F16, "BF16": native.DType.BF16}
_GGML = native.ggml_formats()
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_USUAL_GROUP = {"affine": 64, "mxfp4": 32}
_IGNORED = ("rotary_emb.inv_freq",)

OnBytes = Callable[[int], None]


class Packing(NamedTuple):
    """How MLX stored a module's weights: `mode` as in `mx.quantize`."""

    mode: str
    bits: int
    group: int


@dataclass(frozen=True)
class Quantization:
    """How MLX quantized the checkpoint: for all modules, and for some by their path."""

    config: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Quantization:
        return cls(config.get("quantization") or config.get("quantization_config") or {})

    def of_module(self, path: str, words: int, groups: int) -> Packing:
        """Of a module whose rows are `words` 32-bit words and `groups` scales. As in mlx-lm, the
        bits follow from these, the rest from the config.

        Raises:
            ModelUnsupported: a kind of quantization the kernels do not have.
        """
        own = self.config.get(path)
        chosen = own if isinstance(own, Mapping) else self.config
        mode = str(chosen.get("mode", "affine"))
        group = int(chosen.get("group_size") or _USUAL_GROUP.get(mode, 0))
        bits = 32 * words / (groups * group) if group else 0
        is_affine = mode == "affine" and bits in _BITS and group in _GROUPS
        if not is_affine and (mode, bits, group) != ("mxfp4", 4, 32):
            raise ModelUnsupported(
                f"{path} is quantized as {mode}, {bits:g} bits, groups of {group}; the cpu engine "
                f"has affine, {_BITS} bits, groups of {_GROUPS}, and mxfp4"
            )
        return Packing(mode, int(bits), group)


class CheckpointModel:
    """One checkpoint and what of it is in memory, shared by all shards built from it.

    Raises:
        ModelUnsupported: the cpu engine cannot run the checkpoint; the message says why.
    """

    def __init__(self, path: Path) -> None:
        config = read_config(path)
        self.architecture: Architecture = architecture(config)
        self._quantization = Quantization.of(config)
        self.path = path  # may be set anew: to where more of its files are
        self._layers: dict[int, native.Layer] = {}
        self._matrices: dict[str, native.Matrix] = {}
        ropes = {rope for rope in self.architecture.ropes if rope is not None}
        self._ropes = sorted(ropes, key=lambda rope: rope.frequencies)
        with Checkpoint(path) as checkpoint:
            self.tied = self._is_tied(checkpoint)
            self._check(checkpoint)

    def build(
        self,
        start: int,
        end: int,
        on_progress: Callable[[int, int], None],
        *,
        precise: bool,
        cache_limit: Callable[[], int],
    ) -> native.Model:
        """The shard of layers [start, end), reading and packing what is not in memory yet.
        `on_progress` is called with (bytes read, bytes to read); `cache_limit`, when all is in
        memory, gives the bytes that the KV cache may grow to."""
        arch = self.architecture
        with Checkpoint(self.path) as checkpoint:
            total, done = self._missing_bytes(checkpoint, start, end), 0
            on_progress(0, total)

            def on_bytes(count: int) -> None:
                nonlocal done
                done += count
                on_progress(done, total)

            packer = _Packer(checkpoint, self._quantization, arch, on_bytes)
            missing = [index for index in range(start, end) if index not in self._layers]
            for position, index in enumerate(missing):
                for following in missing[position + 1 : position + 2]:
                    for name in self._tensors_of_layer(checkpoint, following):
                        checkpoint.read_ahead(name)
                rope = arch.ropes[index]
                place = -1 if rope is None else self._ropes.index(rope)
                self._layers[index] = packer.layer(index, place)
            for module in self._outer_modules(start, end):
                if module not in self._matrices:
                    self._matrices[module] = packer.matrix(module)
            model = native.Model(self._spec(precise, cache_limit()))
            model.ropes = [_native_rope(rope) for rope in self._ropes]
            model.layers = [self._layers[index] for index in range(start, end)]
            if start == 0:
                model.embedding = self._matrices["model.embed_tokens"]
            if end == arch.n_layers:
                model.head = self._matrices["model.embed_tokens" if self.tied else "lm_head"]
                model.final_norm = packer.norm("model.norm.weight")
            on_progress(total, total)
        return model

    def tensors_of(self, start: int, end: int) -> frozenset[str]:
        """Names of the tensors that layers [start, end) read."""
        with Checkpoint(self.path) as checkpoint:
            layers, modules = range(start, end), self._outer_modules(start, end)
            return frozenset(self._tensors_of(checkpoint, layers, modules, end))

    def keep_only(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Forget what no shard of these layer ranges uses."""
        kept = list(ranges)
        layers = {index for start, end in kept for index in range(start, end)}
        modules = {module for start, end in kept for module in self._outer_modules(start, end)}
        self._layers = {i: layer for i, layer in self._layers.items() if i in layers}
        self._matrices = {m: matrix for m, matrix in self._matrices.items() if m in modules}

    def _outer_modules(self, start: int, end: int) -> list[str]:
        """What a shard needs besides its layers."""
        first, last = start == 0, end == self.architecture.n_layers
        embedding = ["model.embed_tokens"] if first or (last and self.tied) else []
        return embedding + (["lm_head"] if last and not self.tied else [])

    def _missing_bytes(self, checkpoint: Checkpoint, start: int, end: int) -> int:
        layers = [i for i in range(start, end) if i not in self._layers]
        modules = [m for m in self._outer_modules(start, end) if m not in self._matrices]
        return sum(map(checkpoint.nbytes, self._tensors_of(checkpoint, layers, modules, end)))

    def _tensors_of(
        self, checkpoint: Checkpoint, layers: Iterable[int], modules: Iterable[str], end: int
    ) -> Iterator[str]:
        """Of these layers and outer modules, and of the final norm where `end` is the model's."""
        for index in layers:
            yield from self._tensors_of_layer(checkpoint, index)
        for module in modules:
            yield from _parts(checkpoint, module)
        if end == self.architecture.n_layers:
            yield "model.norm.weight"

    def _spec(self, precise: bool, cache_limit_bytes: int) -> native.Spec:
        arch = self.architecture
        spec = native.Spec()
        spec.hidden, spec.heads = arch.hidden, arch.heads
        spec.kv_heads, spec.head_dim = arch.kv_heads, arch.head_dim
        spec.norm_eps = arch.norm_eps
        spec.attention_scale = arch.attention_scale
        spec.attention_soft_cap = arch.attention_soft_cap
        spec.activation = native.Activation[arch.family.activation]
        spec.embedding_scale = arch.embedding_scale
        spec.residual_scale = arch.residual_scale
        spec.logits_scale = arch.logits_scale
        spec.logits_soft_cap = arch.logits_soft_cap
        spec.experts_per_token = arch.experts_per_token
        spec.routing = native.Routing[arch.routing]
        spec.precise = precise
        # Where all else is float32, a float16 cache would be what is inexact.
        spec.float32_cache = precise or self.is_float32
        spec.cache_limit_bytes = cache_limit_bytes
        return spec

    def _is_tied(self, checkpoint: Checkpoint) -> bool:
        if self.architecture.tied is None:
            return "lm_head.weight" not in checkpoint
        return self.architecture.tied

    def _check(self, checkpoint: Checkpoint) -> None:
        """Every tensor known and none missing, and of a type the kernels read: a wrong token is
        worse than a slower engine."""
        arch = self.architecture
        if arch.heads % arch.kv_heads:
            raise ModelUnsupported(f"{arch.heads} heads over {arch.kv_heads} KV heads")
        known = {"model.norm.weight", *_parts(checkpoint, "model.embed_tokens")}
        known |= set(_parts(checkpoint, "lm_head"))
        for index in range(arch.n_layers):
            known |= set(self._tensors_of_layer(checkpoint, index))
        names = {n for n in checkpoint.names() if not n.endswith(_IGNORED)}
        if missing := known - names:
            raise ModelUnsupported(f"the checkpoint has no tensor {min(missing)}")
        if unknown := names - known:
            raise ModelUnsupported(f"the cpu engine does not know the tensor {min(unknown)}")
        if not self.tied and "lm_head.weight" not in checkpoint:
            raise ModelUnsupported("the checkpoint has no tensor lm_head.weight")
        for name in known:
            dtype = checkpoint.dtype(name)
            is_known = dtype in _DTYPES or dtype in _GGML or dtype == "U32"
            if name.endswith(".scales"):
                module = name.removesuffix(".scales")
                words = checkpoint.shape(f"{module}.weight")[-1]
                how = self._quantization.of_module(module, words, checkpoint.shape(name)[-1])
                is_known = dtype == "U8" if how.mode == "mxfp4" else dtype in _DTYPES
            if not is_known:
                raise ModelUnsupported(f"tensor {name} is of type {dtype}")
        self.is_float32 = all(checkpoint.dtype(name) == "F32" for name in known)

    def _tensors_of_layer(self, checkpoint: Checkpoint, index: int) -> Iterator[str]:
        family, prefix = self.architecture.family, f"model.layers.{index}"
        for norm in family.norms.values():
            yield f"{prefix}.{norm}.weight"
        if family.head_norms:
            yield f"{prefix}.self_attn.q_norm.weight"
            yield f"{prefix}.self_attn.k_norm.weight"
        if family.sinks:
            yield f"{prefix}.self_attn.sinks"
        for module in self._modules_of_layer(checkpoint, index):
            yield from _parts(checkpoint, module, required=True)

    def _modules_of_layer(self, checkpoint: Checkpoint, index: int) -> Iterator[str]:
        arch, prefix = self.architecture, f"model.layers.{index}"
        attention = ("qkv_proj",) if arch.family.fused else ("q_proj", "k_proj", "v_proj")
        for name in (*attention, "o_proj"):
            yield f"{prefix}.self_attn.{name}"
        if index in arch.expert_layers:
            experts = arch.family.experts
            assert experts is not None
            yield f"{prefix}.{experts.block}.{experts.router}"
            stacked = f"{prefix}.{experts.block}.{experts.stacked}"
            if f"{stacked}.gate_proj.weight" in checkpoint or not experts.single:
                yield from (f"{stacked}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
            else:
                for expert in range(arch.expert_count):
                    for name in experts.single.values():
                        yield f"{prefix}.{experts.block}.experts.{expert}.{name}"
            return
        mlp = ("gate_up_proj",) if arch.family.fused else ("gate_proj", "up_proj")
        for name in (*mlp, "down_proj"):
            yield f"{prefix}.mlp.{name}"


def _parts(checkpoint: Checkpoint, module: str, *, required: bool = False) -> list[str]:
    names = [f"{module}.{part}" for part in ("weight", "scales", "biases", "bias")]
    found = [name for name in names if name in checkpoint]
    return found or (names[:1] if required else [])


class _Packer:
    """Reads modules of a checkpoint into packed matrices."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: Quantization,
        arch: Architecture,
        on_bytes: OnBytes,
    ) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._arch = arch
        self._on_bytes = on_bytes

    def layer(self, index: int, rope: int) -> native.Layer:
        arch, prefix = self._arch, f"model.layers.{index}"
        layer = native.Layer()
        layer.rope, layer.window = rope, arch.windows[index]
        for place, name in arch.family.norms.items():
            setattr(layer, place, self.norm(f"{prefix}.{name}.weight"))
        attention = f"{prefix}.self_attn"
        if arch.family.head_norms:
            layer.q_norm = self.norm(f"{attention}.q_norm.weight")
            layer.k_norm = self.norm(f"{attention}.k_norm.weight")
        if arch.family.sinks:
            layer.sinks = self._floats(f"{attention}.sinks")
        if arch.family.fused:
            q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
            layer.q, layer.k, layer.v = self.split(f"{attention}.qkv_proj", [q, kv, kv])
        else:
            layer.q = self.matrix(f"{attention}.q_proj")
            layer.k = self.matrix(f"{attention}.k_proj")
            layer.v = self.matrix(f"{attention}.v_proj")
        layer.o = self.matrix(f"{attention}.o_proj")
        if index in arch.expert_layers:
            self._experts(layer, prefix)
        else:
            self._mlp(layer, f"{prefix}.mlp")
        return layer

    def _mlp(self, layer: native.Layer, prefix: str) -> None:
        if self._arch.family.fused:
            rows = self._checkpoint.shape(f"{prefix}.gate_up_proj.weight")[0]
            layer.gate, layer.up = self.split(f"{prefix}.gate_up_proj", [rows // 2] * 2)
        else:
            layer.gate = self.matrix(f"{prefix}.gate_proj")
            layer.up = self.matrix(f"{prefix}.up_proj")
        layer.down = self.matrix(f"{prefix}.down_proj")

    def _experts(self, layer: native.Layer, prefix: str) -> None:
        names = self._arch.family.experts
        assert names is not None
        block = f"{prefix}.{names.block}"
        layer.router = self.matrix(f"{block}.{names.router}")
        stacked = f"{block}.{names.stacked}"
        is_stacked = f"{stacked}.gate_proj.weight" in self._checkpoint
        experts = []
        for index in range(self._arch.expert_count):
            expert = native.Expert()
            for place in ("gate", "up", "down"):
                if is_stacked:
                    matrix = self.matrix(f"{stacked}.{place}_proj", expert=index)
                else:
                    single = names.single[f"{place}_proj"]
                    matrix = self.matrix(f"{block}.experts.{index}.{single}")
                setattr(expert, place, matrix)
            experts.append(expert)
        layer.experts = experts

    def matrix(self, module: str, *, expert: int | None = None) -> native.Matrix:
        """A whole linear layer (or embedding), or one expert of a stack."""
        parts = self._read(module)
        if expert is not None:
            parts = {name: tensor.at(expert) for name, tensor in parts.items()}
        packed = self._pack(module, parts)
        if expert is None or expert == self._arch.expert_count - 1:
            self._done(module)
        return packed

    def split(self, module: str, rows: list[int]) -> list[native.Matrix]:
        """A linear layer whose rows are several, one after the other."""
        parts, packed, start = self._read(module), [], 0
        for count in rows:
            some = {name: tensor.rows(start, start + count) for name, tensor in parts.items()}
            packed.append(self._pack(module, some))
            start += count
        self._done(module)
        return packed

    def norm(self, name: str) -> list[float]:
        weight = self._checkpoint.tensor(name).floats() + np.float32(self._arch.family.norm_offset)
        self._on_bytes(self._checkpoint.nbytes(name))
        return list(weight.tolist())

    def _floats(self, name: str) -> list[float]:
        self._on_bytes(self._checkpoint.nbytes(name))
        return list(self._checkpoint.tensor(name).floats().tolist())

    def _read(self, module: str) -> dict[str, Tensor]:
        names = _parts(self._checkpoint, module, required=True)
        return {name.rpartition(".")[2]: self._checkpoint.tensor(name) for name in names}

    def _pack(self, module: str, parts: dict[str, Tensor]) -> native.Matrix:
        weight = parts["weight"]
        rows = weight.shape[0]
        if "scales" in parts:
            scales = parts["scales"]
            how = self._quantization.of_module(module, weight.shape[1], scales.shape[1])
            cols = weight.shape[1] * 32 // how.bits
            if how.mode == "mxfp4":
                packed = _packed_mxfp4(weight, scales, rows, cols)
            else:
                dtype, offsets = _DTYPES[scales.dtype], parts["biases"].data
                packed = native.pack_affine(
                    weight.data, scales.data, offsets, dtype, rows, cols, how.bits, how.group
                )
        elif weight.dtype in _GGML:
            packed = native.pack_ggml(weight.data, weight.dtype, rows, weight.shape[1])
        else:
            packed = native.pack_dense(weight.data, _DTYPES[weight.dtype], rows, weight.shape[1])
        if "bias" in parts:
            packed.set_bias(parts["bias"].floats().tolist())
        return packed

    def _done(self, module: str) -> None:
        for name in _parts(self._checkpoint, module):
            self._checkpoint.give_back(name)
            self._on_bytes(self._checkpoint.nbytes(name))


def _packed_mxfp4(weight: Tensor, scales: Tensor, rows: int, cols: int) -> native.Matrix:
    """E2M1 values in groups of 32 with a power of two each (OCP Microscaling Formats, 5.3.3). The
    kernels' table holds them doubled, plus 12."""
    powers = np.ldexp(np.float32(1), scales.data.astype(np.int32) - 128)
    halves, offsets = (
        (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        for floats in (powers, np.float32(-12) * powers)
    )
    return native.pack_affine(
        weight.data, halves, offsets, native.DType.BF16, rows, cols, 4, 32, native.Table.E2M1
    )


def _native_rope(table: Any) -> native.Rope:
    rope = native.Rope()
    rope.frequencies = list(table.frequencies)
    rope.scale, rope.interleaved = table.scale, table.interleaved
    return rope
