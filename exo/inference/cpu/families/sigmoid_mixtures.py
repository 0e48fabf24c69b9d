"""Mixtures whose experts a sigmoid weighs, each by itself: GLM 4.5, and what followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.blocks import minimax_blocks
from exo.inference.cpu.families.experts import (
    GLM4_EXPERTS,
    MIXTRAL_NAMES,
)
from exo.inference.cpu.families.family import Experts, Family, every_layer
from exo.inference.cpu.families.positions import (
    Config,
    interleaved_rope,
    llama_rope,
    minimax_rope,
    of_rope_parameters,
    partial_rope,
    typed_window,
)
from exo.inference.cpu.families.rope import RopeTable


def _mimo_slides(config: Config, layer: int) -> bool:
    return bool(config["hybrid_layer_pattern"][layer])


def _mimo_config(config: Config) -> Config:
    same = [(f"swa_{key}", key) for key in ("head_dim", "v_head_dim")]
    if any(config.get(sliding, config[key]) != config[key] for sliding, key in same):
        raise ModelUnsupported("heads of another size in layers that see a window")
    return {**config, "rms_norm_eps": config["layernorm_epsilon"]}


def _mimo_rope(config: Config, layer: int) -> RopeTable | None:
    theta = config["swa_rope_theta" if _mimo_slides(config, layer) else "rope_theta"]
    return partial_rope({**config, "rope_theta": theta, "rope_scaling": None}, layer)


def _mimo_heads(config: Config, layer: int) -> int:
    prefix = "swa_" if _mimo_slides(config, layer) else ""
    return int(config[f"{prefix}num_attention_heads"])


def _mimo_head_shape(config: Config, layer: int) -> tuple[int, int]:
    prefix = "swa_" if _mimo_slides(config, layer) else ""
    return int(config[f"{prefix}num_key_value_heads"]), int(config["head_dim"])


def _mimo_has_sinks(config: Config, layer: int) -> bool:
    kind = "swa" if _mimo_slides(config, layer) else "full"
    return bool(config[f"add_{kind}_attention_sink_bias"])


def _bailing_config(config: Config) -> Config:
    """Ling's, in a llama's words.

    Raises:
        ModelUnsupported: a checkpoint of the first Ling whose head is normed, row by row.
    """
    if config.get("norm_head"):
        raise ModelUnsupported("a head whose rows are to be normed; take its GGUF file")
    width = int(config["hidden_size"]) // int(config["num_attention_heads"])
    turned = config.get("rotary_dim") or int(width * config.get("partial_rotary_factor", 1.0))
    return {
        "topk_group": 4,
        "use_qk_norm": False,
        **config,
        "partial_rotary_factor": turned / width,
    }


def _exaone_rope(config: Config, layer: int) -> RopeTable | None:
    """Where some layers see a window, only these know positions."""
    kinds = config["layer_types"]
    if "sliding_attention" in kinds and kinds[layer] != "sliding_attention":
        return None
    given = config.get("rope_parameters") or {}
    theta = given.get("rope_theta") or config.get("rope_theta", 1000000.0)
    return llama_rope({**config, "rope_theta": theta, "rope_traditional": False}, layer)


def _bailing_routing(config: Config) -> dict[str, str]:
    """The first Ling's experts are weighed by a softmax."""
    if config.get("score_function", "softmax") == "sigmoid":
        return {}
    sums = "_SUMMED_1" if config.get("norm_topk_prob") else ""
    return {"routing": f"SOFTMAX_THEN_TOP{sums}"}


_BAILING_NAMES = {
    "word_embeddings": "embed_tokens",
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
    "gate.gate_proj": "gate",
    "expert_bias": "e_score_correction_bias",
}


