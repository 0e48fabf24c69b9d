"""A GGUF file's metadata as the config.json of the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from exo.errors import ModelUnsupported
from exo.models.gguf.file import GGUF
from exo.models.gguf.names import family_of

Value = Callable[..., Any]
"""(key without the architecture, default) to what the metadata says; without a default it must."""


FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the configuration."""


def config_of(gguf: GGUF) -> dict[str, Any]:
    """config.json as mlx-lm's class of the architecture reads it; token ids are the tokenizer's
    part.

    Raises:
        ModelUnsupported: an architecture, or a way of scaling positions, that exo does not read.
    """

    def value(key: str, *default: Any) -> Any:
        found = gguf.metadata.get(f"{gguf.architecture}.{key}", *default)
        if found is None and not default:
            raise ModelUnsupported(f"the GGUF file has no {gguf.architecture}.{key}")
        if isinstance(found, np.ndarray):
            # Some files hold a number for each layer where all have the same.
            if len(set(found.tolist())) != 1:
                raise ModelUnsupported(f"{gguf.architecture}.{key} differs from layer to layer")
            return found[0].item()
        return found

    kv_heads = _kv_heads(gguf)
    family = family_of(gguf.architecture, mixture=bool(value("expert_count", 0)))
    heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden // heads)
    is_latent = value("attention.kv_lora_rank", 0)
    if value("attention.value_length", head_dim) != head_dim and not is_latent:
        raise ModelUnsupported("keys and values of different lengths")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": value("block_count") - value("nextn_predict_layers", 0),
        "num_nextn_predict_layers": value("nextn_predict_layers", 0),
        "intermediate_size": value("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads) if kv_heads else heads,
        "head_dim": head_dim,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(gguf.metadata["tokenizer.ggml.tokens"]),
        "rope_theta": value("rope.freq_base", 10000.0),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }
    if (scaling := _rope_scaling(gguf, value, config)) is not None:
        config["rope_scaling"] = scaling
    own = _OWN.get(family.model_type)
    return {**config, **(own(gguf, value, config) if own else {})}


def _kv_heads(gguf: GGUF) -> list[int]:
    """One number for all layers, or one for each: 0 where a layer does not attend.

    Raises:
        ModelUnsupported: layers that attend with different numbers of heads.
    """
    key = f"{gguf.architecture}.attention.head_count_kv"
    found = [int(count) for count in np.atleast_1d(gguf.metadata.get(key, []))]
    if len(set(found) - {0}) > 1:
        raise ModelUnsupported(f"{key} differs from layer to layer")
    return found


def _rope_scaling(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any] | None:
    factors, long, short = map(gguf.floats, FACTORS)
    if factors is not None:
        return _llama3_scaling(factors, config["head_dim"], config["rope_theta"])
    original = value("rope.scaling.original_context_length", None)
    if long is not None and short is not None:
        return {
            "type": "longrope",
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": original,
        }
    kind = value("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"type": kind, "rope_type": kind, "factor": value("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (found := value(f"rope.scaling.{theirs}", None)) is not None:
                scaling[ours] = found
    elif kind != "linear":
        raise ModelUnsupported(f"the GGUF file asks for rope scaling {kind!r}")
    return scaling


def _llama3_scaling(
    factors: npt.NDArray[np.float32], head_dim: int, theta: float
) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF stores as the factor of each frequency.

    Formula: section 3.4.1 of https://arxiv.org/abs/2407.21783 as in Meta's reference code; the
    parameters are checked against the stored factors.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / 3.0, 0, 1)
    expected = 1 / ((1 - smooth) / factors.max() + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-2):
        raise ModelUnsupported("the GGUF file's rope_freqs are not those of Llama 3")
    return scaling


def _gemma2(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": value("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": value("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
    }


