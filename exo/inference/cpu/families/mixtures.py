"""Families whose layers attend and have several MLPs, of which each token takes some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.dense import granite_scales
from exo.inference.cpu.families.experts import (
    GRANITE_EXPERTS,
    MIXTRAL_EXPERTS,
    MIXTRAL_NAMES,
    QWEN3_EXPERTS,
    deepseek_layers,
)
from exo.inference.cpu.families.family import Experts, Family, every_layer
from exo.inference.cpu.families.positions import (
    Config,
    deepseek_rope,
    gpt_oss_rope,
    gpt_oss_window,
    hunyuan_rope,
    interleaved_rope,
    mixtral_rope,
    phimoe_rope,
    plain_rope,
    qwen2_rope,
    rope_by_kind,
    typed_window,
)

_GPT_OSS_EXPERTS = replace(
    MIXTRAL_EXPERTS, router="router", stacked="experts", joined="beside", alternating=True
)
_GRANITE_NAMES = {
    "block_sparse_moe": "mlp",
    "router.layer": "router",
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
}


def _ernie_layers(config: Config, layer: int) -> bool:
    first = config.get("moe_layer_start_index", 0)
    last = config.get("moe_layer_end_index")
    first = min(first) if isinstance(first, list) else first
    last = max(last) if isinstance(last, list) else last
    interval = int(config.get("moe_layer_interval", 1))
    is_between = first <= layer and (last is None or layer <= last)
    return is_between and (layer + 1) % interval == 0


def _hunyuan_config(config: Config) -> Config:
    """What may be said layer by layer, where all say the same."""
    if config.get("use_cla"):
        raise ModelUnsupported("layers that share keys and values run through MLX")
    tops = np.unique(config["moe_topk"])
    if len(tops) != 1:
        raise ModelUnsupported(f"layers of {tops.tolist()} experts for a token")
    return {**config, "moe_topk": int(tops[0])}


def _phi_routing(config: Config) -> dict[str, str | float]:
    return {
        "routing": "SPARSE_MIXER",
        "expert_band": 2 * float(config.get("router_jitter_noise", 0.01)),
    }


_HUNYUAN_NAMES = {
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "gate.wg": "gate",
}
_QWEN3_MOE = Family(rope=plain_rope, head_norms=True, experts=QWEN3_EXPERTS)

MIXTURES: Mapping[str, Family] = {
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe": replace(_QWEN3_MOE, experts=replace(QWEN3_EXPERTS, joined="beside")),
    "mixtral": Family(
        tied=False,
        rope=mixtral_rope,
        experts=MIXTRAL_EXPERTS,
        explicit_head_dim=False,
        renames=MIXTRAL_NAMES,
    ),
    "gpt_oss": Family(
        tied=False,
        tied_by_config=False,
        head_dim=64,
        activation="CLAMPED_SWIGLU",
        sinks=every_layer,
        rope=gpt_oss_rope,
        window=gpt_oss_window,
        experts=_GPT_OSS_EXPERTS,
    ),
    "qwen2_moe": Family(
        tied=False,
        explicit_head_dim=False,
        rope=qwen2_rope,
        experts=Experts(
            every_layer,
            normalizes=lambda config: False,
            shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    ),
    "deepseek": Family(
        tied=False,
        tied_by_config=False,
        explicit_head_dim=False,
        rope=deepseek_rope,
        experts=Experts(
            deepseek_layers,
            normalizes=lambda config: False,
            count="n_routed_experts",
            shared="shared_experts",
        ),
    ),
    "phimoe": Family(
        tied=False,
        tied_by_config=False,
        layer_norm=True,
        explicit_head_dim=False,
        rope=phimoe_rope,
        experts=replace(MIXTRAL_EXPERTS, told_by_config=_phi_routing),
        renames=MIXTRAL_NAMES,
    ),
    "hunyuan": Family(
        tied_by_config=False,
        head_norms=True,
        norm_after_rope=True,
        explicit_head_dim=False,
        rope=hunyuan_rope,
        experts=Experts(
            every_layer,
            normalizes=lambda config: True,
            top="moe_topk",
            shared="shared_mlp",
        ),
        config=_hunyuan_config,
        renames=_HUNYUAN_NAMES,
    ),
    "mellum": Family(
        tied=False,
        head_norms=True,
        rope=rope_by_kind,
        window=typed_window,
        experts=Experts(every_layer),
    ),
    "olmoe": Family(head_norms=True, experts=Experts(every_layer)),
    "granitemoe": Family(
        explicit_head_dim=False,
        scales=granite_scales,
        experts=GRANITE_EXPERTS,
        renames=_GRANITE_NAMES,
    ),
    "ernie4_5_moe": Family(
        rope=interleaved_rope,
        experts=Experts(
            _ernie_layers,
            normalizes=lambda config: True,
            count="moe_num_experts",
            top="moe_k",
            shared="shared_experts",
            bias="moe_statics.e_score_correction_bias",
        ),
    ),
}