def _cohere2_config(config: Config) -> Config:
    """As transformers' configuration_cohere2_moe.py fills in what a configuration leaves out;
    mlx-lm has no class of it.

    Raises:
        ModelUnsupported: experts weighed by a softmax; the models there are have a sigmoid.
    """
    if config.get("expert_selection_fn", "softmax") != "sigmoid":
        raise ModelUnsupported("a Cohere 2 mixture whose experts softmax weighs")
    layers, dense = int(config["num_hidden_layers"]), int(config.get("first_k_dense_replace") or 0)
    of_dense = int(config.get("prefix_dense_sliding_window_pattern", 1))
    of_others = int(config.get("sliding_window_pattern", 4))
    slides = [(i + 1) % of_dense for i in range(dense)]
    slides += [(i + 1) % of_others for i in range(layers - dense)]
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    mlps = ["dense" if i < dense else "sparse" for i in range(layers)]
    rms_eps = config.get("rms_norm_eps")
    return {
        **config,
        **of_rope_parameters(config, 10000.0),
        "layer_types": config.get("layer_types") or kinds,
        "mlp_layer_types": config.get("mlp_layer_types") or mlps,
        "layer_norm": rms_eps is None,
        "rms_norm_eps": config.get("layer_norm_eps", 1e-5) if rms_eps is None else rms_eps,
    }


def _cohere2_rope(config: Config, layer: int) -> RopeTable | None:
    """Layers that see a window know positions, and the dense first ones where they see all."""
    is_dense = config["mlp_layer_types"][layer] == "dense"
    forced = is_dense and config.get("prefix_dense_sliding_window_pattern", 1) == 1
    slides = config["layer_types"][layer] == "sliding_attention"
    return interleaved_rope(config, layer) if slides or forced else None


def _hy3_config(config: Config) -> Config:
    """As transformers' configuration_hy_v3.py fills in what a configuration leaves out; mlx-lm has
    no class of it."""
    of_others = ["sparse"] * (int(config["num_hidden_layers"]) - 1)
    return {
        **config,
        **of_rope_parameters(config, 11158840.0),
        "mlp_layer_types": config.get("mlp_layer_types") or ["dense", *of_others],
    }


def _share_of_average(config: Config) -> float:
    """Of what a token's experts give, and of what the shared one does."""
    is_average = config.get("shared_expert_combination_strategy", "average") == "average"
    return 0.5 if config.get("num_shared_experts") and is_average else 1.0


def _is_sparse(config: Config, layer: int) -> bool:
    return bool(config["mlp_layer_types"][layer] != "dense")


def _minimax_m3_config(config: Config) -> Config:
    """With the defaults of mlx-lm's class, in the words of both kinds of configurations there are.

    Raises:
        ModelUnsupported: what the models there are do not have.
    """
    activation = float(config.get("swiglu_alpha", 1.702)), float(config.get("swiglu_limit", 7.0))
    if activation != (1.702, 7.0):
        raise ModelUnsupported(f"an activation of alpha and limit {activation}, not (1.702, 7.0)")
    if not config.get("use_gemma_norm", True):
        raise ModelUnsupported("a MiniMax M3 whose norms do not add one")
    layers = int(config["num_hidden_layers"])
    often = config.get("moe_layer_freq") or [1] * layers
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
    return {
        **config,
        **of_rope_parameters(config, 5000000.0),
        "rotary_dim": config.get("rotary_dim") or int(config["head_dim"] * share),
        "mlp_layer_types": config.get("mlp_layer_types")
        or ["sparse" if one else "dense" for one in often],
    }


_MIMO_V2 = Family(
    tied=False,
    tied_by_config=False,
    sinks=_mimo_has_sinks,
    rope=_mimo_rope,
    window=lambda config, layer: (
        int(config["sliding_window_size"]) if _mimo_slides(config, layer) else 0
    ),
    heads=_mimo_heads,
    head_shape=_mimo_head_shape,
    value_dim=lambda config: int(config["v_head_dim"]),
    scales=lambda config: {
        "attention_scale": config["head_dim"] ** -0.5,
        "value_scale": float(config.get("attention_value_scale") or 1.0),
    },
    experts=replace(
        GLM4_EXPERTS, layers=lambda config, layer: bool(config["moe_layer_freq"][layer])
    ),
    config=_mimo_config,
    renames={"attention_sink_bias": "sinks"},
)