def _gemma3(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": value("attention.sliding_window", 512),
        "sliding_window_pattern": value("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": value("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
    }


def _query_scalar(config: dict[str, Any], layers_of_27b: int) -> int:
    """What attention divides by the root of. The files do not say; llama.cpp goes by the number of
    layers (gemma2.cpp, gemma3.cpp)."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    turned = value("rope.dimension_count", config["head_dim"])
    original = value("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "partial_rotary_factor": turned / config["head_dim"],
        "original_max_position_embeddings": original,
    }


def _granite(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": value("attention.scale"),
        "embedding_multiplier": value("embedding_scale"),
        "residual_multiplier": value("residual_scale"),
        "logits_scaling": value("logit_scale"),
    }


def _qwen3_moe(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    used = value("expert_used_count")
    return {"num_local_experts": value("expert_count"), "num_experts_per_tok": used}


def _gpt_oss(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    experts = {
        "num_local_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "intermediate_size": value("expert_feed_forward_length"),
        "sliding_window": value("attention.sliding_window", 128),
    }
    if (scaling := config.get("rope_scaling")) is not None:
        # As its checkpoint says, which GGUF leaves out.
        experts["rope_scaling"] = {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            **scaling,
            "truncate": False,
        }
    return experts


def _qwen3_5(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    keys, values = value("ssm.group_count"), value("ssm.time_step_rank")
    turned = value("rope.dimension_count", config["head_dim"])
    experts = _qwen3_moe(gguf, value, config) if value("expert_count", 0) else {}
    if experts:
        experts["shared_expert_intermediate_size"] = value("expert_shared_feed_forward_length")
    return {
        **experts,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": value("ssm.state_size"),
        "linear_value_head_dim": value("ssm.inner_size") // values,
        "linear_conv_kernel_dim": value("ssm.conv_kernel"),
        # llama.cpp's converter puts value heads in another order, see
        # _LinearAttentionVReorderBase in its conversion/qwen.py.
        "linear_value_heads_tiled": keys != values,
        "full_attention_interval": value("full_attention_interval", 4),
        "rope_parameters": {
            "type": "default",
            "rope_theta": config["rope_theta"],
            "partial_rotary_factor": turned / config["head_dim"],
        },
    }


def _latents(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek V3, Kimi K2, GLM 4.7 Flash: one class of mlx-lm's computes them all.

    Raises:
        ModelUnsupported: DeepSeek V2's way of choosing experts, keys and values in one matrix.
    """
    if value("expert_gating_func", 0) != 2 or "blk.0.attn_k_b.weight" not in gguf.tensors:
        raise ModelUnsupported(
            "the GGUF file is of DeepSeek V2, or was made before May 2025; of this architecture "
            "files of V3 and later are read. Use the model's safetensors instead"
        )
    turned = value("rope.dimension_count")
    found = {
        **_qwen3_moe(gguf, value, config),
        "n_routed_experts": value("expert_count"),
        "n_shared_experts": value("expert_shared_count", 0) or None,
        "n_group": value("expert_group_count", 1),
        "topk_group": value("expert_group_used_count", 1),
        "routed_scaling_factor": value("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(value("expert_weights_norm", False)),
        "first_k_dense_replace": value("leading_dense_block_count", 0),
        "moe_layer_freq": 1,
        "q_lora_rank": value("attention.q_lora_rank", None),
        "kv_lora_rank": value("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": value("attention.key_length_mla") - turned,
        "v_head_dim": value("attention.value_length_mla"),
        "head_dim": turned,
        "num_key_value_heads": config["num_attention_heads"],
    }
    if scaling := config.get("rope_scaling"):
        # Its checkpoints have one number for both; the file holds a tenth of it.
        mscale = 10 * value("rope.scaling.yarn_log_multiplier", 0.0)
        found["rope_scaling"] = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    return found


def _lfm2(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    attending = [layer for layer, heads in enumerate(_kv_heads(gguf)) if heads]
    layers = range(config["num_hidden_layers"])
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_bias": "blk.0.shortconv.conv.bias" in gguf.tensors,
        "conv_L_cache": value("shortconv.l_cache"),
        "block_dim": config["hidden_size"],
        "block_ff_dim": config["intermediate_size"],
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": attending,
        "layer_types": ["full_attention" if i in attending else "conv" for i in layers],
    }


def _lfm2_moe(gguf: GGUF, value: Value, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_lfm2(gguf, value, config),
        "num_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "num_dense_layers": value("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": any("exp_probs_b" in name for name in gguf.tensors),
    }


_OWN: dict[str, Callable[[GGUF, Value, dict[str, Any]], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "glm4_moe_lite": _latents,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
}
