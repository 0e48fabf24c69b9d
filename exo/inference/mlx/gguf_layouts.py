"""Weights that a GGUF file has in another order, or in other matrices, than mlx-lm's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.models.checkpoint import Tensor

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


_JOINED, _KEYS, _VALUES = "kv_b_proj.weight", "embed_q.weight", "unembed_out.weight"


class LatentHeads:
    """What makes each head's keys and values of a latent: one matrix in files made before May 2025
    and in mlx-lm's DeepSeek V2, two stacks in all others. Of these the first stands with its axes
    the other way round, so that one is made of the other out of plain numbers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._heads = int(config["num_attention_heads"])
        self._rank = int(config["kv_lora_rank"])
        self._nope, self._value_dim = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
        self._are_wanted_joined = config["model_type"] == "deepseek_v2"

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
