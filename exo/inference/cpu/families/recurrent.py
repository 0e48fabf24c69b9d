"""Families that remember a state in some layers, and attend in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exo.inference.cpu.families.family import Experts, Family, Mixer
from exo.inference.cpu.families.mixtures import routed_scale, sparse_steps
from exo.inference.cpu.families.positions import Config, partial_rope


def _after_dense_layers(config: Config, layer: int) -> bool:
    return layer >= int(config.get("num_dense_layers", 0))


_QWEN3_NEXT_EXPERTS = Experts(
    sparse_steps, shared="shared_expert", shared_gate="shared_expert_gate", joined=True
)
_LFM2_EXPERTS = Experts(
    _after_dense_layers,
    routing="SIGMOID",
    normalized="SIGMOID_SUMMED_1",
    bias="expert_bias",
    scale=routed_scale,
)

_LFM2_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
}


def _linear_attention(config: Config, layer: int) -> Mixer:
    interval = int(config.get("full_attention_interval", 4))
    return "attention" if (layer + 1) % interval == 0 else "delta_net"


def _qwen3_5_config(config: Config) -> Config:
    rope = dict(config.get("rope_parameters") or {})
    return {
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        **config,
        "rope_theta": rope.get("rope_theta", 100000.0),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 0.25),
        "rope_scaling": rope,
    }


def _lfm2_mixer(config: Config, layer: int) -> Mixer:
    attending = config.get("full_attn_idxs")
    if attending is None:
        kinds = config["layer_types"]
        attending = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return "attention" if layer in attending else "short_convolution"


def _lfm2_config(config: Config) -> Config:
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    return {
        **config,
        "rope_theta": theta or config.get("rope_theta", 1000000.0),
        "rms_norm_eps": config["norm_eps"],
    }


_QWEN3_NEXT = Family(
    tied=False,
    raw_norm_offset=1.0,
    head_norms=True,
    gated_attention=True,
    rope=partial_rope,
    mixer=_linear_attention,
    experts=_QWEN3_NEXT_EXPERTS,
)
_QWEN3_5 = replace(_QWEN3_NEXT, config=_qwen3_5_config)
_LFM2 = Family(
    tied_by_config=False,
    head_norms=True,
    explicit_head_dim=False,
    mixer=_lfm2_mixer,
    config=_lfm2_config,
    renames=_LFM2_NAMES,
)


RECURRENT: Mapping[str, Family] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, experts=_LFM2_EXPERTS),
}
