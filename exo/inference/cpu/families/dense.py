"""Families whose layers attend and have one MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping

from exo.inference.cpu.families.family import Family
from exo.inference.cpu.families.positions import (
    Config,
    exaone4_rope,
    exaone4_window,
    gemma3_rope,
    gemma3_window,
    hunyuan_rope,
    interleaved_rope,
    llama_rope,
    olmo3_rope,
    olmo3_window,
    partial_rope,
    phi3_rope,
    plain_rope,
    qwen2_rope,
    qwen3_rope,
    smollm3_rope,
    typed_window,
)

_SANDWICH_NORMS = {
    "attention_norm": "input_layernorm",
    "after_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}
_OLMO2_NORMS = {
    "after_attention_norm": "post_attention_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}


_GLM4_NORMS = {
    "attention_norm": "input_layernorm",
    "after_attention_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "after_mlp_norm": "post_mlp_layernorm",
}


def _bfloat16(x: float) -> float:
    """`x` as the nearest bfloat16: gemma 3 rounds its embedding's scale."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


def _gemma_scales(config: Config) -> dict[str, float]:
    return {"embedding_scale": math.sqrt(config["hidden_size"])}


def _gemma2_scales(config: Config) -> dict[str, float]:
    return {
        **_gemma_scales(config),
        "attention_scale": config.get("query_pre_attn_scalar", 144.0) ** -0.5,
        "attention_soft_cap": config.get("attn_logit_softcapping", 50.0),
        "logits_soft_cap": config.get("final_logit_softcapping", 30.0),
    }


def _gemma3_scales(config: Config) -> dict[str, float]:
    return {
        "embedding_scale": _bfloat16(math.sqrt(config.get("hidden_size", 1152))),
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
    }


def granite_scales(config: Config) -> dict[str, float]:
    return {
        "attention_scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logits_scale": 1 / config["logits_scaling"],
    }


def _minicpm_scales(config: Config) -> dict[str, float]:
    tied = config.get("tie_word_embeddings", False)
    return {
        "embedding_scale": config["scale_emb"],
        "residual_scale": config["scale_depth"] / math.sqrt(config["num_hidden_layers"]),
        "logits_scale": 1.0 if tied else config["dim_model_base"] / config["hidden_size"],
    }


_LLAMA = Family(window=typed_window)
_QWEN3 = Family(rope=qwen3_rope, head_norms=True)
_GEMMA3 = Family(
    tied=None,
    tied_by_config=False,
    head_dim=256,
    activation="GELU_TANH",
    norms=_SANDWICH_NORMS,
    norm_offset=1.0,
    head_norms=True,
    rope=gemma3_rope,
    window=gemma3_window,
    scales=_gemma3_scales,
)

DENSE: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Family(rope=qwen2_rope, explicit_head_dim=False),
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "smollm3": Family(rope=smollm3_rope, window=typed_window),
    "phi3": Family(
        tied=False,
        fused_attention=True,
        fused_mlp=True,
        rope=phi3_rope,
        explicit_head_dim=False,
    ),
    "gemma": Family(
        tied_by_config=False,
        activation="GELU",
        norm_offset=1.0,
        rope=plain_rope,
        scales=_gemma_scales,
    ),
    "gemma2": Family(
        tied_by_config=False,
        activation="GELU_TANH",
        norms=_SANDWICH_NORMS,
        norm_offset=1.0,
        rope=plain_rope,
        scales=_gemma2_scales,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "granite": Family(scales=granite_scales, explicit_head_dim=False),
    "olmo2": Family(norms=_OLMO2_NORMS, head_norms=True),
    "glm4": Family(
        tied=False,
        tied_by_config=False,
        norms=_GLM4_NORMS,
        fused_mlp=True,
        rope=lambda config, layer: partial_rope({"rope_traditional": True, **config}, layer),
    ),
    "ernie4_5": Family(rope=interleaved_rope),
    "seed_oss": Family(),
    "exaone4": Family(
        norms=_OLMO2_NORMS, head_norms=True, rope=exaone4_rope, window=exaone4_window
    ),
    "olmo3": Family(
        tied=False, norms=_OLMO2_NORMS, head_norms=True, rope=olmo3_rope, window=olmo3_window
    ),
    "minicpm": Family(
        tied=False,
        explicit_head_dim=False,
        rope=lambda config, layer: llama_rope({"rope_theta": 1000000.0, **config}, layer),
        scales=_minicpm_scales,
    ),
    "hunyuan_v1_dense": Family(
        tied=False,
        head_norms=True,
        norm_after_rope=True,
        rope=hunyuan_rope,
        renames={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
    ),
}
