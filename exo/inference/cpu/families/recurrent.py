"""Families that remember a state in some layers, and attend in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.dense import granite_scales
from exo.inference.cpu.families.experts import (
    GLM4_EXPERTS,
    GRANITE_EXPERTS,
    deepseek_layers,
    routed_scale,
    same_limits,
    sparse_steps,
)
from exo.inference.cpu.families.family import Experts, Factor, Family, Mixer
from exo.inference.cpu.families.latents import latent_scales, unscaled_latents
from exo.inference.cpu.families.ngrams import qwen_ngrams
from exo.inference.cpu.families.pools import qwen_pools
from exo.inference.cpu.families.positions import Config, latent_rope, llama_rope, partial_rope
from exo.inference.cpu.families.rope import RopeTable


def _after_dense_layers(config: Config, layer: int) -> bool:
    return layer >= int(config.get("num_dense_layers", 0))


_QWEN3_NEXT_EXPERTS = Experts(
    sparse_steps, shared="shared_expert", shared_gate="shared_expert_gate", joined="over"
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


def _granite_mixer(config: Config, layer: int) -> Mixer:
    return "attention" if config["layer_types"][layer] == "attention" else "state_space"


def _granite_rope(config: Config, layer: int) -> RopeTable | None:
    if config.get("position_embedding_type", "rope") == "nope":
        return None
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    theta = theta or config.get("rope_theta", 10000.0)
    return llama_rope({**config, "rope_theta": theta, "rope_scaling": None}, layer)


_NEMOTRON_KINDS = {
    "full_attention": "*",
    "attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "conv": "M",
    "moe": "E",
    "mlp": "-",
}
_NEMOTRON_MIXERS: Mapping[str, Mixer] = {"*": "attention", "M": "state_space"}


def _nemotron_config(config: Config) -> Config:
    """`hybrid_override_pattern` has a letter a layer: M, *, - or E."""
    named = config.get("layers_block_type") or config.get("layer_types") or ()
    pattern = config.get("hybrid_override_pattern") or [_NEMOTRON_KINDS[kind] for kind in named]
    return {
        **config,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "rms_norm_eps": config["layer_norm_epsilon"],
        "mamba_n_heads": config["mamba_num_heads"],
        "mamba_d_head": config["mamba_head_dim"],
        "mamba_d_state": config["ssm_state_size"],
        "mamba_n_groups": config["n_groups"],
        "mamba_norm_groups": config["n_groups"],
        "time_step_limit": config.get("time_step_limit") or (0.0, 1e30),
    }


def _nemotron_mixer(config: Config, layer: int) -> Mixer:
    return _NEMOTRON_MIXERS.get(config["hybrid_override_pattern"][layer], "nothing")


def _nemotron_has_mlp(config: Config, layer: int) -> bool:
    return config["hybrid_override_pattern"][layer] in "-E"


def _nemotron_has_experts(config: Config, layer: int) -> bool:
    return bool(config["hybrid_override_pattern"][layer] == "E")


_GRANITE_HYBRID = Family(
    explicit_head_dim=False,
    scales=granite_scales,
    rope=_granite_rope,
    mixer=_granite_mixer,
    experts=replace(GRANITE_EXPERTS, shared="shared_mlp"),
    renames={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
        "block_sparse_moe": "mlp",
        "router.layer": "router",
        "shared_mlp.input_linear": "mlp.shared_mlp.gate_up_proj",
        "shared_mlp.output_linear": "mlp.shared_mlp.down_proj",
        "shared_mlp.gate_proj": "mlp.shared_mlp.gate_proj",
        "shared_mlp.up_proj": "mlp.shared_mlp.up_proj",
    },
)
_NEMOTRON_H = Family(
    tied=False,
    tied_by_config=False,
    activation="RELU2",
    gated=False,
    norms={"attention_norm": "norm", "mlp_norm": "norm"},
    rope=lambda config, layer: None,
    mixer=_nemotron_mixer,
    mlps=_nemotron_has_mlp,
    experts=replace(
        GLM4_EXPERTS,
        layers=_nemotron_has_experts,
        gated=False,
        around=("fc1_latent_proj", "fc2_latent_proj"),
    ),
    config=_nemotron_config,
    modules=dict.fromkeys(("attention", "state_space", "mlp"), "mixer"),
    renames={
        "backbone": "model",
        "embeddings": "embed_tokens",
        "norm_f": "norm",
        "fc1": "up_proj",
        "fc2": "down_proj",
    },
)


def _mamba2_config(config: Config) -> Config:
    """Of layers that remember a state and nothing else; one norm for all of its groups."""
    return {
        **config,
        "num_attention_heads": 1,
        "intermediate_size": 0,
        "rms_norm_eps": config["layer_norm_epsilon"],
        "mamba_n_heads": config["num_heads"],
        "mamba_d_head": config["head_dim"],
        "mamba_d_state": config.get("ssm_state_size") or config["state_size"],
        "mamba_n_groups": config["n_groups"],
    }


MAMBA_2 = Family(
    norms={"attention_norm": "norm"},
    rope=lambda config, layer: None,
    mixer=lambda config, layer: "state_space",
    mlps=lambda config, layer: False,
    config=_mamba2_config,
    modules={"state_space": "mixer"},
    renames={"backbone": "model", "embeddings": "embed_tokens", "norm_f": "norm"},
)


def _falcon_h1_config(config: Config) -> Config:
    groups = config["mamba_n_groups"] if config.get("mamba_rms_norm") else 0
    return {**config, "mamba_norm_groups": groups, "time_step_limit": (0.0, 1e30)}


def _falcon_h1_scales(config: Config) -> dict[str, float]:
    """mlx-lm puts all multipliers into the weights but the keys', see
    exo/inference/mlx/corrections.py."""
    found = {"attention_scale": config["head_dim"] ** -0.5 * config.get("key_multiplier", 1.0)}
    if config.get("tie_word_embeddings", True):
        found["logits_scale"] = config["lm_head_multiplier"] / config["embedding_multiplier"]
    return found


def _falcon_h1_factors(config: Config) -> dict[str, Factor]:
    """As in transformers' modeling_falcon_h1.py, where activations are multiplied."""

    def factor(key: str) -> float:
        return float(config.get(f"{key}_multiplier") or 1.0)

    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    width = int(config["mamba_d_ssm"])
    states = int(config["mamba_n_groups"]) * int(config["mamba_d_state"])
    rows = (width, width, states, states, int(config["mamba_n_heads"]))
    of_rows = config.get("ssm_multipliers") or [1.0] * len(rows)
    entering = [factor("ssm_in") * float(of_part) for of_part in of_rows]
    return {
        "model.embed_tokens": factor("embedding"),
        "lm_head": factor("lm_head"),
        **dict.fromkeys(
            (f"self_attn.{part}_proj" for part in ("q", "k", "v")), factor("attention_in")
        ),
        "self_attn.o_proj": factor("attention_out"),
        "mlp.gate_proj": float(gate),
        "mlp.down_proj": float(down),
        "mamba.in_proj": tuple(zip(rows, entering, strict=True)),
        "mamba.out_proj": factor("ssm_out"),
    }


