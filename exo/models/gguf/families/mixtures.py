"""GGUF families whose layers attend and have several MLPs, of which each token takes some."""

from __future__ import annotations

from collections.abc import Mapping

from exo.errors import ModelUnsupported
from exo.models.gguf.families.dense import granite
from exo.models.gguf.families.family import (
    Config,
    GGUFFamily,
    Metadata,
    experts,
    layer_kinds,
    shared,
    turned_share,
)

_SWITCHED = experts("mlp.gate", "mlp.switch_mlp")
ROUTED = {
    **_SWITCHED,
    **shared("mlp.shared_experts"),
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_SPARSE_BLOCK = experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp")
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    **experts("mlp.router", "mlp.experts"),
}
_ERNIE = {
    **_SWITCHED,
    **shared("mlp.shared_experts"),
    "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
}
_HUNYUAN = {
    **experts("mlp.gate.wg", "mlp.switch_mlp"),
    **shared("mlp.shared_mlp"),
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_GLM4_MOE = {**ROUTED, "post_attention_norm": "post_attention_layernorm"}
_QWEN2_MOE = {
    **_SWITCHED,
    **shared("mlp.shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LLAMA4 = {
    **{f"ffn_{place}": f"feed_forward.{place}_proj" for place in ("gate", "up", "down")},
    **experts("feed_forward.router", "feed_forward.experts"),
    **shared("feed_forward.shared_expert"),
}
_MINIMAX = {**_SPARSE_BLOCK, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_MINIMAX_M3 = {
    **_MINIMAX,
    **shared("block_sparse_moe.shared_experts"),
    **{
        f"indexer.{part}_{kind}": f"self_attn.index_{part}_{kind}"
        for part in "qk"
        for kind in ("proj", "norm")
    },
}
_GRANITE_MOE = {**_SPARSE_BLOCK, "ffn_gate_inp": "block_sparse_moe.router.layer"}


def qwen3_moe(metadata: Metadata, config: Config) -> Config:
    return {
        "num_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(metadata: Metadata, config: Config) -> Config:
    used = metadata("expert_used_count")
    return {"num_local_experts": metadata("expert_count"), "num_experts_per_tok": used}


def _gpt_oss(metadata: Metadata, config: Config) -> Config:
    found = {
        **_mixtral(metadata, config),
        "intermediate_size": metadata("expert_feed_forward_length"),
        "sliding_window": metadata("attention.sliding_window", 128),
    }
    if (scaling := config.get("rope_scaling")) is not None:
        # As its checkpoint says, which GGUF leaves out.
        found["rope_scaling"] = {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            **scaling,
            "truncate": False,
        }
    return found


def _qwen2_moe(metadata: Metadata, config: Config) -> Config:
    return {
        **qwen3_moe(metadata, config),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": metadata("expert_shared_feed_forward_length"),
    }


def _olmoe(metadata: Metadata, config: Config) -> Config:
    experts_of = {"num_experts": metadata("expert_count"), "norm_topk_prob": False}
    return {**experts_of, "num_experts_per_tok": metadata("expert_used_count")}


def granite_moe(metadata: Metadata, config: Config) -> Config:
    return {**granite(metadata, config), **_mixtral(metadata, config)}


def _minimax(metadata: Metadata, config: Config) -> Config:
    return {
        **_mixtral(metadata, config),
        "intermediate_size": metadata("expert_feed_forward_length"),
        "shared_intermediate_size": 0,
        "rotary_dim": metadata("rope.dimension_count"),
        "use_qk_norm": True,
    }


def _minimax_m3(metadata: Metadata, config: Config) -> Config:
    """As mlx-lm's class has it: below `text_config`, of a model that also sees. The first files
    there were, which only forks of llama.cpp read, have no indexer, or call it otherwise."""
    if not metadata.has_tensor(".indexer.q_proj."):
        raise ModelUnsupported(
            "a MiniMax M3 without its indexer, as files were until llama.cpp had it in summer 2026;"
            " take a newer one"
        )
    layers, dense = config["num_hidden_layers"], metadata("leading_dense_block_count", 0)
    check_sigmoid(metadata)
    text = {
        **config,
        **_mixtral(metadata, config),
        "intermediate_size": metadata("expert_feed_forward_length"),
        "dense_intermediate_size": config["intermediate_size"],
        "shared_intermediate_size": metadata("expert_feed_forward_length")
        * metadata("expert_shared_count"),
        "routed_scaling_factor": metadata("expert_weights_scale", 1.0),
        "rotary_dim": metadata("rope.dimension_count"),
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
        "sparse_attention_freq": [int(layer >= dense) for layer in range(layers)],
        "index_n_heads": metadata("attention.indexer.head_count"),
        "index_head_dim": metadata("attention.indexer.key_length"),
        "index_topk_blocks": metadata("attention.indexer.top_k"),
        "index_block_size": metadata("attention.indexer.block_size"),
        "index_local_blocks": metadata("attention.indexer.local_blocks"),
    }
    return {"text_config": text}


def deepseek_routing(metadata: Metadata, config: Config) -> Config:
    return {
        "num_experts_per_tok": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "n_routed_experts": metadata("expert_count"),
        "n_shared_experts": metadata("expert_shared_count", 0) or None,
        "n_group": metadata("expert_group_count", 1),
        "topk_group": metadata("expert_group_used_count", 1),
        "routed_scaling_factor": metadata("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata("expert_weights_norm", False)),
        "first_k_dense_replace": metadata("leading_dense_block_count", 0),
    }


def _glm4_moe(metadata: Metadata, config: Config) -> Config:
    return {
        **deepseek_routing(metadata, config),
        "partial_rotary_factor": turned_share(metadata, config),
        "use_qk_norm": metadata.has_tensor(".attn_q_norm."),
        "rope_scaling": config.get("rope_scaling"),
    }


def check_sigmoid(metadata: Metadata) -> None:
    """Raises ModelUnsupported where experts are weighed in another way."""
    if not routes_by_sigmoid(metadata):
        raise ModelUnsupported("experts that softmax weighs, where exo reads those of a sigmoid")


def _by_sigmoid(metadata: Metadata, config: Config) -> Config:
    """What else GLM 4.5's class computes: Ling 2.0 and dots.llm1, which are as it is."""
    check_sigmoid(metadata)
    return _glm4_moe(metadata, config)


def _exaone_moe(metadata: Metadata, config: Config) -> Config:
    check_sigmoid(metadata)
    dense = metadata("leading_dense_block_count", 0)
    return {
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "num_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "num_shared_experts": metadata("expert_shared_count", 0),
        "sliding_window": metadata("attention.sliding_window"),
        "layer_types": layer_kinds(metadata, config, full=3),
        "is_moe_layer": [layer >= dense for layer in range(config["num_hidden_layers"])],
        "n_group": metadata("expert_group_count", 1),
        "topk_group": metadata("expert_group_used_count", 1),
        "routed_scaling_factor": metadata("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(metadata("expert_weights_norm", False)),
        "rope_scaling": config.get("rope_scaling"),
    }


def _deepseek(metadata: Metadata, config: Config) -> Config:
    """DeepSeek V1's mixture. Its class does not scale what experts give, nor their weights' sum."""
    found = deepseek_routing(metadata, config)
    if found["routed_scaling_factor"] != 1.0 or found["norm_topk_prob"]:
        raise ModelUnsupported("a DeepSeek V1 whose experts' weights are scaled")
    return {**found, "moe_layer_freq": 1, "rope_scaling": None}


def _bailing(metadata: Metadata, config: Config) -> Config:
    """The first Ling, which computes what Ernie 4.5 does; its head's rows are normed in the file
    (conversion/bailingmoe.py)."""
    if not metadata("expert_weights_norm", False) or metadata("expert_weights_scale", 1.0) != 1.0:
        raise ModelUnsupported("a first Ling whose experts' weights have another sum than 1")
    return _ernie4_5(metadata, config)


_PHI_3_5_TEMPERATURE = 1.243163121016122
"""`short_mscale` and `long_mscale` in the config.json of Phi 3.5's mixture, which files leave
out."""


def _phimoe(metadata: Metadata, config: Config) -> Config:
    found = {**_mixtral(metadata, config), "router_jitter_noise": 0.01, "rope_scaling": None}
    if scaling := config.get("rope_scaling"):
        original = scaling["original_max_position_embeddings"]
        found["original_max_position_embeddings"] = original
        found["rope_scaling"] = {
            **scaling,
            "short_mscale": _PHI_3_5_TEMPERATURE,
            "long_mscale": _PHI_3_5_TEMPERATURE,
        }
    return found


def _ernie4_5(metadata: Metadata, config: Config) -> Config:
    return {
        "use_bias": config["attention_bias"],
        "moe_num_experts": metadata("expert_count"),
        "moe_k": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "moe_num_shared_experts": metadata("expert_shared_count", 0),
        "moe_layer_start_index": metadata("leading_dense_block_count", 0),
        "moe_layer_interval": metadata("interleave_moe_layer_step", 1),
    }


def _hunyuan(metadata: Metadata, config: Config) -> Config:
    """The file's base of positions is scaled already."""
    return {
        "num_experts": metadata("expert_count"),
        "moe_topk": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "num_shared_expert": metadata("expert_shared_count"),
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": False,
        "cla_share_factor": 1,
        "rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
    }


def _mellum(metadata: Metadata, config: Config) -> Config:
    """Of its layers those that see all positions have them scaled."""
    theta = config["rope_theta"]
    local = metadata("rope.freq_base_swa", theta)
    return {
        **qwen3_moe(metadata, config),
        "sliding_window": metadata("attention.sliding_window", config["max_position_embeddings"]),
        "layer_types": layer_kinds(metadata, config, full=3),
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **config.get("rope_scaling", {})},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
    }


def routes_by_sigmoid(metadata: Metadata) -> bool:
    """DeepSeek V3's way, and that of all that followed; V2 had softmax. Old files do not say."""
    said = metadata("expert_gating_func", 0)
    return said == 2 or (not said and metadata.has_tensor(".exp_probs_b."))


def _mimo2(metadata: Metadata, config: Config) -> Config:
    """MiMo V2 Flash and V2.5. llama.cpp's mimo2.cpp brings the sum of experts' weights to 1."""
    slides = metadata.of_layers("attention.sliding_window_pattern")
    kv_heads = metadata.of_layers("attention.head_count_kv")
    layers = range(config["num_hidden_layers"])

    def of_kind(numbers: list[int], kind: int) -> int:
        return next((n for n, own in zip(numbers, slides, strict=True) if own == kind), numbers[0])

    def has_sinks(kind: int) -> bool:
        return any(metadata.has_tensor(f"blk.{i}.attn_sinks.") for i in layers if slides[i] == kind)

    values = metadata("attention.value_length")
    return {
        **deepseek_routing(metadata, config),
        "hybrid_layer_pattern": slides,
        "moe_layer_freq": [int(metadata.has_tensor(f"blk.{i}.ffn_gate_inp.")) for i in layers],
        "add_full_attention_sink_bias": has_sinks(0),
        "add_swa_attention_sink_bias": has_sinks(1),
        "sliding_window_size": metadata("attention.sliding_window"),
        "num_key_value_heads": of_kind(kv_heads, 0),
        "swa_num_key_value_heads": of_kind(kv_heads, 1),
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "v_head_dim": values,
        "swa_v_head_dim": values,
        "swa_rope_theta": metadata("rope.freq_base_swa", config["rope_theta"]),
        "partial_rotary_factor": turned_share(metadata, config),
        "attention_value_scale": metadata("attention.value_scale", None),
        "layernorm_epsilon": config["rms_norm_eps"],
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _cohere2(metadata: Metadata, config: Config) -> Config:
    """North Mini Code, Command A+. llama.cpp's cohere2moe.cpp takes the mean of what a token's
    experts give and the shared one, and a sigmoid where a file does not say."""
    if metadata("expert_gating_func", 2) not in (0, 2):
        raise ModelUnsupported("a Cohere 2 mixture whose experts softmax weighs")
    return {
        "num_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "num_shared_experts": metadata("expert_shared_count", 0),
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": bool(metadata("expert_weights_norm", False)),
        "first_k_dense_replace": metadata("leading_dense_block_count", 0),
        "sliding_window": metadata("attention.sliding_window"),
        "layer_types": layer_kinds(metadata, config, full=3),
        "rms_norm_eps": metadata("attention.layer_norm_rms_epsilon", None),
        "layer_norm_eps": metadata("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": metadata("logit_scale"),
    }


def _hy3(metadata: Metadata, config: Config) -> Config:
    """Hy3 computes what GLM 4.5 does; its files tell by what they hold which layers are dense and
    how wide the shared expert is."""
    layers = range(config["num_hidden_layers"])
    sparse = [i for i in layers if metadata.has_tensor(f"blk.{i}.ffn_gate_inp.")]
    shared_width = metadata("expert_shared_feed_forward_length", 0)
    return {
        **_by_sigmoid(metadata, config),
        "first_k_dense_replace": sparse[0] if sparse else len(layers),
        "n_shared_experts": shared_width // metadata("expert_feed_forward_length") or None,
    }


def _mimo2_rows(config: Config, layer: int) -> tuple[int, int, int]:
    kind = "swa_" if config["hybrid_layer_pattern"][layer] else ""
    heads, width = config["num_attention_heads"], config["head_dim"]
    kv_heads = config[f"{kind}num_key_value_heads"]
    return heads * width, kv_heads * width, kv_heads * config["v_head_dim"]


def _llama4(metadata: Metadata, config: Config) -> Config:
    """What llama.cpp's llama4.cpp takes as given stands here as well; of its models only Maverick,
    with 128 experts, has no norms of heads."""
    count = metadata("expert_count")
    text = {
        "rope_scaling": None,
        **config,
        **_mixtral(metadata, config),
        "intermediate_size": metadata("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": metadata("interleave_moe_layer_step"),
        "attention_chunk_size": 8192,
        "use_qk_norm": count != 128,
    }
    return {"text_config": text}


MIXTURES: Mapping[str, GGUFFamily] = {
    "qwen3moe": GGUFFamily("qwen3_moe", tensors=_SWITCHED, config=qwen3_moe),
    "qwen3vlmoe": GGUFFamily("qwen3_moe", tensors=_SWITCHED, config=qwen3_moe),
    "qwen2moe": GGUFFamily("qwen2_moe", tensors=_QWEN2_MOE, config=_qwen2_moe),
    "olmoe": GGUFFamily("olmoe", tensors=_SWITCHED, config=_olmoe),
    "granitemoe": GGUFFamily(
        "granitemoe", interleaved_rope=True, tensors=_GRANITE_MOE, config=granite_moe
    ),
    "glm4moe": GGUFFamily("glm4_moe", tensors=_GLM4_MOE, config=_glm4_moe),
    "bailingmoe2": GGUFFamily("glm4_moe", tensors=ROUTED, config=_by_sigmoid, name="bailingmoe2"),
    "dots1": GGUFFamily("glm4_moe", tensors=ROUTED, config=_by_sigmoid, name="dots1"),
    "ernie4_5-moe": GGUFFamily("ernie4_5_moe", tensors=_ERNIE, config=_ernie4_5),
    "deepseek": GGUFFamily("deepseek", interleaved_rope=True, tensors=ROUTED, config=_deepseek),
    "bailingmoe": GGUFFamily("ernie4_5_moe", tensors=ROUTED, config=_bailing, name="bailingmoe"),
    "phimoe": GGUFFamily("phimoe", tensors=_SPARSE_BLOCK, config=_phimoe),
    "hunyuan-moe": GGUFFamily("hunyuan", tensors=_HUNYUAN, config=_hunyuan),
    "exaone-moe": GGUFFamily("exaone_moe", tensors=ROUTED, config=_exaone_moe),
    "mellum": GGUFFamily("mellum", tensors=_SWITCHED, config=_mellum),
    "minimax-m2": GGUFFamily("minimax", tensors=_MINIMAX, config=_minimax),
    "minimax-m3": GGUFFamily(
        "minimax_m3_vl",
        norms_add_one="all",
        prefix="language_model.",
        tensors=_MINIMAX_M3,
        config=_minimax_m3,
    ),
    "gpt-oss": GGUFFamily("gpt_oss", tensors=_GPT_OSS, config=_gpt_oss),
    "llama4": GGUFFamily("llama4", prefix="language_model.", tensors=_LLAMA4, config=_llama4),
    "mimo2": GGUFFamily(
        "mimo_v2_flash",
        tensors={**ROUTED, "attn_sinks": "self_attn.attention_sink_bias"},
        config=_mimo2,
        varied=("attention.head_count_kv",),
        qkv_rows=_mimo2_rows,
        narrow_values=True,
    ),
    "hy_v3": GGUFFamily("glm4_moe", tensors=ROUTED, config=_hy3, name="hy_v3"),
    "cohere2moe": GGUFFamily("cohere2_moe", tensors=ROUTED, config=_cohere2),
}

MIXTRAL = GGUFFamily("mixtral", interleaved_rope=True, tensors=_SPARSE_BLOCK, config=_mixtral)
"""Of the same architecture as a llama there, with experts."""
