"""GGUF families that remember a state in some layers, and attend in others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from exo.errors import ModelUnsupported
from exo.models.gguf.families.dense import granite
from exo.models.gguf.families.family import (
    HYPER,
    Config,
    GGUFFamily,
    Metadata,
    experts,
    hyper,
    mlp,
    rows_of_heads,
    shared,
    turned_share,
)
from exo.models.gguf.families.latents import (
    INDEXED,
    LATENT_TENSORS,
    indexer,
    indexing_layers,
    latents,
)
from exo.models.gguf.families.mixtures import (
    check_sigmoid,
    deepseek_routing,
    granite_moe,
    qwen3_moe,
)

DELTA_NETS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
    **experts("mlp.gate", "mlp.switch_mlp"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **shared("mlp.shared_expert"),
}
_LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}
_LFM2_MLP = {
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_MOE = {
    **mlp("feed_forward"),
    **experts("feed_forward.gate", "feed_forward.switch_mlp"),
    "exp_probs_b": "feed_forward.expert_bias",
}


def _state_space(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt": f"{module}.dt_bias",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "attn_norm": "norm",
}
"""Of models whose layers have one part each."""

_GRANITE_HYBRID = {
    **_state_space("mamba"),
    **experts("block_sparse_moe.router.layer", "block_sparse_moe.switch_mlp"),
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_NEMOTRON_H = {
    **_state_space("mixer"),
    **BACKBONE,
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": "mixer.switch_mlp.fc1",
    "ffn_down_exps": "mixer.switch_mlp.fc2",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
}


_FALCON_H1 = {
    **_state_space("mamba"),
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **mlp("feed_forward"),
}


_KIMI_LINEAR = {
    **LATENT_TENSORS,
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv.conv" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
    "exp_probs_b": "mlp.e_score_correction_bias",
}


def _kimi_linear(metadata: Metadata, config: Config) -> Config:
    """A layer without heads of keys remembers a state (kimi-linear.cpp)."""
    check_sigmoid(metadata)
    attending = metadata.of_layers("attention.head_count_kv")
    found = latents(metadata, config)
    return {
        **found,
        "linear_attn_config": {
            "kda_layers": [i + 1 for i, heads in enumerate(attending) if not heads],
            "full_attn_layers": [i + 1 for i, heads in enumerate(attending) if heads],
            "num_heads": config["num_attention_heads"],
            "head_dim": metadata("kda.head_dim"),
            "short_conv_kernel_size": metadata("ssm.conv_kernel"),
        },
        "model_max_length": config["max_position_embeddings"],
        "num_experts": found["n_routed_experts"],
        "num_experts_per_token": found["num_experts_per_tok"],
        "num_shared_experts": found["n_shared_experts"] or 0,
        "num_expert_group": found["n_group"],
        "moe_renormalize": True,
    }


_GLM5_NEXT = {
    **INDEXED,
    **_KIMI_LINEAR,
    **HYPER,
    "indexer_compressor_gate": "self_attn.indexer.index_kpool_compress_gate",
    "indexer_compressor_ape": "self_attn.indexer.index_kpool_compress_ape",
}


def _glm5_next(metadata: Metadata, config: Config) -> Config:
    """GLM 5.3. Of pools that are not whole its queries see the tokens."""
    if not metadata("attention.indexer.kpool_select_tail", True):
        raise ModelUnsupported("a GLM 5.3 that leaves out tokens after the last whole pool")
    found = _kimi_linear(metadata, config)
    own = metadata.of_layers("attention.indexer.types")
    bound = metadata("kda.gate_lower_bound", None)
    return {
        **found,
        **indexer(metadata),
        **indexing_layers(own),
        **hyper(metadata),
        "hc_sinkhorn_iters": metadata("hyper_connection.sinkhorn_iterations"),
        "index_kpool": metadata("attention.indexer.kpool"),
        "linear_attn_config": {**found["linear_attn_config"], "gate_lower_bound": bound},
    }


def _kimi_rows(config: Config, layer: int) -> tuple[int, int, int] | None:
    own = config["linear_attn_config"]
    width = own["num_heads"] * own["head_dim"]
    return (width, width, width) if layer + 1 in own["kda_layers"] else None


_LING_3 = {
    **{key: name.replace("self_attn", "attention") for key, name in _KIMI_LINEAR.items()},
    **{f"ssm_conv1d_{part}": f"attention.{part}_conv1d" for part in "qkv"},
    **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
    "ssm_f_a": "attention.f_proj",
    "ssm_g_a": "attention.g_proj",
    "attn_gate": "attention.g_proj",
    "token_embd": "model.word_embeddings",
    "exp_probs_b": "mlp.gate.expert_bias",
}


def _remembers(config: Config, layer: int) -> bool:
    size, layers = config["layer_group_size"], config["num_hidden_layers"]
    return bool((layer + 1) % size and layer < layers // size * size)


def _ling_3(metadata: Metadata, config: Config) -> Config:
    if not metadata("kda.safe_gate", True):
        raise ModelUnsupported("Ling 3 with gates that are made in another way")
    attending = metadata.of_layers("attention.head_count_kv")
    found = {
        **_kimi_linear(metadata, config),
        "head_dim": metadata("kda.head_dim"),
        "short_conv_kernel_size": metadata("ssm.conv_kernel"),
        "kda_lower_bound": metadata("kda.gate_lower_bound"),
        "layer_group_size": 1 + next((i for i, heads in enumerate(attending) if heads), 0),
        "moe_shared_expert_intermediate_size": metadata(
            "expert_shared_feed_forward_length", metadata("expert_feed_forward_length")
        ),
        "expert_swiglu_limit_list": metadata.numbers("swiglu_clamp_exp"),
        "share_expert_swiglu_limit_list": metadata.numbers("swiglu_clamp_shexp"),
    }
    if any(_remembers(config | found, i) == bool(heads) for i, heads in enumerate(attending)):
        raise ModelUnsupported("Ling 3 with layers that attend in another order")
    return found


def _ling_rows(config: Config, layer: int) -> tuple[int, int, int] | None:
    width = config["num_attention_heads"] * config["head_dim"]
    return (width, width, width) if _remembers(config, layer) else None


def _ling_names(config: Config, layer: int) -> dict[str, str]:
    name = "o_proj" if _remembers(config, layer) else "dense"
    return {"attn_output": f"attention.{name}"}


def _falcon_h1(metadata: Metadata, config: Config) -> Config:
    """llama.cpp's converter puts the multipliers into the weights (conversion/falcon_h1.py)."""
    heads, width = metadata("ssm.time_step_rank"), metadata("ssm.inner_size")
    return {
        "rope_scaling": None,
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_d_ssm": width,
        "mamba_d_state": metadata("ssm.state_size"),
        "mamba_n_groups": metadata("ssm.group_count"),
        "mamba_d_conv": metadata("ssm.conv_kernel"),
        "mamba_proj_bias": metadata.has_tensor(".ssm_in.bias"),
        "mamba_conv_bias": metadata.has_tensor(".ssm_conv1d.bias"),
        "mamba_rms_norm": metadata.has_tensor(".ssm_norm."),
        "projectors_bias": metadata.has_tensor(".ssm_out.bias"),
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
    }


