"""Families that attend over latents (arXiv:2405.04434): DeepSeek V2 and what followed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from exo.inference.cpu.families.dense import minicpm_scales
from exo.inference.cpu.families.experts import (
    GLM4_EXPERTS,
    deepseek_groups,
    deepseek_layers,
    routed_scale,
)
from exo.inference.cpu.families.family import Experts, Family, Growth, every_layer
from exo.inference.cpu.families.positions import Config, latent_rope, minicpm3_rope


def latent_scales(config: Config) -> dict[str, float]:
    """YaRN's correction of the temperature (arXiv:2309.00071, 3.4), squared: of query and key."""
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = config.get("rope_scaling") or {}
    if (factor := scaling.get("factor", 1.0)) > 1 and scaling.get("mscale_all_dim"):
        scale *= (0.1 * scaling["mscale_all_dim"] * math.log(factor) + 1.0) ** 2
    return {"attention_scale": scale}


def _glm_dsa_config(config: Config) -> Config:
    rope = config["rope_parameters"]
    return {
        "indexer_rope_interleave": True,
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope,
    }


def _hy4_config(config: Config) -> Config:
    """As its GGUF files have it, an indexer turning the last numbers of its heads; mlx-lm has no
    class of it. (For its safetensors transformers and llama.cpp pair the numbers otherwise.)"""
    return {
        "indexer_rope_interleave": True,
        "indexer_rope_last": True,
        "indexer_norm_eps": config["rms_norm_eps"],
        **config,
    }


def _mistral4_config(config: Config) -> Config:
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", 100000.0) if rope else config.get("rope_theta", 10000.0)
    return {**config, "rope_theta": theta, "rope_scaling": rope or config.get("rope_scaling")}


def _mistral4_growth(config: Config, layer: int) -> Growth:
    rope = config["rope_parameters"]
    return Growth(rope["llama_4_scaling_beta"], int(rope["original_max_position_embeddings"]))


def unscaled_latents(config: Config) -> dict[str, float]:
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {"attention_scale": width**-0.5}


def _minicpm3_config(config: Config) -> Config:
    width = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return {"v_head_dim": width, **config}


def _minicpm3_scales(config: Config) -> dict[str, float]:
    return {**unscaled_latents(config), **minicpm_scales(config)}


def _deepseek_v2_groups(config: Config) -> tuple[int, int, int]:
    if config.get("topk_method") != "group_limited_greedy":
        return 1, 1, 1
    return int(config.get("n_group") or 1), int(config.get("topk_group") or 1), 1


_DEEPSEEK_V3 = Family(
    tied=False,
    tied_by_config=False,
    latent=True,
    rope=latent_rope,
    scales=latent_scales,
    experts=replace(
        GLM4_EXPERTS,
        layers=deepseek_layers,
        normalizes=lambda config: bool(config.get("norm_topk_prob", True)),
    ),
)

LATENTS: Mapping[str, Family] = {
    "deepseek_v2": replace(
        _DEEPSEEK_V3,
        experts=Experts(
            deepseek_layers,
            normalizes=lambda config: False,
            count="n_routed_experts",
            shared="shared_experts",
            scale=routed_scale,
            groups=_deepseek_v2_groups,
        ),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(
        _DEEPSEEK_V3, config=lambda config: {"indexer_rope_interleave": False, **config}
    ),
    "glm_moe_dsa": replace(_DEEPSEEK_V3, config=_glm_dsa_config),
    "hy_v4": replace(
        _DEEPSEEK_V3,
        hyper=True,
        output_gate="sigmoid",
        sinks=every_layer,
        limits=lambda config, layer: (float(config.get("swiglu_limit") or 0.0), 0.0),
        limits_inputs=True,
        config=_hy4_config,
    ),
    "mistral4": replace(
        _DEEPSEEK_V3,
        tied_by_config=True,
        config=_mistral4_config,
        growth=_mistral4_growth,
        experts=Experts(
            deepseek_layers,
            count="n_routed_experts",
            shared="shared_experts",
            scale=routed_scale,
            groups=deepseek_groups,
        ),
    ),
    "youtu_llm": replace(
        _DEEPSEEK_V3,
        tied=True,
        tied_by_config=True,
        latent_eps=0.0,
        scales=unscaled_latents,
        experts=None,
    ),
    "minicpm3": replace(
        _DEEPSEEK_V3,
        tied_by_config=True,
        latent_eps=1e-5,
        rope=minicpm3_rope,
        scales=_minicpm3_scales,
        config=_minicpm3_config,
        experts=None,
    ),
    "glm4_moe_lite": replace(_DEEPSEEK_V3, latent_eps=0.0),
}
