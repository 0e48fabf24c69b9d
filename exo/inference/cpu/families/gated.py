"""Families whose attention's output is multiplied by a gate that is a matrix of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.experts import GLM4_EXPERTS
from exo.inference.cpu.families.family import Experts, Family
from exo.inference.cpu.families.positions import (
    Config,
    head_dim,
    llama_rope,
    rope_by_kind,
    typed_window,
)
from exo.inference.cpu.families.rope import RopeTable

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _rope_where_sliding(config: Config, layer: int) -> RopeTable | None:
    """Only layers that see a window know positions."""
    slides = config["layer_types"][layer] == _SLIDING
    return llama_rope({**config, "rope_traditional": False}, layer) if slides else None


def _muse_config(config: Config) -> Config:
    """What mlx-lm's class takes where the configuration does not say."""
    layers = int(config["num_hidden_layers"])
    given = config.get("rope_parameters") or {}
    theta = given.get("rope_theta") or config.get("rope_theta", 500000.0)
    kinds = config.get("layer_types") or ([_SLIDING] * 3 + [_FULL]) * layers
    thetas = config.get("layer_rope_theta") or [theta * (kind == _SLIDING) for kind in kinds]
    if any(bool(own) != (kind == _SLIDING) for own, kind in zip(thetas, kinds, strict=False)):
        raise ModelUnsupported("positions in layers that see all")
    return {
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 2048,
        "head_dim": 128,
        **config,
        "layer_types": kinds[:layers],
        "rope_theta": theta,
        "rope_scaling": None,
    }


def _muse_scales(config: Config) -> dict[str, float]:
    factor = float(config.get("qk_scale_factor", 3.87))
    return {
        "attention_scale": factor * head_dim(config) ** -0.5,
        "logits_scale": float(config.get("output_multiplier", 26**-0.5)),
        "logits_soft_cap": float(config.get("final_logit_softcapping", 20.0)),
    }


