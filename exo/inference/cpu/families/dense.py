"""Families whose layers attend and have one MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.family import Family, Growth, Mixer, every_layer
from exo.inference.cpu.families.positions import (
    Config,
    cohere2_rope,
    cohere2_window,
    exaone4_rope,
    exaone4_window,
    gemma3_rope,
    gemma3_window,
    hunyuan_rope,
    interleaved_rope,
    llama_rope,
    of_rope_parameters,
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
from exo.inference.cpu.families.rope import RopeTable

SANDWICH_NORMS = {
    "attention_norm": "input_layernorm",
    "after_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}
_OLMO2_NORMS = {
    "after_attention_norm": "post_attention_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}


_BITNET_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_inner_norm": "self_attn.attn_sub_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_inner_norm": "mlp.ffn_sub_norm",
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


def minicpm_scales(config: Config) -> dict[str, float]:
    """As in the models' own code; where head and embedding are one, mlx-lm's class leaves out the
    last, see exo/inference/mlx/corrections.py."""
    return {
        "embedding_scale": config["scale_emb"],
        "residual_scale": config["scale_depth"] / math.sqrt(config["num_hidden_layers"]),
        "logits_scale": config["dim_model_base"] / config["hidden_size"],
    }


def _eps_of(key: str, **defaults: object) -> Callable[[Config], Config]:
    """A configuration that has its norms' epsilon under another name."""
    return lambda config: {**defaults, **config, "rms_norm_eps": config.get(key, 1e-5)}


def _cohere_scales(config: Config) -> dict[str, float]:
    return {"logits_scale": config.get("logit_scale", 0.0625)}


def _nemotron_rope(config: Config, layer: int) -> RopeTable | None:
    return partial_rope({"partial_rotary_factor": 0.5, "rope_traditional": False, **config}, layer)


def _stablelm_is_parallel(config: Config) -> bool:
    return bool(config.get("use_parallel_residual"))


def _ministral3_config(config: Config) -> Config:
    rope = config["rope_parameters"]
    return {**config, "rope_theta": rope["rope_theta"], "rope_scaling": rope}


def _ministral3_growth(config: Config, layer: int) -> Growth:
    rope = config["rope_parameters"]
    return Growth(rope["llama_4_scaling_beta"], int(rope["original_max_position_embeddings"]))


def _gpt_neox_config(config: Config) -> Config:
    return {
        **config,
        "num_key_value_heads": None,
        "rms_norm_eps": config["layer_norm_eps"],
        "rope_theta": config["rotary_emb_base"],
        "partial_rotary_factor": config["rotary_pct"],
        "rope_scaling": None,
    }


_GPT_NEOX_NAMES = {
    "gpt_neox": "model",
    "model.h": "model.layers",
    "model.embed_out": "lm_head",
    "embed_out": "lm_head",
    "embed_in": "embed_tokens",
    "final_layer_norm": "norm",
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
}


def _falcon_config(config: Config) -> Config:
    """As transformers' modeling_falcon.py reads it; mlx-lm has no class of it.

    Raises:
        ModelUnsupported: positions that are not turned, as in falcon-rw.
    """
    if config.get("alibi"):
        raise ModelUnsupported("a Falcon with ALiBi: exo runs those with rotary positions")
    is_new = bool(config.get("new_decoder_architecture"))
    has_own_keys = is_new or not config.get("multi_query", True)
    heads = config["num_attention_heads"]
    return {
        "rope_theta": 10000.0,
        **config,
        "num_key_value_heads": (config.get("num_kv_heads") or heads) if has_own_keys else 1,
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def _glm_rope(config: Config, layer: int) -> RopeTable | None:
    """Half of each head, as in transformers' configuration_glm.py, unless it is said."""
    share = config.get("partial_rotary_factor", 0.5)
    return partial_rope({**config, "partial_rotary_factor": share, "rope_traditional": True}, layer)


_PHI_NAMES = {
    "self_attn.dense": "self_attn.o_proj",
    "fc1": "up_proj",
    "fc2": "down_proj",
    "final_layernorm": "norm",
}

_FALCON_NAMES = {
    "transformer": "model",
    "model.h": "model.layers",
    "word_embeddings": "embed_tokens",
    "ln_f": "norm",
    "ln_attn": "input_layernorm",
    "ln_mlp": "post_attention_layernorm",
    "self_attention.query_key_value": "self_attn.qkv_proj",
    "self_attention.dense": "self_attn.o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
}

_INTERNLM2_NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wqkv": "self_attn.qkv_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "output": "lm_head",
}
_EXAONE_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h": "model.layers",
    "transformer.ln_f": "model.norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.attention": "self_attn",
    "out_proj": "o_proj",
    "c_fc_0": "gate_proj",
    "c_fc_1": "up_proj",
    "c_proj": "down_proj",
}