def qwen3_5(metadata: Metadata, config: Config) -> Config:
    keys, values = metadata("ssm.group_count"), metadata("ssm.time_step_rank")
    experts = qwen3_moe(metadata, config) if metadata("expert_count", 0) else {}
    if experts:
        experts["shared_expert_intermediate_size"] = metadata("expert_shared_feed_forward_length")
    return {
        **experts,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": metadata("ssm.state_size"),
        "linear_value_head_dim": metadata("ssm.inner_size") // values,
        "linear_conv_kernel_dim": metadata("ssm.conv_kernel"),
        # llama.cpp's converter puts value heads in another order, see
        # _LinearAttentionVReorderBase in its conversion/qwen.py.
        "linear_value_heads_tiled": keys != values,
        "full_attention_interval": metadata("full_attention_interval", 4),
        "rope_parameters": {
            "type": "default",
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": turned_share(metadata, config),
        },
    }


def _qwen3_next(metadata: Metadata, config: Config) -> Config:
    """Mlx-lm's class of Qwen3.5 computes it, and has the projections apart as its files do.
    In files from before 2026 delta nets' projections are one tensor; value heads stand as they
    did in the checkpoint."""
    return {**qwen3_5(metadata, config), "linear_value_heads_tiled": False}


def attending_rows(config: Config, layer: int) -> tuple[int, int, int] | None:
    """Where a layer attends, of each head a query and its gate; delta nets have all theirs in one
    matrix there, too."""
    if (layer + 1) % config["full_attention_interval"]:
        return None
    queries, keys, values = rows_of_heads(config, layer)
    return 2 * queries, keys, values


def _lfm2(metadata: Metadata, config: Config) -> Config:
    attending = [
        layer for layer, heads in enumerate(metadata.of_layers("attention.head_count_kv")) if heads
    ]
    layers = range(config["num_hidden_layers"])
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_bias": metadata.has_tensor(".shortconv.conv.bias"),
        "conv_L_cache": metadata("shortconv.l_cache"),
        "block_dim": config["hidden_size"],
        "block_ff_dim": config["intermediate_size"],
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": attending,
        "layer_types": ["full_attention" if i in attending else "conv" for i in layers],
    }


