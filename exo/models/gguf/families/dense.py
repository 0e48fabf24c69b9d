"""GGUF families whose layers attend and have one MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from exo.errors import ModelUnsupported
from exo.models.gguf.families.family import (
    Config,
    GGUFFamily,
    Metadata,
    joined_there_too,
    layer_kinds,
    qkv_rows,
    turned_share,
)

SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2 = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def _gemma2(metadata: Metadata, config: Config) -> Config:
    return {
        "attn_logit_softcapping": metadata("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
    }


def _gemma3(metadata: Metadata, config: Config) -> Config:
    return {
        "sliding_window": metadata("attention.sliding_window", 512),
        "sliding_window_pattern": _every(metadata, 6),
        "rope_local_base_freq": metadata("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
    }


def _every(metadata: Metadata, usual: int) -> int:
    """Which layer of so many neighbours sees all: llama.cpp writes their number, Ollama for each
    layer whether it sees a window."""
    found = metadata.numbers("attention.sliding_window_pattern")
    if len(found) < 2:
        return int(found[0]) if found else usual
    every = found.index(0) + 1 if 0 in found else len(found) + 1
    if any(bool(slides) != bool((layer + 1) % every) for layer, slides in enumerate(found)):
        raise ModelUnsupported(f"windows in layers as {found}")
    return every


def _query_scalar(config: Config, layers_of_27b: int) -> int:
    """What attention divides by the root of. The files do not say; llama.cpp goes by the number of
    layers (gemma2.cpp, gemma3.cpp)."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(metadata: Metadata, config: Config) -> Config:
    turned = metadata("rope.dimension_count", config["head_dim"])
    original = metadata("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "partial_rotary_factor": turned / config["head_dim"],
        "original_max_position_embeddings": original,
    }


def granite(metadata: Metadata, config: Config) -> Config:
    return {
        "attention_multiplier": metadata("attention.scale"),
        "embedding_multiplier": metadata("embedding_scale"),
        "residual_multiplier": metadata("residual_scale"),
        "logits_scaling": metadata("logit_scale"),
    }


def _partial(metadata: Metadata, config: Config) -> Config:
    return {"partial_rotary_factor": turned_share(metadata, config)}


def _ministral3(metadata: Metadata, config: Config) -> Config:
    """Mistral Small 3 too, whose queries do not grow: by nothing."""
    scaling = config.get("rope_scaling") or {"type": "default", "rope_type": "default"}
    mscale = metadata("rope.scaling.yarn_log_multiplier", 1.0)
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        "rope_parameters": {
            **scaling,
            "rope_theta": config["rope_theta"],
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": metadata("attention.temperature_scale", 0.0),
        }
    }


def _cohere(metadata: Metadata, config: Config) -> Config:
    return {
        "layer_norm_eps": metadata("attention.layer_norm_epsilon"),
        "logit_scale": metadata("logit_scale"),
        "sliding_window": metadata("attention.sliding_window", 4096),
    }


def _stablelm(metadata: Metadata, config: Config) -> Config:
    return {
        **_partial(metadata, config),
        "layer_norm_eps": metadata("attention.layer_norm_epsilon"),
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": not metadata.has_tensor(".ffn_norm."),
        "tie_word_embeddings": False,
    }


def _nemotron(metadata: Metadata, config: Config) -> Config:
    return {
        **_partial(metadata, config),
        "norm_eps": metadata("attention.layer_norm_epsilon"),
        "hidden_act": "relu2",
    }


def _starcoder2(metadata: Metadata, config: Config) -> Config:
    return {"norm_epsilon": metadata("attention.layer_norm_epsilon")}


def _ernie4_5(metadata: Metadata, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def _seed_oss(metadata: Metadata, config: Config) -> Config:
    return {"attention_out_bias": metadata.has_tensor(".attn_output.bias")}


def _nemotron_nas(metadata: Metadata, config: Config) -> Config:
    """See DeciModel of llama.cpp's conversion/deci.py: layers that attend to nothing have no heads,
    those with one matrix in an attention's place heads and no KV heads."""
    heads = metadata.of_layers("attention.head_count")
    kv_heads = metadata.of_layers("attention.head_count_kv")
    widths = metadata.of_layers("feed_forward_length")
    if any(own and not kv for own, kv in zip(heads, kv_heads, strict=True)):
        raise ModelUnsupported("layers with one matrix in place of an attention")
    # The width of an MLP is so many thirds of two hidden sizes, to the next multiple of 256.
    return {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": own // kv} if own else {"no_op": True},
                "ffn": {"ffn_mult": 1.5 * width / config["hidden_size"]}
                if width
                else {"no_op": True},
            }
            for own, kv, width in zip(heads, kv_heads, widths, strict=True)
        ]
    }