def _exaone_config(config: Config) -> Config:
    return {
        **config,
        "num_hidden_layers": config["num_layers"],
        "rms_norm_eps": config["layer_norm_epsilon"],
    }


def _block(config: Config, layer: int, part: str) -> Config:
    """Of a Nemotron that was made by search: what a layer has of an attention or an MLP."""
    block: Config = config["block_configs"][layer][part]
    if block.get("replace_with_linear"):
        raise ModelUnsupported(f"layer {layer} has one matrix in place of its {part}")
    return block


def _nas_mixer(config: Config, layer: int) -> Mixer:
    return "nothing" if _block(config, layer, "attention").get("no_op") else "attention"


def _nas_heads(config: Config, layer: int) -> tuple[int, int]:
    heads = int(config["num_attention_heads"])
    group = _block(config, layer, "attention").get("n_heads_in_group") or heads
    return heads // int(group), int(config["hidden_size"]) // heads


def _nanbeige_config(config: Config) -> Config:
    unread = ("enable_double_loop_split", "loop_share_kv", "enable_depth_attention")
    if asked := [key for key in unread if config.get(key)]:
        raise ModelUnsupported(f"a Nanbeige with {asked[0]}")
    return config


def _nanbeige_loops(config: Config) -> int:
    """Checkpoints trained with a loss for each loop have a weight for each but the first."""
    weights = config.get("loop_loss_weights")
    return len(weights) + 1 if weights else int(config.get("num_loops") or 1)


def _granite_swa_config(config: Config) -> Config:
    """As transformers' configuration_granite_swa.py fills in what a configuration leaves out;
    mlx-lm has no class of it."""
    layers = range(int(config["num_hidden_layers"]))
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in layers]
    rope = of_rope_parameters(config, 10000.0)
    return {
        "sliding_window": 128,
        **config,
        **rope,
        "layer_types": config.get("layer_types") or kinds,
        "layer_rope_theta": config.get("layer_rope_theta") or [rope["rope_theta"] for _ in layers],
    }


def _granite_swa_rope(config: Config, layer: int) -> RopeTable | None:
    """A base for each layer; 0: it knows no positions."""
    theta = config["layer_rope_theta"][layer]
    return llama_rope({**config, "rope_theta": theta}, layer) if theta else None


_LLAMA = Family(window=typed_window)
_COHERE = Family(
    tied_by_config=False,
    layer_norm=True,
    parallel=lambda config: True,
    norms={"attention_norm": "input_layernorm"},
    config=_eps_of("layer_norm_eps"),
    scales=_cohere_scales,
)
_QWEN3 = Family(rope=qwen3_rope, head_norms=True)
_GEMMA3 = Family(
    tied=None,
    tied_by_config=False,
    head_dim=256,
    activation="GELU_TANH",
    norms=SANDWICH_NORMS,
    norm_offset=1.0,
    head_norms=True,
    rope=gemma3_rope,
    window=gemma3_window,
    scales=_gemma3_scales,
)

