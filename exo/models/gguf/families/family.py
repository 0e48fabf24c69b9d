"""What tells a family's GGUF files from a llama's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from exo.errors import ModelUnsupported
from exo.models.gguf.header import GGUF

Config = dict[str, Any]


class Metadata:
    """What a file says of its architecture. Keys are without the architecture's name.

    `varied` are keys whose numbers may differ from layer to layer.

    Raises, where it is called:
        ModelUnsupported: there is no such key and no default, or it differs from layer to layer.
    """

    def __init__(self, gguf: GGUF, varied: tuple[str, ...] = ()) -> None:
        self._gguf = gguf
        self._varied = varied

    def __call__(self, key: str, *default: Any) -> Any:
        whole = f"{self._gguf.architecture}.{key}"
        found = self._gguf.metadata.get(whole, *default)
        if found is None and not default:
            raise ModelUnsupported(f"the GGUF file has no {whole}")
        if isinstance(found, np.ndarray):
            # Some files hold a number for each layer where all have the same.
            if len(set(found.tolist())) != 1:
                raise ModelUnsupported(f"{whole} differs from layer to layer")
            return found[0].item()
        return found

    def of_layers(self, key: str) -> list[int]:
        """A number for each layer, whether the file has one for all or one for each: 0 where a
        layer has nothing of the kind. Empty where the file does not say.

        Raises:
            ModelUnsupported: layers that differ in more than whether they have any.
        """
        whole = f"{self._gguf.architecture}.{key}"
        found = [int(count) for count in np.atleast_1d(self._gguf.metadata.get(whole, []))]
        if len(set(found) - {0}) > 1 and key not in self._varied:
            raise ModelUnsupported(f"{whole} differs from layer to layer")
        layers = self.layers
        return (found * layers if len(found) == 1 else found)[:layers]

    @property
    def guessing_layers(self) -> int:
        """How many of `block_count` layers guess further tokens. Some files say so of the model and
        hold no such layers, nor count them: antirez's DeepSeek V4."""
        said = int(self("nextn_predict_layers", 0))
        first = f"blk.{self('block_count') - said}."
        return 0 if self.has_tensor(first) and not self.has_tensor(f"{first}nextn.") else said

    @property
    def layers(self) -> int:
        """Without those that guess."""
        return int(self("block_count")) - self.guessing_layers

    def numbers(self, key: str) -> list[float]:
        """A number for each layer; empty where the file does not say."""
        found = self._gguf.metadata.get(f"{self._gguf.architecture}.{key}", [])
        return [float(number) for number in np.atleast_1d(found)]

    def integers(self, key: str) -> list[int]:
        """All of an array's, however large."""
        found = self._gguf.metadata.get(f"{self._gguf.architecture}.{key}", [])
        return [int(number) for number in np.atleast_1d(found)]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's, columns last.

        Raises:
            ModelUnsupported: there is no such tensor.
        """
        if (tensor := self._gguf.tensors.get(name)) is None:
            raise ModelUnsupported(f"the GGUF file has no tensor {name}")
        return tensor.shape

    def first_number(self, name: str) -> float:
        """Of a tensor.

        Raises:
            ModelUnsupported: there is no such tensor, or it is packed.
        """
        if (floats := self._gguf.floats(name)) is None:
            raise ModelUnsupported(f"the GGUF file has no plain numbers {name}")
        return float(floats[0])

    def factors(self) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """Of the frequencies with which positions turn."""
        return self._gguf.floats("rope_freqs.weight")

    def has_tensor(self, part: str) -> bool:
        """Whether a tensor's name contains `part`; `attn_q` and the like may be in one tensor."""
        joined = re.sub(r"attn_[qkv]\.", "attn_qkv.", part)
        return any(part in name or joined in name for name in self._gguf.tensors)


def _nothing_own(metadata: Metadata, config: Config) -> Config:
    return {}


def qkv_rows(heads: int, kv_heads: int, dim: int) -> tuple[int, int, int]:
    """Of queries, keys and values, by how many heads there are and their size."""
    return heads * dim, kv_heads * dim, kv_heads * dim