def _afmoe_config(config: Config) -> Config:
    if config.get("score_func", "sigmoid") != "sigmoid":
        raise ModelUnsupported("experts that softmax weighs in AFMoE's way")
    return {"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 2048, **config}


def _afmoe_scales(config: Config) -> dict[str, float]:
    return {
        "embedding_scale": config["hidden_size"] ** 0.5 if config.get("mup_enabled", True) else 1.0
    }


def _laguna_config(config: Config) -> Config:
    """What mlx-lm's class takes where the configuration does not say."""
    layers = int(config["num_hidden_layers"])
    if config.get("moe_router_logit_softcapping") or (
        config.get("moe_router_score_func", "sigmoid") != "sigmoid"
    ):
        raise ModelUnsupported("experts that are weighed in another way than by a sigmoid")
    given = {"rope_theta": 10000.0, "rope_type": "default"}
    ropes = config.get("rope_parameters") or {}
    return {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "layer_types": [_FULL] * layers,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "num_attention_heads_per_layer": [config["num_attention_heads"]] * layers,
        **{key: value for key, value in config.items() if value is not None},
        "rope_parameters": {
            kind: {**given, **(ropes.get(kind) or {})} for kind in (_SLIDING, _FULL)
        },
    }


def _laguna_rope(config: Config, layer: int) -> RopeTable | None:
    """Of the share of each head that positions turn in layers of its kind."""
    own = config["rope_parameters"][config["layer_types"][layer]]
    share = own.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return rope_by_kind({**config, "head_dim": int(head_dim(config) * share)}, layer)


_AFMOE_EXPERTS = Experts(
    lambda config, layer: layer >= int(config.get("num_dense_layers", 2)),
    stacked="experts",
    routing="SIGMOID",
    normalized="SIGMOID_SUMMED_1",
    normalizes=lambda config: bool(config.get("route_norm", True)),
    shared="shared_experts",
    bias="expert_bias",
    scale=lambda config: float(config.get("route_scale", 2.826)),
    groups=GLM4_EXPERTS.groups,
)
_AFMOE_NORMS = {
    "attention_norm": "input_layernorm",
    "after_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "after_mlp_norm": "post_mlp_layernorm",
}
_MUSE_NORMS = {
    **_AFMOE_NORMS,
    "mlp_norm": "pre_feedforward_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}


def _step_config(config: Config) -> Config:
    """What mlx-lm's class takes where the configuration does not say."""
    layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [_SLIDING, _FULL] * layers
    return {
        "rms_norm_eps": 1e-5,
        "sliding_window": 512,
        **config,
        "num_key_value_heads": config["num_attention_groups"],
        "layer_types": kinds[:layers],
        "moe_num_experts": config.get("moe_num_experts", 288),
        "moe_top_k": config.get("moe_top_k", 8),
    }


def _step_attention(config: Config, layer: int) -> Config:
    other = config.get("attention_other_setting")
    return other if other and config["layer_types"][layer] == _SLIDING else config


def _step_rope(config: Config, layer: int) -> RopeTable | None:
    thetas, shares = config.get("rope_theta", 10000.0), config.get("partial_rotary_factors") or []
    only = config.get("yarn_only_types") or [config["layer_types"][layer]]
    scaled = config["layer_types"][layer] in only
    share = shares[layer] if layer < len(shares) else 1.0
    own = {
        "rope_theta": thetas[layer] if isinstance(thetas, list) else thetas,
        "rope_scaling": config.get("rope_scaling") if scaled else None,
        "rope_traditional": False,
        "head_dim": int(head_dim(config) * share),
    }
    return llama_rope({**config, **own}, layer)


def _step_mixtures(config: Config, layer: int) -> bool:
    said = config.get("moe_layers_enum")
    return str(layer) in said.replace(" ", "").split(",") if said else layer > 0


def _step_limits(config: Config, layer: int) -> tuple[float, float]:
    def of(key: str) -> float:
        limits = config.get(key) or []
        return float(limits[layer] or 0.0) if layer < len(limits) else 0.0

    return of("swiglu_limits"), of("swiglu_limits_shared")


_STEP_NAMES = {
    **{f"moe.{part}_proj": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
    "moe.gate": "mlp.gate",
    "moe.router_bias": "mlp.router_bias",
    "mlp.gate.gate": "mlp.gate",
    "mlp.gate.router_bias": "mlp.router_bias",
    "mlp.share_expert": "mlp.shared",
    "share_expert": "mlp.shared",
    "self_attn.g_proj": "self_attn.gate_proj",
}

GATED: Mapping[str, Family] = {
    "muse_glimmer": Family(
        tied=False,
        norms=_MUSE_NORMS,
        norm_offset=1.0,
        final_norm_offset=0.0,
        after_norm_eps="post_norm_eps",
        embedding_norm=True,
        plain_norms=lambda config, layer: "qk",
        output_gate="sigmoid",
        rope=_rope_where_sliding,
        window=typed_window,
        scales=_muse_scales,
        config=_muse_config,
    ),
    "afmoe": Family(
        tied=False,
        norms=_AFMOE_NORMS,
        head_norms=True,
        output_gate="sigmoid",
        rope=_rope_where_sliding,
        window=typed_window,
        scales=_afmoe_scales,
        experts=_AFMOE_EXPERTS,
        config=_afmoe_config,
        renames={"router.gate": "gate"},
    ),
    "step3p5": Family(
        tied=False,
        raw_norm_offset=1.0,
        head_norms=True,
        output_gate="sigmoid",
        heads=lambda config, layer: int(_step_attention(config, layer)["num_attention_heads"]),
        head_shape=lambda config, layer: (
            int(_step_attention(config, layer)["num_attention_groups"]),
            head_dim(config),
        ),
        rope=_step_rope,
        window=typed_window,
        limits=_step_limits,
        experts=Experts(
            _step_mixtures,
            routing="SIGMOID",
            normalized="SIGMOID_SUMMED_1",
            normalizes=lambda config: bool(config.get("norm_expert_weight", True)),
            count="moe_num_experts",
            top="moe_top_k",
            shared="shared",
            bias="router_bias",
            scale=lambda config: float(config.get("moe_router_scaling_factor", 3.0)),
        ),
        config=_step_config,
        renames=_STEP_NAMES,
    ),
    "laguna": Family(
        tied=False,
        head_norms=True,
        output_gate="softplus",
        heads=lambda config, layer: int(config["num_attention_heads_per_layer"][layer]),
        rope=_laguna_rope,
        window=typed_window,
        experts=replace(
            GLM4_EXPERTS,
            layers=lambda config, layer: config["mlp_layer_types"][layer] == "sparse",
            count="num_experts",
            normalizes=lambda config: True,
            shared="shared_expert",
            scale=lambda config: float(config.get("moe_routed_scaling_factor", 1.0)),
            groups=lambda config: (1, 1, 1),
        ),
        config=_laguna_config,
        renames={
            "gate.proj": "gate",
            "experts.e_score_correction_bias": "gate.e_score_correction_bias",
            "self_attn.g_proj": "self_attn.gate_proj",
        },
    ),
}
