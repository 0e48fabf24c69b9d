"""Weights that a GGUF file has in another order, or in other matrices, than mlx-lm's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.models.checkpoint import Tensor
from exo.models.delta_net_rows import Rows, ba_rows, qkvz_rows

Floats = npt.NDArray[np.float32]


class ValueHeads:
    """Of a delta net's value heads llama.cpp's converter puts the first of each key head before the
    second ones (`_LinearAttentionVReorderBase` in its conversion/qwen.py): here they stand one key
    head after the other again, as in mlx-lm."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._width = int(config["linear_value_head_dim"])
        heads = np.arange(config["linear_num_value_heads"])
        self._order = heads.reshape(-1, config["linear_num_key_heads"]).T.reshape(-1)

    def rows(self, tensor: Tensor) -> Tensor:
        """Its last rows are the value heads'."""
        name, heads = tensor.name, len(self._order)
        if name.endswith(".norm.weight"):
            return tensor
        single = name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"))
        width = 1 if single else self._width
        first = tensor.shape[0] - heads * width
        values = first + (self._order[:, None] * width + np.arange(width)).reshape(-1)
        return tensor.take(np.concatenate([np.arange(first), values]))

    def columns(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Numbers, packed words or scales [rows, value heads * as many for each]."""
        split = part.reshape(len(part), len(self._order), -1)
        return np.ascontiguousarray(split[:, self._order].reshape(len(part), -1))


Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Half:
    """Of each expert's rows."""

    index: int

    def shape(self, whole: Shape) -> Shape:
        experts, rows, columns = whole
        return experts, rows // 2, columns

    def of(self, whole: Tensor) -> Tensor:
        return whole.half(self.index)


@dataclass(frozen=True)
class _Some:
    rows: Rows

    def shape(self, whole: Shape) -> Shape:
        return len(self.rows), *whole[1:]

    def of(self, whole: Tensor) -> Tensor:
        return whole.take(self.rows)


Part = _Half | _Some


class JoinedRows:
    """Modules whose rows stand with another's in one tensor of the file: of each expert the gate's,
    then the up's, and a delta net's in files of Qwen3-Next."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._parts: dict[str, dict[str, Part]] = {
            "gate_up_proj": {"gate_proj": _Half(0), "up_proj": _Half(1)}
        }
        if "linear_num_key_heads" in config:
            heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
            dims = config["linear_key_head_dim"], config["linear_value_head_dim"]
            for names, rows in (("qkvz", qkvz_rows(*heads, *dims)), ("ba", ba_rows(*heads))):
                apart = (names[:-1], names[-1])
                self._parts[f"in_proj_{names}"] = {
                    f"in_proj_{name}": _Some(own) for name, own in zip(apart, rows, strict=True)
                }

    def made_of(self, name: str, shape: Shape) -> dict[str, Shape]:
        """The weights that are parts of one in the file, with their shapes; empty: it is wanted as
        it is."""
        prefix, _, module = name.removesuffix(".weight").rpartition(".")
        if module == "gate_up_proj" and len(shape) == 2:
            return {}  # mlx-lm's class has an MLP's joined, too
        parts = self._parts.get(module, {})
        return {f"{prefix}.{own}.weight": part.shape(shape) for own, part in parts.items()}

    def source(self, name: str, is_there: Callable[[str], bool]) -> tuple[str, Part | None]:
        """The tensor that a weight is in, and what it is of that; None: all."""
        prefix, _, module = name.removesuffix(".weight").rpartition(".")
        for joined, parts in self._parts.items():
            stored = f"{prefix}.{joined}.weight"
            if module in parts and not is_there(name) and is_there(stored):
                return stored, parts[module]
        return name, None


_JOINED, _KEYS, _VALUES = "kv_b_proj.weight", "embed_q.weight", "unembed_out.weight"


class LatentHeads:
    """What makes each head's keys and values of a latent: one matrix in files made before May 2025
    and in mlx-lm's DeepSeek V2 and MiniCPM 3, two stacks in all others. Of these the first stands
    with its axes the other way round, so that one is made of the other out of plain numbers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._heads = int(config["num_attention_heads"])
        self._rank = int(config["kv_lora_rank"])
        self._nope, self._value_dim = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
        self._are_wanted_joined = config["model_type"] in ("deepseek_v2", "minicpm3")

    def made_of(self, name: str) -> dict[str, tuple[int, ...]]:
        """The weights that are made of one in the file, with their shapes; empty: it is wanted as
        it is."""
        module, _, weight = name.rpartition("self_attn.")
        if self._are_wanted_joined and weight in (_KEYS, _VALUES):
            rows = self._heads * (self._nope + self._value_dim)
            return {f"{module}self_attn.{_JOINED}": (rows, self._rank)}
        if not self._are_wanted_joined and weight == _JOINED:
            return {
                f"{module}self_attn.{_KEYS}": (self._heads, self._rank, self._nope),
                f"{module}self_attn.{_VALUES}": (self._heads, self._value_dim, self._rank),
            }
        return {}

    def make(self, name: str, numbers: Callable[[str], Floats]) -> Floats:
        """One of these weights, of the file's `numbers` by name."""
        module, _, weight = name.rpartition("self_attn.")
        if weight == _JOINED:
            keys = numbers(f"{module}self_attn.{_KEYS}").swapaxes(1, 2)
            values = numbers(f"{module}self_attn.{_VALUES}")
            return np.concatenate([keys, values], axis=1).reshape(-1, self._rank)
        heads = numbers(f"{module}self_attn.{_JOINED}").reshape(self._heads, -1, self._rank)
        if weight == _KEYS:
            return np.ascontiguousarray(heads[:, : self._nope].swapaxes(1, 2))
        return heads[:, self._nope :]