_FALCON_H1 = Family(
    norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    mixer=lambda config, layer: "attention+state_space",
    config=_falcon_h1_config,
    scales=_falcon_h1_scales,
    raw_factors=_falcon_h1_factors,
    renames={"feed_forward": "mlp", "final_layernorm": "norm"},
)

_QWEN3_NEXT = Family(
    tied=False,
    raw_norm_offset=1.0,
    head_norms=True,
    output_gate="in_queries",
    rope=partial_rope,
    mixer=_linear_attention,
    experts=_QWEN3_NEXT_EXPERTS,
)
_QWEN3_5 = replace(_QWEN3_NEXT, config=_qwen3_5_config)
_QWEN_4 = replace(
    _QWEN3_5,
    norms={},
    hyper=True,
    pools=qwen_pools,
    ngrams=qwen_ngrams,
)
"""Qwen3.8 Flash Next, which mlx-lm has no class of. Its arithmetic is that of llama.cpp's
qwen4exp.cpp and of transformers' modeling_qwen4_exp.py."""
_LFM2 = Family(
    tied_by_config=False,
    head_norms=True,
    explicit_head_dim=False,
    mixer=_lfm2_mixer,
    config=_lfm2_config,
    renames=_LFM2_NAMES,
)


def _kimi_config(config: Config) -> Config:
    """What mlx-lm's class takes where the configuration does not say."""
    if config.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise ModelUnsupported("the cpu engine has no experts that softmax weighs in Kimi's way")
    return {
        "num_experts_per_token": 1,
        **config,
        "qk_nope_head_dim": config.get("qk_nope_head_dim") or config["head_dim"],
        "qk_rope_head_dim": config.get("qk_rope_head_dim") or 0,
        "v_head_dim": config.get("v_head_dim") or config["head_dim"],
        # mlx-lm's class takes a bound from no configuration.
        "linear_attn_config": {**config["linear_attn_config"], "gate_lower_bound": None},
    }


