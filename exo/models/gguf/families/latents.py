"""GGUF families that attend over latents: DeepSeek V2 and what followed."""

from __future__ import annotations

from collections.abc import Mapping

from exo.models.gguf.families.family import HYPER, Config, GGUFFamily, Metadata, hyper
from exo.models.gguf.families.mixtures import ROUTED, check_sigmoid, deepseek_routing

LATENT_TENSORS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "attn_kv_b": "self_attn.kv_b_proj",
    **ROUTED,
}


INDEXED = {
    **LATENT_TENSORS,
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.k_norm": "self_attn.indexer.k_norm",
}


def latents(metadata: Metadata, config: Config) -> Config:
    """DeepSeek V3, Kimi K2, GLM 4.7 Flash: one class of mlx-lm's computes them all. In files made
    before May 2025 keys and values are in one matrix."""
    turned = metadata("rope.dimension_count")
    is_split = metadata.has_tensor(".attn_k_b.")
    keys, values = (
        metadata(f"attention.{part}_length{'_mla' if is_split else ''}")
        for part in ("key", "value")
    )
    found = {
        **deepseek_routing(metadata, config),
        "moe_layer_freq": 1,
        "q_lora_rank": metadata("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys - turned,
        "v_head_dim": values,
        "head_dim": turned,
        "num_key_value_heads": config["num_attention_heads"],
    }
    if scaling := config.get("rope_scaling"):
        # Its checkpoints have one number for both; the file holds a tenth of it.
        mscale = 10 * metadata("rope.scaling.yarn_log_multiplier", 0.0)
        found["rope_scaling"] = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    return found


def _indexed(metadata: Metadata, config: Config) -> Config:
    """DeepSeek V3.2."""
    check_sigmoid(metadata)
    return {
        **latents(metadata, config),
        **indexer(metadata),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def indexer(metadata: Metadata) -> Config:
    return {
        "index_n_heads": metadata("attention.indexer.head_count"),
        "index_head_dim": metadata("attention.indexer.key_length"),
        "index_topk": metadata("attention.indexer.top_k"),
    }


_GLM_5_2_CONTEXT = 1 << 20
"""Where a file of GLM 5 does not say which layers have an indexer: from this context on it is of
GLM 5.2, of whose layers it is the first three and then every fourth (glm-dsa.cpp)."""


def _glm_dsa(metadata: Metadata, config: Config) -> Config:
    found = _indexed(metadata, config)
    layers = range(config["num_hidden_layers"])
    own = metadata.of_layers("attention.indexer.types")
    if not own and config["max_position_embeddings"] >= _GLM_5_2_CONTEXT:
        own = [int(i < 2 or i % 4 == 2) for i in layers]
    rope = found.get("rope_scaling") or {"rope_type": "default"}
    return {
        **found,
        "rope_parameters": {**rope, "rope_theta": config["rope_theta"]},
        **indexing_layers(own),
    }


def indexing_layers(own: list[int]) -> Config:
    """Of each layer whether it has an indexer, or attends to what the one before it chose."""
    return {"indexer_types": ["full" if one else "shared" for one in own]} if own else {}


def _hy4(metadata: Metadata, config: Config) -> Config:
    """An indexer is not in all of its models."""
    check_sigmoid(metadata)
    found = {
        **latents(metadata, config),
        "scoring_func": "sigmoid",
        **hyper(metadata),
        "hc_magnitude": metadata("hyper_connection.magnitude"),
    }
    if not metadata("attention.indexer.top_k", 0):
        return found
    own = metadata.of_layers("attention.indexer.types")
    return {**found, **indexer(metadata), **indexing_layers(own)}


def _minicpm3(metadata: Metadata, config: Config) -> Config:
    """llama.cpp takes the scales of the one model there is (minicpm3.cpp)."""
    width, turned = metadata("attention.key_length"), metadata("rope.dimension_count")
    return {
        "q_lora_rank": metadata("attention.q_lora_rank"),
        "kv_lora_rank": metadata("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": width - turned,
        "v_head_dim": config["hidden_size"] // config["num_attention_heads"],
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        # mlx-lm's class wants one.
        "rope_scaling": config.get("rope_scaling") or {"type": "longrope"},
    }


def _deepseek_v2(metadata: Metadata, config: Config) -> Config:
    groups = metadata("expert_group_count", 1)
    return {
        "rope_scaling": {"factor": 1.0},  # mlx-lm's class wants one
        **latents(metadata, config),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def _mistral4(metadata: Metadata, config: Config) -> Config:
    """Mistral Large 3 too, whose files say deepseek2."""
    found = latents(metadata, config)
    scaling = found.get("rope_scaling") or {"type": "default", "rope_type": "default"}
    return {
        **found,
        "rope_parameters": {
            "original_max_position_embeddings": config["max_position_embeddings"],
            **scaling,
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": metadata("attention.temperature_scale", 0.0),
        },
    }


MISTRAL4 = GGUFFamily("mistral4", tensors=LATENT_TENSORS, config=_mistral4)


DEEPSEEK_V2 = GGUFFamily("deepseek_v2", tensors=LATENT_TENSORS, config=_deepseek_v2)
"""Of the same architecture as DeepSeek V3 there, and chooses experts in another way."""

LATENTS: Mapping[str, GGUFFamily] = {
    "deepseek2": GGUFFamily("glm4_moe_lite", tensors=LATENT_TENSORS, config=latents),
    "deepseek32": GGUFFamily("deepseek_v32", tensors=INDEXED, config=_indexed),
    "glm-dsa": GGUFFamily("glm_moe_dsa", tensors=INDEXED, config=_glm_dsa),
    "hy_v4": GGUFFamily(
        "hy_v4",
        tensors={
            **INDEXED,
            **HYPER,
            "attn_gate": "self_attn.g_proj",
            "attn_sinks": "self_attn.sinks",
        },
        config=_hy4,
    ),
    "mistral4": MISTRAL4,
    "minicpm3": GGUFFamily("minicpm3", tensors=LATENT_TENSORS, config=_minicpm3),
}
