"""GGUF families whose attention's output is multiplied by a gate that is a matrix of its own."""

from __future__ import annotations

from collections.abc import Mapping

from exo.errors import ModelUnsupported
from exo.models.gguf.families.dense import SANDWICH
from exo.models.gguf.families.family import (
    Config,
    GGUFFamily,
    Metadata,
    experts,
    layer_kinds,
    qkv_rows,
    shared,
    turned_share,
)
from exo.models.gguf.families.mixtures import check_sigmoid
from exo.models.gguf.families.rope_factors import llama3_scaling

_QUERIES = "blk.0.attn_q_norm.weight"

_MUSE = {
    **SANDWICH,
    "attn_gate": "self_attn.gate_proj",
    "attn_q_norm": "",  # the same number everywhere, which is in the configuration
    "attn_k_norm": "",
}
_AFMOE = {
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    **experts("mlp.router.gate", "mlp.experts"),
    **shared("mlp.shared_experts"),
    "exp_probs_b": "mlp.expert_bias",
}
_STEP = {
    "attn_gate": "self_attn.g_proj",
    **experts("mlp.gate.gate", "mlp.switch_mlp"),
    **shared("mlp.share_expert"),
    "exp_probs_b": "mlp.gate.router_bias",
}
_LAGUNA = {
    "attn_gate": "self_attn.g_proj",
    **experts("mlp.gate.proj", "mlp.switch_mlp"),
    **shared("mlp.shared_expert"),
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}


def _muse(metadata: Metadata, config: Config) -> Config:
    """The converter puts the factor of queries into weights of their norms (muse_glimmer.py)."""
    return {
        "layer_types": layer_kinds(metadata, config, full=3),
        "sliding_window": metadata("attention.sliding_window"),
        "qk_scale_factor": metadata.first_number(_QUERIES),
        "output_multiplier": metadata("logit_scale"),
        "final_logit_softcapping": metadata("final_logit_softcapping"),
    }


def _afmoe(metadata: Metadata, config: Config) -> Config:
    check_sigmoid(metadata)
    return {
        "layer_types": layer_kinds(metadata, config, full=3),
        "sliding_window": metadata("attention.sliding_window", 2048),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "num_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "num_shared_experts": metadata("expert_shared_count", 0),
        "num_dense_layers": metadata("leading_dense_block_count", 0),
        "route_norm": metadata("expert_weights_norm", False),
        "route_scale": metadata("expert_weights_scale", 1.0),
        "n_group": metadata("expert_group_count", 1),
        "topk_group": metadata("expert_group_used_count", 1),
    }


def _laguna(metadata: Metadata, config: Config) -> Config:
    check_sigmoid(metadata)
    layers, dense = config["num_hidden_layers"], metadata("leading_dense_block_count")
    theta, width = config["rope_theta"], config["head_dim"]
    return {
        "num_attention_heads_per_layer": metadata.of_layers("attention.head_count"),
        "layer_types": layer_kinds(metadata, config, full=0),
        "sliding_window": metadata("attention.sliding_window", 512),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "num_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": metadata("expert_weights_scale", 1.0),
        "qkv_bias": config["attention_bias"],
        "attention_bias": metadata.has_tensor(".attn_output.bias"),
        "rope_parameters": {
            "full_attention": {
                "rope_theta": theta,
                "partial_rotary_factor": turned_share(metadata, config),
                **config.get("rope_scaling", {"rope_type": "default"}),
            },
            "sliding_attention": {
                "rope_theta": metadata("rope.freq_base_swa", theta),
                "partial_rotary_factor": metadata("rope.dimension_count_swa", width) / width,
                "rope_type": "default",
            },
        },
    }


def _step(metadata: Metadata, config: Config) -> Config:
    """Of heads that positions turn by half, only layers that see all have theirs scaled."""
    kinds = layer_kinds(metadata, config, full=0)
    heads = metadata.of_layers("attention.head_count")
    kv_heads = metadata.of_layers("attention.head_count_kv")
    full, sliding = kinds.index("full_attention"), kinds.index("sliding_attention")
    factors, turned = metadata.factors(), config["head_dim"] // 2
    if metadata("rope.scaling.type", "none") != "none":
        raise ModelUnsupported("positions of Step 3.5 that are scaled in another way than its own")
    scaling = None
    if factors is not None:
        scaling = llama3_scaling(factors[: turned // 2], turned, config["rope_theta"])
    thetas = [config["rope_theta"], metadata("rope.freq_base_swa", config["rope_theta"])]
    dense, layers = metadata("leading_dense_block_count", 0), range(config["num_hidden_layers"])
    return {
        "num_attention_heads": heads[full],
        "num_attention_groups": kv_heads[full],
        "attention_other_setting": {
            "num_attention_heads": heads[sliding],
            "num_attention_groups": kv_heads[sliding],
        },
        "layer_types": kinds,
        "sliding_window": metadata("attention.sliding_window"),
        "rope_theta": [thetas[kind == "sliding_attention"] for kind in kinds],
        "partial_rotary_factors": [1.0 if kind == "sliding_attention" else 0.5 for kind in kinds],
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "moe_num_experts": metadata("expert_count"),
        "moe_top_k": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "share_expert_dim": metadata("expert_shared_feed_forward_length"),
        "moe_layers_enum": ",".join(str(layer) for layer in layers if layer >= dense),
        "moe_router_scaling_factor": metadata("expert_weights_scale", 1.0),
        "norm_expert_weight": metadata("expert_weights_norm", False),
        "swiglu_limits": metadata.numbers("swiglu_clamp_exp"),
        "swiglu_limits_shared": metadata.numbers("swiglu_clamp_shexp"),
    }


def _step_rows(config: Config, layer: int) -> tuple[int, int, int]:
    slides = config["layer_types"][layer] == "sliding_attention"
    own = config["attention_other_setting"] if slides else config
    return qkv_rows(own["num_attention_heads"], own["num_attention_groups"], config["head_dim"])


def _laguna_rows(config: Config, layer: int) -> tuple[int, int, int]:
    heads = config["num_attention_heads_per_layer"][layer]
    return qkv_rows(heads, config["num_key_value_heads"], config["head_dim"])


GATED: Mapping[str, GGUFFamily] = {
    "muse-glimmer": GGUFFamily(
        "muse_glimmer",
        interleaved_rope=True,
        norms_add_one="layers",
        tensors=_MUSE,
        config=_muse,
        in_config=(_QUERIES,),
    ),
    "afmoe": GGUFFamily("afmoe", tensors=_AFMOE, config=_afmoe),
    "step35": GGUFFamily(
        "step3p5",
        tensors=_STEP,
        config=_step,
        varied=("attention.head_count", "attention.head_count_kv"),
        own_factors=True,
        qkv_rows=_step_rows,
    ),
    "laguna": GGUFFamily(
        "laguna",
        tensors=_LAGUNA,
        config=_laguna,
        varied=("attention.head_count",),
        qkv_rows=_laguna_rows,
    ),
}