SIGMOID_MIXTURES: Mapping[str, Family] = {
    "mimo_v2_flash": _MIMO_V2,
    "bailing_moe": Family(
        tied=False,
        head_norms=True,
        fused_attention="stacked",
        explicit_head_dim=False,
        rope=partial_rope,
        experts=replace(GLM4_EXPERTS, count="num_experts", told_by_config=_bailing_routing),
        config=_bailing_config,
        renames=_BAILING_NAMES,
    ),
    "exaone_moe": Family(
        tied=False,
        head_norms=True,
        rope=_exaone_rope,
        window=typed_window,
        experts=replace(
            GLM4_EXPERTS,
            layers=lambda config, layer: bool(config["is_moe_layer"][layer]),
            count="num_experts",
            normalizes=lambda config: bool(config.get("norm_topk_prob", True)),
            scale=lambda config: float(config.get("routed_scaling_factor", 2.5)),
        ),
        renames={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    ),
    "cohere2_moe": Family(
        head_dim=128,
        layer_norm=True,
        parallel=lambda config: True,
        norms={"attention_norm": "input_layernorm"},
        rope=_cohere2_rope,
        window=typed_window,
        scales=lambda config: {
            "layer_norm": config["layer_norm"],
            "logits_scale": config.get("logit_scale", 0.0625),
        },
        experts=replace(
            GLM4_EXPERTS,
            layers=_is_sparse,
            normalizes=lambda config: bool(config.get("norm_topk_prob", True)),
            count="num_experts",
            bias="",
            joined="over",
            scale=_share_of_average,
            shared_scale=_share_of_average,
            groups=lambda config: (1, 1, 1),
        ),
        config=_cohere2_config,
    ),
    "hy_v3": Family(
        tied=False,
        head_norms=True,
        experts=replace(
            GLM4_EXPERTS,
            layers=_is_sparse,
            normalizes=lambda config: bool(config.get("route_norm", True)),
            count="num_experts",
            joined="over",
            scale=lambda config: float(config.get("router_scaling_factor", 2.826)),
            groups=lambda config: (1, 1, 1),
        ),
        config=_hy3_config,
        renames={
            "mlp.router.gate": "mlp.gate",
            "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
            "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            "mlp.shared_mlp": "mlp.shared_experts",
        },
    ),
    "dots1": Family(tied=False, head_norms=True, experts=replace(GLM4_EXPERTS, stacked="experts")),
    "glm4_moe": Family(
        tied=False, tied_by_config=False, head_norms=True, rope=partial_rope, experts=GLM4_EXPERTS
    ),
    "solar_open": Family(
        tied=False,
        tied_by_config=False,
        head_norms=True,
        rope=partial_rope,
        experts=GLM4_EXPERTS,
        config=lambda config: {"use_qk_norm": False, **config},
    ),
    "minimax": Family(
        tied=False,
        head_norms=True,
        rope=minimax_rope,
        experts=Experts(
            every_layer,
            normalizes=lambda config: True,
            normalized="SIGMOID_SUMMED_1",
            count="num_local_experts",
            bias="e_score_correction_bias",
        ),
        renames=MIXTRAL_NAMES,
    ),
    "minimax_m3_vl": Family(
        tied=False,
        activation="CLAMPED_SWIGLU",
        norm_offset=1.0,
        head_norms=True,
        rope=minimax_rope,
        blocks=minimax_blocks,
        experts=replace(
            GLM4_EXPERTS,
            layers=_is_sparse,
            normalizes=lambda config: True,
            count="num_local_experts",
            bias="e_score_correction_bias",
            scale=lambda config: float(config.get("routed_scaling_factor", 2.0)),
            groups=lambda config: (1, 1, 1),
        ),
        config=_minimax_m3_config,
        renames=MIXTRAL_NAMES,
    ),
}