def rows_of_heads(config: Config, layer: int) -> tuple[int, int, int]:
    """Of a layer's queries, keys and values."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return qkv_rows(heads, kv_heads, config["head_dim"])


def joined_there_too(config: Config, layer: int) -> None:
    """Mlx-lm's class has one matrix for queries, keys and values, too."""


def alike_in_all_layers(config: Config, layer: int) -> Mapping[str, str]:
    """No name differs."""
    return {}


@dataclass(frozen=True)
class GGUFFamily:
    """`tensors`: names that differ from a llama's, by llama.cpp's; "": there is no such tensor.
    `config`: what config.json has besides or instead, of the metadata and of what all families
    have.

    `interleaved_rope`: llama.cpp permutes the rows of q and k for RoPE over neighbouring pairs.
    `norms_add_one`: which norms hold 1 + weight, where mlx-lm's class adds the 1. `prefix`: before
    all names. `layers`: what stands before a layer's number. `varied`: keys of the metadata whose
    numbers may differ from layer to layer. `own_factors`: `config` reads those of frequencies,
    `in_config` what other tensors it reads. `lists`: modules that are lists, whose weights stand in
    one tensor. `by_kv_head`: what has queries, keys and values in one matrix, by KV head, where a
    file has them one kind after the other. `qkv_rows`: how many rows queries, keys and values of a
    layer have where a file has them in one matrix; None where that is no such matrix, or is wanted
    as it is. `narrow_values`: they may be narrower than keys. `of_layer`: names that differ from
    layer to layer. `layer_numbers`: numbers that mlx-lm's class keeps in each layer, by the
    metadata's whole key of an array of them. `name` is that in config.json's `gguf_family`, where
    its model_type does not tell."""

    model_type: str
    interleaved_rope: bool = False
    norms_add_one: Literal["", "layers", "all"] = ""
    prefix: str = ""
    layers: str = "model.layers"
    tensors: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Metadata, Config], Config] = _nothing_own
    varied: tuple[str, ...] = ()
    own_factors: bool = False
    in_config: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    by_kv_head: str = ""
    qkv_rows: Callable[[Config, int], tuple[int, int, int] | None] = rows_of_heads
    narrow_values: bool = False
    of_layer: Callable[[Config, int], Mapping[str, str]] = alike_in_all_layers
    layer_numbers: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


def experts(router: str, stacked: str) -> dict[str, str]:
    places = ("gate", "up", "gate_up", "down")
    named = {f"ffn_{place}_exps": f"{stacked}.{place}_proj" for place in places}
    return {"ffn_gate_inp": router, **named}


def mlp(module: str) -> dict[str, str]:
    return {f"ffn_{place}": f"{module}.{place}_proj" for place in ("gate", "up", "down")}


def shared(expert: str) -> dict[str, str]:
    """The expert that every token goes through."""
    return {f"ffn_{place}_shexp": f"{expert}.{place}_proj" for place in ("gate", "up", "down")}


HYPER = {
    **{
        f"hc_{place}_{part}": f"{module}.{part}"
        for place, module in (("attn", "attn_hc"), ("ffn", "ffn_hc"))
        for part in ("fn", "base", "scale")
    },
    **{f"output_hc_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
"""What reads and mixes several hidden states of a token."""


def hyper(metadata: Metadata) -> Config:
    """How many hidden states a token has, and what all models that have several have besides: one
    limit of what their experts read."""
    return {
        "hc_mult": metadata("hyper_connection.count"),
        "hc_eps": metadata("hyper_connection.epsilon"),
        "swiglu_limit": metadata("swiglu_clamp_exp", 0.0),
    }


def turned_share(metadata: Metadata, config: Config) -> float:
    """Of each head, what positions turn."""
    turned = metadata("rope.dimension_count", config["head_dim"])
    return float(turned / config["head_dim"])


def layer_kinds(metadata: Metadata, config: Config, full: int) -> list[str]:
    """Of layers, which see a window or all. Where a file does not say, of four neighbours the one
    at `full` sees all."""
    layers = range(config["num_hidden_layers"])
    slides = metadata.of_layers("attention.sliding_window_pattern")
    if not metadata("attention.sliding_window", 0):
        slides = [0 for _ in layers]
    slides = slides or [int(layer % 4 != full) for layer in layers]
    return ["sliding_attention" if one else "full_attention" for one in slides]