DENSE: Mapping[str, Family] = {
    "llama": _LLAMA,
    "qwen2": Family(rope=qwen2_rope, explicit_head_dim=False),
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "ministral3": Family(config=_ministral3_config, growth=_ministral3_growth, window=typed_window),
    "cohere": replace(
        _COHERE,
        explicit_head_dim=False,
        rope=lambda config, layer: interleaved_rope({"rope_theta": 8000000.0, **config}, layer),
    ),
    "cohere2": replace(_COHERE, head_dim=128, rope=cohere2_rope, window=cohere2_window),
    "stablelm": Family(
        tied=False,
        tied_by_config=False,
        layer_norm=True,
        parallel=_stablelm_is_parallel,
        explicit_head_dim=False,
        rope=partial_rope,
        config=_eps_of("layer_norm_eps", rope_scaling=None),
    ),
    "nemotron": Family(
        tied=False,
        layer_norm=True,
        norm_offset=1.0,
        activation="RELU2",
        gated=False,
        rope=_nemotron_rope,
        config=_eps_of("norm_eps"),
    ),
    "starcoder2": Family(
        layer_norm=True,
        activation="GELU",
        gated=False,
        explicit_head_dim=False,
        rope=plain_rope,
        config=_eps_of("norm_epsilon", rope_theta=100000.0),
        renames={"c_fc": "up_proj", "c_proj": "down_proj"},
    ),
    "gpt_neox": Family(
        tied=False,
        tied_by_config=False,
        layer_norm=True,
        activation="GELU_TANH",
        gated=False,
        fused_attention="by_kv_head",
        explicit_head_dim=False,
        parallel=lambda config: bool(config.get("use_parallel_residual", True)),
        rope=partial_rope,
        config=_gpt_neox_config,
        renames=_GPT_NEOX_NAMES,
    ),
    "falcon": Family(
        layer_norm=True,
        activation="GELU",
        gated=False,
        fused_attention="by_kv_head",
        explicit_head_dim=False,
        parallel=lambda config: bool(
            config.get("new_decoder_architecture") or config.get("parallel_attn", True)
        ),
        rope=plain_rope,
        config=_falcon_config,
        renames=_FALCON_NAMES,
    ),
    "apertus": Family(
        tied=False,
        head_norms=True,
        gated=False,
        xielu=True,
        norms={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    ),
    "smollm3": Family(rope=smollm3_rope, window=typed_window),
    "phi": Family(
        tied=False,
        tied_by_config=False,
        layer_norm=True,
        activation="GELU_TANH",
        gated=False,
        explicit_head_dim=False,
        parallel=lambda config: True,
        norms={"attention_norm": "input_layernorm"},
        rope=lambda config, layer: partial_rope({"partial_rotary_factor": 0.4, **config}, layer),
        config=_eps_of("layer_norm_eps", rope_theta=10000.0, rope_scaling=None),
        renames=_PHI_NAMES,
    ),
    "phi3": Family(
        tied=False,
        fused_attention="stacked",
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
        norms=SANDWICH_NORMS,
        norm_offset=1.0,
        rope=plain_rope,
        scales=_gemma2_scales,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "granite": Family(scales=granite_scales, explicit_head_dim=False),
    "granite_swa": Family(
        scales=granite_scales,
        config=_granite_swa_config,
        rope=_granite_swa_rope,
        window=typed_window,
        sinks=every_layer,
    ),
    "nanbeige": Family(tied=False, config=_nanbeige_config, loops=_nanbeige_loops),
    "bitnet": Family(activation="RELU2", norms=_BITNET_NORMS),
    "arcee": Family(tied=False, gated=False, activation="RELU2"),
    "olmo2": Family(norms=_OLMO2_NORMS, head_norms=True),
    "glm4": Family(
        tied=False,
        tied_by_config=False,
        norms=_GLM4_NORMS,
        rope=lambda config, layer: partial_rope({"rope_traditional": True, **config}, layer),
    ),
    "glm": Family(rope=_glm_rope, config=lambda config: {**config, "rope_scaling": None}),
    "ernie4_5": Family(rope=interleaved_rope),
    "seed_oss": Family(),
    "internlm2": Family(
        tied=False,
        fused_attention="by_kv_head",
        explicit_head_dim=False,
        renames=_INTERNLM2_NAMES,
    ),
    "nemotron-nas": Family(
        tied=False,
        explicit_head_dim=False,
        mixer=_nas_mixer,
        mlps=lambda config, layer: not _block(config, layer, "ffn").get("no_op"),
        head_shape=_nas_heads,
        rope=lambda config, layer: llama_rope({"rope_theta": 500000.0, **config}, layer),
    ),
    "mimo": Family(tied=False, explicit_head_dim=False),
    "internlm3": Family(tied=False, explicit_head_dim=False),
    "exaone": Family(config=_exaone_config, renames=_EXAONE_NAMES),
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
        scales=minicpm_scales,
    ),
    "hunyuan_v1_dense": Family(
        tied=False,
        head_norms=True,
        norm_after_rope=True,
        rope=hunyuan_rope,
        renames={"query_layernorm": "q_norm", "key_layernorm": "k_norm"},
    ),
}