def _rows_of_block(config: Config, layer: int) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    group = config["block_configs"][layer]["attention"].get("n_heads_in_group", heads)
    return qkv_rows(heads, heads // group, config["head_dim"])


def _exaone4(metadata: Metadata, config: Config) -> Config:
    """`sliding_window_pattern` has a letter a layer, L where it slides."""
    scaling = {"rope_scaling": config.get("rope_scaling")}
    if not metadata("attention.sliding_window", 0):
        return {**scaling, "sliding_window": None, "sliding_window_pattern": None}
    sliding = metadata.of_layers("attention.sliding_window_pattern")
    pattern = "".join("L" if slides else "G" for slides in sliding) or "LLLG"
    return {
        **scaling,
        "sliding_window": metadata("attention.sliding_window"),
        "sliding_window_pattern": pattern,
    }


def _olmo3(metadata: Metadata, config: Config) -> Config:
    sliding = metadata.of_layers("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return {"sliding_window": metadata("attention.sliding_window"), "layer_types": kinds or None}


def _hunyuan(metadata: Metadata, config: Config) -> Config:
    """The file's base is scaled already."""
    return {
        "rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
        "use_qk_norm": metadata.has_tensor(".attn_q_norm."),
    }


def _minicpm(metadata: Metadata, config: Config) -> Config:
    """Files from before February 2025 do not say, see minicpm.cpp of llama.cpp."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return {
        "scale_emb": metadata("embedding_scale", 12.0),
        "scale_depth": metadata("residual_scale", 1.4 / math.sqrt(layers)) * math.sqrt(layers),
        "dim_model_base": round(hidden / metadata("logit_scale", hidden / 256)),
    }


def _granite_swa(metadata: Metadata, config: Config) -> Config:
    """Granite with windows, where it has no experts."""
    if metadata("expert_count", 0):
        raise ModelUnsupported("a Granite with windows and experts")
    knows = metadata.numbers("attention.rope_pattern")
    theta = config["rope_theta"]
    return {
        **granite(metadata, config),
        "sliding_window": metadata("attention.sliding_window"),
        "layer_types": layer_kinds(metadata, config, full=0),
        "layer_rope_theta": [theta if one else 0 for one in knows] or None,
    }


def _nanbeige(metadata: Metadata, config: Config) -> Config:
    return {
        "num_loops": metadata("num_loops", 1),
        "skip_loop_final_norm": metadata("skip_loop_final_norm", False),
    }


def _apertus(metadata: Metadata, config: Config) -> Config:
    return {"post_norm": False, "qk_norm": True}


def _gpt_neox(metadata: Metadata, config: Config) -> Config:
    return {
        "layer_norm_eps": metadata("attention.layer_norm_epsilon"),
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": turned_share(metadata, config),
        "use_parallel_residual": metadata("use_parallel_residual", True),
        "tie_word_embeddings": False,
    }


def _falcon(metadata: Metadata, config: Config) -> Config:
    """Those with positions that turn: 7B, 40B, 180B, Falcon 2."""
    return {
        "layer_norm_epsilon": metadata("attention.layer_norm_epsilon"),
        "num_kv_heads": config["num_key_value_heads"],
        "new_decoder_architecture": True,  # so many KV heads as it says
        "parallel_attn": True,
        "alibi": False,
    }


def _chatglm(metadata: Metadata, config: Config) -> Config:
    """GLM-4 9B of 2024 and ChatGLM 3, whose queries, keys and values have offsets."""
    return {
        **_partial(metadata, config),
        "attention_bias": metadata.has_tensor(".attn_q.bias"),
    }


def _phi2(metadata: Metadata, config: Config) -> Config:
    return {**_partial(metadata, config), "layer_norm_eps": config["rms_norm_eps"]}


def _baichuan(metadata: Metadata, config: Config) -> Config:
    """The larger one (40 layers) has ALiBi, see baichuan.cpp of llama.cpp."""
    if config["num_hidden_layers"] == _BAICHUAN_13B_LAYERS:
        raise ModelUnsupported("a Baichuan of 13 billion, which has ALiBi")
    return {}


_BAICHUAN_13B_LAYERS = 40


def _orion(metadata: Metadata, config: Config) -> Config:
    """What StableLM's class computes besides: a llama with other norms."""
    return {**_stablelm(metadata, config), "use_parallel_residual": False}


def _qwen(metadata: Metadata, config: Config) -> Config:
    """The first Qwen. Its MLP is half as wide as it says (qwen.cpp)."""
    return {"intermediate_size": config["intermediate_size"] // 2}


_PHI2 = {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT_NEOX = {
    "token_embd": "model.embed_in",
    "output_norm": "model.final_layer_norm",
    "output": "model.embed_out",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_7B = GGUFFamily(
    "falcon",
    layers="transformer.h",
    tensors=_FALCON,
    config=_falcon,
    by_kv_head="query_key_value",
    qkv_rows=joined_there_too,
)

DENSE: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily("llama", interleaved_rope=True),
    "smollm3": GGUFFamily("smollm3", interleaved_rope=True),
    "qwen2": GGUFFamily("qwen2"),
    "qwen2vl": GGUFFamily("qwen2"),  # what it is for text
    "internlm2": GGUFFamily("llama", interleaved_rope=True),  # the file has its projections apart
    "exaone": GGUFFamily("llama", name="exaone"),
    "qwen3": GGUFFamily("qwen3"),
    "qwen3vl": GGUFFamily("qwen3"),  # what it is for text
    "phi3": GGUFFamily(
        "phi3",
        tensors={"ffn_up": "mlp.gate_up_proj"},
        config=_phi3,
        qkv_rows=joined_there_too,
    ),
    "gemma": GGUFFamily("gemma", norms_add_one="all"),
    "gemma2": GGUFFamily("gemma2", norms_add_one="all", tensors=SANDWICH, config=_gemma2),
    "gemma3": GGUFFamily("gemma3_text", norms_add_one="all", tensors=SANDWICH, config=_gemma3),
    "granite": GGUFFamily("granite", interleaved_rope=True, config=granite),
    "olmo2": GGUFFamily("olmo2", tensors=_OLMO2),
    "mistral3": GGUFFamily("ministral3", interleaved_rope=True, config=_ministral3),
    "command-r": GGUFFamily("cohere", config=_cohere),
    "cohere2": GGUFFamily("cohere2", config=_cohere),
    "stablelm": GGUFFamily("stablelm", config=_stablelm),
    "nemotron": GGUFFamily("nemotron", norms_add_one="all", config=_nemotron),
    "starcoder2": GGUFFamily(
        "starcoder2", tensors={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, config=_starcoder2
    ),
    "seed_oss": GGUFFamily(
        "seed_oss", tensors={"post_attention_norm": "post_attention_layernorm"}, config=_seed_oss
    ),
    "exaone4": GGUFFamily("exaone4", tensors=_OLMO2, config=_exaone4),
    "glm4": GGUFFamily("glm4", tensors=_GLM4, config=_partial),
    "chatglm": GGUFFamily("glm", tensors={"ffn_up": "mlp.gate_up_proj"}, config=_chatglm),
    "phi2": GGUFFamily("phi", tensors=_PHI2, config=_phi2),
    "baichuan": GGUFFamily("llama", interleaved_rope=True, config=_baichuan, name="baichuan"),
    "orion": GGUFFamily("stablelm", config=_orion, name="orion"),
    "pangu-embedded": GGUFFamily("llama", name="pangu-embedded"),
    "qwen": GGUFFamily("qwen2", config=_qwen, name="qwen"),
    "xverse": GGUFFamily("llama", interleaved_rope=True, name="xverse"),
    "ernie4_5": GGUFFamily("ernie4_5", config=_ernie4_5),
    "hunyuan-dense": GGUFFamily("hunyuan_v1_dense", tensors=_HUNYUAN, config=_hunyuan),
    "gptneox": GGUFFamily(
        "gpt_neox",
        layers="model.h",
        tensors=_GPT_NEOX,
        config=_gpt_neox,
        by_kv_head="query_key_value",
        qkv_rows=joined_there_too,
    ),
    "falcon": _FALCON_7B,
    "deci": GGUFFamily(
        "nemotron-nas",
        interleaved_rope=True,
        config=_nemotron_nas,
        varied=("attention.head_count_kv", "feed_forward_length"),
        qkv_rows=_rows_of_block,
    ),
    "granite_swa": GGUFFamily(
        "granite_swa",
        interleaved_rope=True,
        tensors={"attn_sinks": "self_attn.sinks"},
        config=_granite_swa,
    ),
    "nanbeige": GGUFFamily("nanbeige", interleaved_rope=True, config=_nanbeige),
    "arcee": GGUFFamily("arcee", interleaved_rope=True),
    "apertus": GGUFFamily(
        "apertus",
        tensors={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        config=_apertus,
        layer_numbers={
            f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    ),
    "minicpm": GGUFFamily("minicpm", interleaved_rope=True, config=_minicpm),
}

OLMO3 = GGUFFamily("olmo3", tensors=_OLMO2, config=_olmo3)
"""Of the same architecture as OLMo 2 there, with windows."""

FALCON_40B = replace(
    _FALCON_7B,
    tensors={**_FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    name="falcon-40b",
)
"""The MLP has a norm of its own there."""
