"""Gemma 4: two widths of heads, keys and values that layers share, what tokens bring to each layer
(E2B, E4B), and a mixture beside an MLP (26B-A4B).

The arithmetic is that of mlx-lm's gemma4_text.
"""

from __future__ import annotations

import math
from typing import Any

from exo.inference.cpu.families.dense import SANDWICH_NORMS
from exo.inference.cpu.families.family import Experts, Family
from exo.inference.cpu.families.positions import Config
from exo.inference.cpu.families.rope import RopeTable, rope_table

_DEFAULTS: Config = {
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_kv_shared_layers": 20,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
}
_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {},
}


def slides(config: Config, layer: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is None:
        return bool((layer + 1) % config.get("sliding_window_pattern", 5))
    return bool(kinds[layer] == "sliding_attention")


def _head_shape(config: Config, layer: int) -> tuple[int, int]:
    """Layers that see everything have wider heads, and fewer where their values are their keys."""
    heads, width = int(config["num_key_value_heads"]), int(config["head_dim"])
    if slides(config, layer):
        return heads, width
    if config.get("attention_k_eq_v"):
        heads = int(config.get("num_global_key_value_heads") or heads)
    return heads, int(config["global_head_dim"] or width)


def kv_from(config: Config, layer: int) -> int:
    """The last layers read what the last of their kind cached that has keys of its own."""
    own = int(config["num_hidden_layers"]) - int(config["num_kv_shared_layers"] or 0)
    if layer < own:
        return layer
    return max(one for one in range(own) if slides(config, one) == slides(config, layer))


def _values_are_keys(config: Config, layer: int) -> bool:
    return bool(config.get("attention_k_eq_v")) and not slides(config, layer)


def _rope(config: Config, layer: int) -> RopeTable:
    kind = "sliding_attention" if slides(config, layer) else "full_attention"
    how = (config.get("rope_parameters") or _ROPES).get(kind) or {}
    return rope_table(_head_shape(config, layer)[1], how.get("rope_theta", 10000.0), how)


def window(config: Config, layer: int) -> int:
    return int(config["sliding_window"]) if slides(config, layer) else 0


def scales(config: Config) -> dict[str, float]:
    return {
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "attention_scale": 1.0,
        "logits_soft_cap": config["final_logit_softcapping"] or 0.0,
    }


_EXPERTS = Experts(
    lambda config, layer: bool(config.get("enable_moe_block")),
    router="router.proj",
    routing="TOP_THEN_SOFTMAX",
    normalized="TOP_THEN_SOFTMAX",
    top="top_k_experts",
    shared="beside",
    joined="over",
)

GEMMA4 = Family(
    config=lambda config: {**_DEFAULTS, **config},
    activation="GELU_TANH",
    norms=SANDWICH_NORMS,
    head_norms=True,
    plain_norms=lambda config, layer: "v",
    values_are_keys=_values_are_keys,
    head_shape=_head_shape,
    kv_from=kv_from,
    rope=_rope,
    window=window,
    scales=scales,
    experts=_EXPERTS,
    token_inputs="hidden_size_per_layer_input",
    layer_scales=True,
    mixture_norms={
        "experts": "pre_feedforward_layernorm_2",
        "after_experts": "post_feedforward_layernorm_2",
        "after_mlp": "post_feedforward_layernorm_1",
    },
    renames={
        "mlp": "mlp.beside",
        "router": "mlp.router",
        "experts.switch_glu": "mlp.switch_mlp",
        "experts.gate_up_proj": "mlp.experts.gate_up_proj",
        "experts.down_proj": "mlp.experts.down_proj",
    },
)