def _lfm2_moe(metadata: Metadata, config: Config) -> Config:
    return {
        **_lfm2(metadata, config),
        "num_experts": metadata("expert_count"),
        "num_experts_per_tok": metadata("expert_used_count"),
        "moe_intermediate_size": metadata("expert_feed_forward_length"),
        "num_dense_layers": metadata("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": metadata.has_tensor("exp_probs_b"),
    }


def _granite_hybrid(metadata: Metadata, config: Config) -> Config:
    heads = metadata("ssm.time_step_rank")
    kinds = metadata.of_layers("attention.head_count_kv")
    common = granite_moe if metadata("expert_count", 0) else granite
    found = {
        **common(metadata, config),
        "layer_types": ["attention" if count else "mamba" for count in kinds],
        "mamba_n_heads": heads,
        "mamba_d_head": metadata("ssm.inner_size") // heads,
        "mamba_d_state": metadata("ssm.state_size"),
        "mamba_n_groups": metadata("ssm.group_count"),
        "mamba_d_conv": metadata("ssm.conv_kernel"),
        "mamba_proj_bias": metadata.has_tensor(".ssm_in.bias"),
        "mamba_conv_bias": metadata.has_tensor(".ssm_conv1d.bias"),
        "shared_intermediate_size": metadata("expert_shared_feed_forward_length", None),
    }
    # llama.cpp's switch for whether these layers know positions at all (granite-hybrid.cpp).
    if not metadata("rope.scaling.finetuned", True):
        found["position_embedding_type"] = "nope"
    return found


def _nemotron_h(metadata: Metadata, config: Config) -> Config:
    """A layer attends, or has an MLP, or else a state (nemotron-h.cpp)."""
    heads = metadata("ssm.time_step_rank")
    attending = metadata.of_layers("attention.head_count_kv")
    wide = metadata.of_layers("feed_forward_length")
    mlp = "E" if metadata("expert_count", 0) else "-"
    kinds = zip(attending, wide, strict=True)
    found = {
        "hybrid_override_pattern": ["*" if a else mlp if w else "M" for a, w in kinds],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": metadata("ssm.inner_size") // heads,
        "ssm_state_size": metadata("ssm.state_size"),
        "n_groups": metadata("ssm.group_count"),
        "conv_kernel": metadata("ssm.conv_kernel"),
        "mamba_proj_bias": metadata.has_tensor(".ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor(".ssm_conv1d.bias"),
        "use_bias": metadata.has_tensor(".ssm_in.bias"),
        "mlp_bias": config["mlp_bias"] or metadata.has_tensor(".ffn_up_shexp.bias"),
    }
    if mlp == "E":
        found |= deepseek_routing(metadata, config)
        width = metadata("expert_shared_feed_forward_length", None)
        found["moe_shared_expert_intermediate_size"] = width
        found["moe_latent_size"] = metadata("moe_latent_size", None)
    return found


def _mamba2(metadata: Metadata, config: Config) -> Config:
    """Codestral Mamba and the models of the paper (arXiv:2405.21060)."""
    heads = metadata("ssm.time_step_rank")
    return {
        "num_heads": heads,
        "head_dim": metadata("ssm.inner_size") // heads,
        "state_size": metadata("ssm.state_size"),
        "n_groups": metadata("ssm.group_count"),
        "conv_kernel": metadata("ssm.conv_kernel"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "use_bias": metadata.has_tensor(".ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor(".ssm_conv1d.bias"),
        "time_step_limit": [0.0, 1e30],
        "time_step_rank": heads,
    }


_MAMBA_2 = {
    **_state_space("mixer"),
    **BACKBONE,
}

_NEMOTRON = GGUFFamily(
    "nemotron_h", layers="backbone.layers", tensors=_NEMOTRON_H, config=_nemotron_h
)

_QWEN3_5 = GGUFFamily(
    "qwen3_5_moe",
    prefix="language_model.",
    tensors=DELTA_NETS,
    config=qwen3_5,
    qkv_rows=attending_rows,
)

RECURRENT: Mapping[str, GGUFFamily] = {
    "qwen35": replace(_QWEN3_5, model_type="qwen3_5"),
    "qwen35moe": _QWEN3_5,
    "qwen3next": replace(_QWEN3_5, config=_qwen3_next, name="qwen3next"),
    "granitehybrid": GGUFFamily(
        "granitemoehybrid", interleaved_rope=True, tensors=_GRANITE_HYBRID, config=_granite_hybrid
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "bailingmoe3": GGUFFamily(
        "bailing_moe_v3",
        tensors=_LING_3,
        config=_ling_3,
        qkv_rows=_ling_rows,
        of_layer=_ling_names,
    ),
    "kimi-linear": GGUFFamily(
        "kimi_linear", tensors=_KIMI_LINEAR, config=_kimi_linear, qkv_rows=_kimi_rows
    ),
    "glm5-next": GGUFFamily(
        "glm5_next", tensors=_GLM5_NEXT, config=_glm5_next, qkv_rows=_kimi_rows
    ),
    "mamba2": GGUFFamily("mamba2", layers="backbone.layers", tensors=_MAMBA_2, config=_mamba2),
    "falcon-h1": GGUFFamily("falcon_h1", tensors=_FALCON_H1, config=_falcon_h1),
    "lfm2": GGUFFamily("lfm2", tensors=_LFM2 | _LFM2_MLP, config=_lfm2),
    "lfm2moe": GGUFFamily("lfm2_moe", tensors=_LFM2 | _LFM2_MOE, config=_lfm2_moe),
}