def _kimi_mixer(config: Config, layer: int) -> Mixer:
    remembers = layer + 1 in config["linear_attn_config"]["kda_layers"]
    return "kimi_delta_net" if remembers else "attention"


def _kimi_normalizes(config: Config) -> bool:
    return bool(config.get("moe_renormalize", True) and config["num_experts_per_token"] > 1)


def _kimi_groups(config: Config) -> tuple[int, int, int]:
    return int(config.get("num_expert_group") or 1), int(config.get("topk_group") or 1), 2


_KIMI_LINEAR = Family(
    tied=False,
    latent=True,
    latent_eps=0.0,
    rope=lambda config, layer: None,
    mixer=_kimi_mixer,
    config=_kimi_config,
    scales=unscaled_latents,
    experts=replace(
        GLM4_EXPERTS,
        layers=deepseek_layers,
        normalizes=_kimi_normalizes,
        count="num_experts",
        top="num_experts_per_token",
        groups=_kimi_groups,
    ),
    renames={
        "block_sparse_moe": "mlp",
        "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
        "q_conv1d": "q_conv.conv",
        "k_conv1d": "k_conv.conv",
        "v_conv1d": "v_conv.conv",
    },
)


def _glm5_next_config(config: Config) -> Config:
    """GLM 5.3's, as its GGUF files have it; mlx-lm has no class of it."""
    return {"qk_rope_head_dim": 0, **config}


def _ling_config(config: Config) -> Config:
    """What mlx-lm's class takes where the configuration does not say."""
    if not (config.get("no_kda_lora", True) and config.get("kda_safe_gate", True)):
        raise ModelUnsupported("Ling 3 with gates that are made in another way")
    found = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 6000000.0,
        "layer_group_size": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        **config,
    }
    own = {
        "num_heads": config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "short_conv_kernel_size": config.get("short_conv_kernel_size", 4),
        "gate_lower_bound": config.get("kda_lower_bound", -5.0),
    }
    return {**found, "linear_attn_config": own}


def _ling_mixer(config: Config, layer: int) -> Mixer:
    size, layers = int(config["layer_group_size"]), int(config["num_hidden_layers"])
    attends = (layer + 1) % size == 0 or layer >= layers // size * size
    return "attention" if attends else "kimi_delta_net"


def _ling_limits(config: Config, layer: int) -> tuple[float, float]:
    """Of experts, and of the one that every token goes through."""

    def of(key: str) -> float:
        limits = config.get(key) or []
        return float(limits[layer] or 0.0) if layer < len(limits) else 0.0

    return of("expert_swiglu_limit_list"), of("share_expert_swiglu_limit_list")


_LING_3 = Family(
    tied=False,
    latent=True,
    latent_eps=0.0,
    output_gate="sigmoid",
    rope=latent_rope,
    mixer=_ling_mixer,
    config=_ling_config,
    scales=latent_scales,
    limits=_ling_limits,
    experts=replace(
        GLM4_EXPERTS,
        normalizes=lambda config: True,
        count="num_experts",
        bias="gate.expert_bias",
    ),
    renames={
        "word_embeddings": "embed_tokens",
        "attention.dense": "self_attn.o_proj",
        "attention": "self_attn",
        "q_conv1d": "q_conv.conv",
        "k_conv1d": "k_conv.conv",
        "v_conv1d": "v_conv.conv",
    },
)

RECURRENT: Mapping[str, Family] = {
    "bailing_moe_v3": _LING_3,
    "kimi_linear": _KIMI_LINEAR,
    "glm5_next": replace(
        _KIMI_LINEAR,
        tied_by_config=False,
        hyper=True,
        limits=same_limits,
        limits_inputs=True,
        config=_glm5_next_config,
        experts=replace(GLM4_EXPERTS, layers=deepseek_layers),
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen4_exp": _QWEN_4,
    "granitemoehybrid": _GRANITE_HYBRID,
    "nemotron_h": _NEMOTRON_H,
    "falcon_h1": _FALCON_H1,
    "mamba2": MAMBA_2,
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, experts=_LFM2_EXPERTS),
}
