"""GGUF files made of the zoo's checkpoints, with PyPI's `gguf`: its writer, its names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, Literal

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import zoo
from mlx_lm.utils import load_model

from exo.inference.mlx.absent import classes_given
from exo.inference.mlx.gguf_weights import GGUFWeights

ARCHITECTURES = {
    "llama": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4_text": "gemma4",
    "granite": "granite",
    "olmo2": "olmo2",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan": "hunyuan-moe",
    "mellum": "mellum",
    "exaone_moe": "exaone-moe",
    "muse_glimmer": "muse-glimmer",
    "afmoe": "afmoe",
    "laguna": "laguna",
    "step3p5": "step35",
    "dots1": "dots1",
    "bailing_moe": "bailingmoe2",
    "glm4_moe_lite": "deepseek2",
    "deepseek_v2": "deepseek2",
    "mistral4": "mistral4",
    "gpt_neox": "gptneox",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "ministral3": "mistral3",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "starcoder2": "starcoder2",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "olmo3": "olmo2",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "minicpm": "minicpm",
    "apertus": "apertus",
    "nanbeige": "nanbeige",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "nemotron-nas": "deci",
    "granitemoe": "granitemoe",
    "glm4_moe": "glm4moe",
    "minimax": "minimax-m2",
    "minimax_m3_vl": "minimax-m3",
    "llama4": "llama4",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "falcon_h1": "falcon-h1",
    "kimi_linear": "kimi-linear",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "mimo_v2_flash": "mimo2",
    "bailing_moe_v3": "bailingmoe3",
    "glm": "chatglm",
    "phi": "phi2",
    "phimoe": "phimoe",
    "deepseek": "deepseek",
    "minicpm3": "minicpm3",
    "mamba2": "mamba2",
    "mamba": "mamba",
    "jamba": "jamba",
}
"""`general.architecture` by model_type."""

OF_THE_CPU_ALONE = {
    "cohere2_moe": "cohere2moe",
    "arcee": "arcee",
    "granite_swa": "granite_swa",
}
"""The same, where mlx-lm has no class."""

_NAMED_LIKE = {
    "mellum": "qwen3moe",
    "muse-glimmer": "gemma3",
    "laguna": "dots1",
    "deepseek32": "glm-dsa",
    "bailingmoe3": "kimi-linear",
    "cohere2moe": "dots1",
    "nanbeige": "llama",
    "granite_swa": "granite",
    "hy_v3": "dots1",
    "minimax-m3": "dots1",
    "qwen": "qwen2",
}
"""Architectures that PyPI's `gguf` does not know yet, or knows joined, and one that has the same
tensors."""

_PERMUTED = (
    "llama",
    "smollm3",
    "granite",
    "mistral3",
    "minicpm",
    "internlm2",
    "deci",
    "muse-glimmer",
    "granitemoe",
    "granitehybrid",
    "granite_swa",
    "arcee",
    "nanbeige",
    "deepseek",
    "baichuan",
    "xverse",
)
_LAYER_NORM_EPS = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "nemotron": "norm_eps",
    "starcoder2": "norm_epsilon",
    "nemotron_h": "layer_norm_epsilon",
    "gpt_neox": "layer_norm_eps",
    "phi": "layer_norm_eps",
}

_TOKENS = [chr(33 + i) for i in range(90)]
_TOKENS += [f"unused{i}" for i in range(zoo.VOCABULARY - 94)] + ['!"', "#$", "<s>", "</s>"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": _TOKENS,
    "tokenizer.ggml.merges": ['! "', "# $"],
    "tokenizer.ggml.token_type": [1] * (len(_TOKENS) - 2) + [3, 3],
    "tokenizer.ggml.bos_token_id": len(_TOKENS) - 2,
    "tokenizer.ggml.eos_token_id": len(_TOKENS) - 1,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
"""Byte-level, of which most tokens are never met."""

Quantize = Callable[[str, npt.NDArray[np.float32]], str]
"""(GGUF's name, the numbers) to the format to write them in."""


def plain(name: str, array: npt.NDArray[np.float32]) -> str:
    return "F32"


def _permuted(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows as llama.cpp's converter orders them for RoPE over neighbouring pairs."""
    return (
        weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


_GEMMAS = {
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def _own_name(name: str, names: Any) -> str:
    module, _, kind = name.rpartition(".")
    if experts := re.fullmatch(
        r"model\.layers\.(\d+)\..*(?:switch_mlp|switch_glu|(?<!_)experts)\.(\w+)_proj", module
    ):
        return f"blk.{experts[1]}.ffn_{experts[2]}_exps.{kind}"
    if name.startswith(
        ("model.h.", "model.embed_in.", "model.embed_out.", "model.final_layer_norm.")
    ):  # GPT-NeoX
        module = module.replace("model.h.", "gpt_neox.layers.").replace(
            "model.embed_out", "embed_out"
        )
        return f"{names.get_name(module.replace('model.', 'gpt_neox.'))}.{kind}"
    if sinks := re.fullmatch(
        r"model\.layers\.(\d+)\.self_attn\.(?:attention_)?sink(?:s|_bias)", name
    ):
        return f"blk.{sinks[1]}.attn_sinks.weight"
    if name.endswith(("self_attn.gate_proj.weight", "self_attn.g_proj.weight")):
        return f"blk.{name.split('.')[2]}.attn_gate.{kind}"
    if shared := re.fullmatch(
        r"model\.layers\.(\d+)\.(?:mlp|feed_forward|block_sparse_moe)"
        r"\.share(?:d_experts?|d_mlp|_expert)\.(\w+)_proj",
        module,
    ):
        return f"blk.{shared[1]}.ffn_{shared[2]}_shexp.{kind}"
    if index := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.index_(\w+)", module):
        return f"blk.{index[1]}.indexer.{index[2]}.{kind}"
    if name.endswith("shared_expert_gate.weight"):
        return f"blk.{name.split('.')[2]}.ffn_gate_inp_shexp.{kind}"
    if switched := re.fullmatch(r"backbone\.layers\.(\d+)\.mixer\.switch_mlp\.fc([12])", module):
        return f"blk.{switched[1]}.ffn_{'up' if switched[2] == '1' else 'down'}_exps.{kind}"
    if name.endswith((".mamba.D", ".mixer.D")):
        return f"blk.{name.split('.')[2]}.ssm_d"
    if name.endswith(
        (
            *("mlp.gate.weight", "mlp.gate.wg.weight", "mlp.gate.gate_proj.weight"),
            *("mlp.gate.proj.weight", "mlp.router.gate.weight", "mlp.gate.gate.weight"),
        )
    ):
        return f"blk.{name.split('.')[2]}.ffn_gate_inp.{kind}"
    if latent := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(embed_q|unembed_out)", module):
        part = "attn_k_b" if latent[2] == "embed_q" else "attn_v_b"
        return f"blk.{latent[1]}.{part}.{kind}"
    if name.endswith("e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    if name.endswith(("expert_bias", "router_bias")):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    if name.endswith("dt_bias"):
        return f"blk.{name.split('.')[2]}.ssm_dt.bias"
    if name.endswith("A_log"):
        return f"blk.{name.split('.')[2]}.ssm_a"
    if name.startswith("model.layers.") and name.endswith(tuple(_GEMMAS)):
        layer, part = name.split(".", 3)[2:]
        return f"blk.{layer}.{_GEMMAS[part]}"
    if name.endswith("pre_ff_layernorm.weight"):  # whose name llama.cpp's converter writes so
        return f"blk.{name.split('.')[2]}.ffn_norm"
    if convolution := re.fullmatch(r"(.*\.[qkv]_conv)\.conv", module):
        module = f"{convolution[1]}1d"
    found = names.get_name(module)
    assert found is not None, module
    return f"{found}.{kind}"


def _as_converted(name: str, numbers: npt.NDArray[Any], config: dict[str, Any]) -> Any:
    """What llama.cpp's converter does to recurrent layers, see `modify_tensors` and
    `_LinearAttentionVReorderBase` in its conversion/qwen.py."""
    if name.endswith("A_log"):
        numbers = np.exp(numbers) * (1 if config["model_type"] == "bailing_moe_v3" else -1)
    if name.endswith(
        ("_conv.conv.weight", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
    ):
        return numbers.squeeze(-1)[None, :, None]
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        numbers = numbers.squeeze(-1)
    if name.endswith("shared_expert_gate.weight"):
        numbers = numbers.squeeze(0)
    is_selective = config["model_type"] in ("mamba", "jamba")  # whose D has one axis there, too
    is_of_heads = name.endswith((".D", ".A_log")) and "linear_attn" not in name
    if is_of_heads and numbers.ndim == 1 and not is_selective:
        numbers = numbers[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        numbers = numbers.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    if "query_key_value" in name and config["model_type"] == "gpt_neox":
        by_head = numbers.reshape(config["num_attention_heads"], 3, -1)
        return by_head.swapaxes(0, 1).reshape(numbers.shape)
    if "linear_attn" not in name or name.endswith("linear_attn.norm.weight"):
        return numbers
    if config["model_type"] == "qwen3_next":
        return numbers
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    per_key = heads // config["linear_num_key_heads"]
    tiled = np.arange(heads).reshape(-1, per_key).T.reshape(-1)
    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return numbers[tiled]
    rows = (tiled[:, None] * width + np.arange(width)).reshape(-1)
    if name.endswith("out_proj.weight"):
        return numbers[:, rows]
    keys = len(numbers) - len(rows)
    return np.concatenate([numbers[:keys], numbers[keys:][rows]])


def _numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Metadata by key below the architecture, as llama.cpp's converter writes it."""
    heads = config.get("num_attention_heads", 1)
    written = {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config.get("block_ff_dim", config.get("intermediate_size", 0)),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.key_length": config.get("head_dim", config["hidden_size"] // heads),
        "attention.layer_norm_rms_epsilon": config.get(
            "rms_norm_eps", config.get("norm_eps", 1e-6)
        ),
        "context_length": config.get("max_position_embeddings", 512),
        "rope.freq_base": config.get("rope_theta", 1e5),
        "attention.sliding_window": config.get("sliding_window"),
        "attention.sliding_window_pattern": config.get("sliding_window_pattern"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get(
            "moe_intermediate_size", config.get("intermediate_size", 0)
        ),
    }
    if "linear_num_key_heads" in config:
        written |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
            "full_attention_interval": config.get("full_attention_interval", 4),
            "rope.dimension_count": config["head_dim"] // 4,
            "rope.freq_base": 100000.0,  # what mlx-lm takes where the config says nothing
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        }
    elif "partial_rotary_factor" in config:
        head_dim = config["hidden_size"] // heads
        written["rope.dimension_count"] = int(head_dim * config["partial_rotary_factor"])
    if "kv_lora_rank" in config and "first_k_dense_replace" in config:
        rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
        written |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config.get("q_lora_rank"),
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + turned,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": turned,
            "expert_count": config.get("n_routed_experts", config.get("num_experts")),
            "expert_shared_count": config.get("n_shared_experts", config.get("num_shared_experts")),
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": config["model_type"] != "deepseek_v2",
            "expert_gating_func": 1 if config["model_type"] in ("deepseek_v2", "mistral4") else 2,
            "leading_dense_block_count": config["first_k_dense_replace"],
        }
    if "conv_L_cache" in config:
        attending = config["full_attn_idxs"]
        layers = range(config["num_hidden_layers"])
        heads_kv = [config["num_key_value_heads"] * (i in attending) for i in layers]
        written |= {
            "attention.head_count_kv": heads_kv,
            "shortconv.l_cache": config["conv_L_cache"],
            "leading_dense_block_count": config.get("num_dense_layers"),
        }
    model_type = config["model_type"]
    if model_type in _LAYER_NORM_EPS:
        del written["attention.layer_norm_rms_epsilon"]
        written["attention.layer_norm_epsilon"] = config.get(_LAYER_NORM_EPS[model_type], 1e-5)
    if model_type in ("granitemoehybrid", "nemotron_h", "falcon_h1"):
        written |= _state_space_numbers(config)
    written |= _OWN_NUMBERS.get(model_type, lambda config: {})(config)
    return {key: number for key, number in written.items() if number is not None}


def _state_space_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """See GraniteHybridModel and NemotronHModel of llama.cpp's conversion."""
    heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    if pattern := config.get("hybrid_override_pattern"):
        attending = [kind == "*" for kind in pattern]
        widths = [config["intermediate_size"] * (kind in "-E") for kind in pattern]
    elif config["model_type"] == "falcon_h1":
        attending = [True] * config["num_hidden_layers"]
        widths = [config["intermediate_size"]] * len(attending)
    else:
        attending = [kind == "attention" for kind in config["layer_types"]]
        widths = [config["intermediate_size"]] * len(attending)
    routed = {}
    if "E" in config.get("hybrid_override_pattern", ""):
        shared = config["moe_shared_expert_intermediate_size"]
        routed = _routed(config) | {"expert_shared_feed_forward_length": shared}
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] * one for one in attending],
        "feed_forward_length": widths,
        "ssm.conv_kernel": config.get("mamba_d_conv") or config["conv_kernel"],
        "ssm.state_size": config.get("mamba_d_state") or config["ssm_state_size"],
        "ssm.group_count": config.get("mamba_n_groups") or config["n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * (config.get("mamba_d_head") or config["mamba_head_dim"]),
        "rope.scaling.finetuned": config.get("position_embedding_type", "rope") != "nope",
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
        **routed,
    }


def _routed(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config.get("routed_scaling_factor", 2.5),
        "expert_weights_norm": config.get("norm_topk_prob", True),
        "leading_dense_block_count": config.get("first_k_dense_replace"),
    }


def _hunyuan(config: dict[str, Any]) -> dict[str, Any]:
    alpha = (config.get("rope_scaling") or {}).get("alpha", 1.0)
    dims = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {"rope.freq_base": config["rope_theta"] * alpha ** (dims / (dims - 2))}


def _ministral(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _minicpm(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_scale": config["scale_emb"],
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
    }


def _olmo3(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config.get("layer_types") or ([*["sliding_attention"] * 3, "full_attention"] * 2)[:6]
    pattern = [kind == "sliding_attention" for kind in kinds]
    return {"attention.sliding_window_pattern": pattern}


def _deepseek_v2(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_scaling"]
    return {
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
    }


def _mistral4(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        **_deepseek_v2({"rope_scaling": rope}),
        "rope.freq_base": rope["rope_theta"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    }


def _kimi_linear(config: dict[str, Any]) -> dict[str, Any]:
    """See KimiLinearModel of llama.cpp's conversion/kimi_linear.py."""
    layers, own = config["num_hidden_layers"], config["linear_attn_config"]
    return {
        "attention.head_count_kv": [int(i + 1 in own["full_attn_layers"]) for i in range(layers)],
        "kda.head_dim": own["head_dim"],
        "ssm.conv_kernel": own["short_conv_kernel_size"],
        "expert_used_count": config["num_experts_per_token"],
    }


def _indexed(config: dict[str, Any]) -> dict[str, Any]:
    """See DeepseekV32Model of llama.cpp's conversion/deepseek.py."""
    return {
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }


def _ling_attends(config: dict[str, Any], layer: int) -> bool:
    layers, size = config["num_hidden_layers"], config["layer_group_size"]
    return (layer + 1) % size == 0 or layer >= layers // size * size


def _as_kimi(name: str, config: dict[str, Any]) -> str:
    """What Kimi Linear calls it, whose names GGUF's are made of."""
    if config["model_type"] != "bailing_moe_v3":
        return name
    name = name.replace("word_embeddings", "embed_tokens").replace(".dense.", ".o_proj.")
    name = name.replace(".attention.", ".self_attn.").replace(".f_proj.", ".f_a_proj.")
    if ".g_proj." in name and not _ling_attends(config, int(name.split(".")[2])):
        name = name.replace(".g_proj.", ".g_a_proj.")
    return name


def _ling_3(config: dict[str, Any]) -> dict[str, Any]:
    """See BailingMoeV3Model of llama.cpp's conversion/bailingmoe3.py."""
    layers = range(config["num_hidden_layers"])
    return {
        "attention.head_count_kv": [int(_ling_attends(config, i)) for i in layers],
        "kda.head_dim": config["head_dim"],
        "kda.safe_gate": True,
        "kda.gate_lower_bound": config["kda_lower_bound"],
        "ssm.conv_kernel": 4,
        "rope.freq_base": config.get("rope_theta", 6e6),
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "swiglu_clamp_exp": config.get("expert_swiglu_limit_list"),
        "swiglu_clamp_shexp": config.get("share_expert_swiglu_limit_list"),
    }


def _mimo2(config: dict[str, Any]) -> dict[str, Any]:
    """See MimoV2Model of llama.cpp's conversion/mimo.py."""
    slides = config["hybrid_layer_pattern"]
    of_kind = (config["num_key_value_heads"], config["swa_num_key_value_heads"])
    return {
        **_routed(config),
        "attention.head_count_kv": [of_kind[kind] for kind in slides],
        "attention.sliding_window": config["sliding_window_size"],
        "attention.sliding_window_pattern": [bool(kind) for kind in slides],
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "attention.layer_norm_rms_epsilon": config["layernorm_epsilon"],
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base_swa": config["swa_rope_theta"],
    }


def _glm_dsa(config: dict[str, Any]) -> dict[str, Any]:
    """See GlmMoeDsaModel of llama.cpp's conversion/glm.py."""
    kinds = config.get("indexer_types")
    return {
        **_indexed(config),
        "attention.indexer.types": kinds and [kind == "full" for kind in kinds],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


def _gpt_neox(config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "rope.dimension_count": int(config["rotary_pct"] * head_dim),
        "rope.freq_base": float(config["rotary_emb_base"]),
        "use_parallel_residual": config.get("use_parallel_residual", True),
        "attention.head_count_kv": None,
        "feed_forward_length": 4 * config["hidden_size"],
    }


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """See Gemma4Model of llama.cpp's conversion/gemma.py."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads = config["num_key_value_heads"]
    in_full = config.get("num_global_key_value_heads") or heads
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 20)
    routed = bool(config.get("enable_moe_block"))
    wide = [config["intermediate_size"] * (1 + (i >= layers - shared)) for i in range(layers)]
    return {
        "attention.sliding_window_pattern": slides,
        "attention.head_count_kv": [heads if one else in_full for one in slides],
        "attention.key_length": config.get("global_head_dim", 512),
        "attention.key_length_swa": config["head_dim"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": wide if shared else config["intermediate_size"],
        "final_logit_softcapping": 30.0,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "expert_count": config["num_experts"] if routed else None,
        "expert_used_count": config["top_k_experts"] if routed else None,
        "expert_feed_forward_length": config["moe_intermediate_size"] if routed else None,
    }


def _gemma3n(config: dict[str, Any]) -> dict[str, Any]:
    """See Gemma3NModel of llama.cpp's conversion/gemma.py."""
    shares = config["activation_sparsity_pattern"]
    deviations = [NormalDist().inv_cdf(one) if one else -math.inf for one in shares]
    return {
        "feed_forward_length": config["intermediate_size"],
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "altup.num_inputs": config["altup_num_inputs"],
        "altup.active_idx": config["altup_active_idx"],
        "activation_sparsity_scale": deviations,
    }


def _llama4(config: dict[str, Any]) -> dict[str, Any]:
    """See Llama4Model of llama.cpp's conversion/llama.py."""
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _mellum(config: dict[str, Any]) -> dict[str, Any]:
    full, sliding = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        "attention.sliding_window_pattern": kinds,
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": sliding["rope_theta"],
        "rope.scaling.type": full["rope_type"],
        "rope.scaling.factor": full["factor"],
        "rope.scaling.original_context_length": full["original_max_position_embeddings"],
    }


def _nas(config: dict[str, Any]) -> dict[str, Any]:
    """See DeciModel of llama.cpp's conversion/deci.py."""
    attentions = [block["attention"] for block in config["block_configs"]]
    mlps = [block["ffn"] for block in config["block_configs"]]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return {
        "attention.head_count": [0 if one.get("no_op") else heads for one in attentions],
        "attention.head_count_kv": [
            0 if one.get("no_op") else heads // one["n_heads_in_group"] for one in attentions
        ],
        "feed_forward_length": [
            0 if one.get("no_op") else -(-int(2 * one["ffn_mult"] * hidden / 3) // 256) * 256
            for one in mlps
        ],
    }


def _sliding(config: dict[str, Any]) -> list[bool]:
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["sliding_attention"] * 3 + ["full_attention"]
    return [kinds[layer % len(kinds)] == "sliding_attention" for layer in range(layers)]


def _muse(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window_pattern": _sliding(config),
        "final_logit_softcapping": 20.0,
        "logit_scale": 26**-0.5,
    }


def _afmoe(config: dict[str, Any]) -> dict[str, Any]:
    """See AfmoeModel of llama.cpp's conversion/afmoe.py."""
    return {
        "attention.sliding_window_pattern": _sliding(config),
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_norm": True,
        "expert_weights_scale": 2.826,
        "expert_gating_func": 2,
        "leading_dense_block_count": config["num_dense_layers"],
    }


def _step(config: dict[str, Any]) -> dict[str, Any]:
    """See Step35Model of llama.cpp's conversion/step3.py."""
    slides = _sliding(config)
    other = config["attention_other_setting"]
    return {
        "attention.sliding_window_pattern": slides,
        "attention.head_count": [
            other["num_attention_heads"] if one else config["num_attention_heads"] for one in slides
        ],
        "attention.head_count_kv": [
            other["num_attention_groups"] if one else config["num_attention_groups"]
            for one in slides
        ],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": config["rope_theta"][0],
        "rope.freq_base_swa": config["rope_theta"][1],
        "rope.dimension_count": config["head_dim"],
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_top_k"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_weights_scale": 3.0,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": int(config["moe_layers_enum"][0]),
        "swiglu_clamp_exp": config["swiglu_limits"],
        "swiglu_clamp_shexp": config["swiglu_limits_shared"],
    }


def _laguna(config: dict[str, Any]) -> dict[str, Any]:
    """See LagunaModel of llama.cpp's conversion/laguna.py."""
    full, sliding = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    width = config["head_dim"]
    return {
        "attention.sliding_window_pattern": _sliding(config),
        "attention.head_count": config["num_attention_heads_per_layer"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "expert_weights_norm": True,
        "expert_weights_scale": config["moe_routed_scaling_factor"],
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": sliding["rope_theta"],
        "rope.dimension_count": int(width * full["partial_rotary_factor"]),
        "rope.dimension_count_swa": width,
        "rope.scaling.type": full["rope_type"],
        "rope.scaling.factor": full["factor"],
        "rope.scaling.original_context_length": full["original_max_position_embeddings"],
    }


def _ling(config: dict[str, Any]) -> dict[str, Any]:
    """See BailingMoeV2Model and Dots1Model of llama.cpp's conversion."""
    shared = config.get("n_shared_experts", config.get("num_shared_experts"))
    return {
        **_routed(
            {"n_routed_experts": config.get("num_experts"), **config, "n_shared_experts": shared}
        ),
        "expert_gating_func": 2,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }


def _minimax_m3(config: dict[str, Any]) -> dict[str, Any]:
    """See MiniMaxM3Model of llama.cpp's conversion/minimax.py."""
    return {
        "rope.dimension_count": config["rotary_dim"],
        "feed_forward_length": config["dense_intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True,
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk_blocks"],
        "attention.indexer.block_size": config["index_block_size"],
        "attention.indexer.local_blocks": 1,
        "leading_dense_block_count": config["moe_layer_freq"].index(1),
    }


def _cohere2_moe(config: dict[str, Any]) -> dict[str, Any]:
    """See Cohere2MoeModel of llama.cpp's conversion/command_r.py."""
    layers = range(config["num_hidden_layers"])
    given = {"attention.layer_norm_rms_epsilon": config.get("rms_norm_eps")}
    if given["attention.layer_norm_rms_epsilon"] is None:
        given["attention.layer_norm_epsilon"] = config["layer_norm_eps"]
    shared = config.get("num_shared_experts", 0)
    return {
        **given,
        "logit_scale": config["logit_scale"],
        "expert_feed_forward_length": config["intermediate_size"],
        "feed_forward_length": config["prefix_dense_intermediate_size"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_shared_count": shared or None,
        "expert_shared_feed_forward_length": config["intermediate_size"] * shared or None,
        "attention.sliding_window_pattern": [
            config["layer_types"][i] == "sliding_attention" for i in layers
        ],
        "rope.dimension_count": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }


def _minicpm3(config: dict[str, Any]) -> dict[str, Any]:
    """See MiniCPM3Model of llama.cpp's conversion/minicpm.py."""
    return {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": config["qk_rope_head_dim"],
    }


def _mamba2(config: dict[str, Any]) -> dict[str, Any]:
    """See Mamba2Model of llama.cpp's conversion/mamba.py."""
    return {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.key_length": None,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "rope.freq_base": None,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["num_heads"] * config["head_dim"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["num_heads"],
        "ssm.group_count": config["n_groups"],
    }


def _mamba(config: dict[str, Any]) -> dict[str, Any]:
    """See MambaModel of llama.cpp's conversion/mamba.py."""
    return {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.key_length": None,
        "attention.layer_norm_rms_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "rope.freq_base": None,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["intermediate_size"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["time_step_rank"],
        "ssm.dt_b_c_rms": bool(config.get("use_bcdt_rms")),
    }


def _jamba(config: dict[str, Any]) -> dict[str, Any]:
    """See JambaModel of llama.cpp's conversion/jamba.py."""
    offset, period = config["attn_layer_offset"], config["attn_layer_period"]
    kv_heads = config["num_key_value_heads"]
    layers = range(config["num_hidden_layers"])
    rank = config.get("mamba_dt_rank", "auto")
    return {
        "attention.head_count_kv": [kv_heads * (i % period == offset) for i in layers],
        "attention.key_length": None,
        "rope.freq_base": None,
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": -(-config["hidden_size"] // 16) if rank == "auto" else rank,
    }


_OWN_NUMBERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ministral3": _ministral,
    "deepseek": lambda config: (
        _routed(config) | {"expert_weights_scale": 1.0, "expert_weights_norm": None}
    ),
    "phi": lambda config: {
        "rope.dimension_count": int(
            config.get("partial_rotary_factor", 0.4)
            * config["hidden_size"]
            // config["num_attention_heads"]
        )
    },
    "minicpm3": _minicpm3,
    "mamba2": _mamba2,
    "mamba": _mamba,
    "jamba": _jamba,
    "deepseek_v32": _indexed,
    "bailing_moe_v3": _ling_3,
    "mimo_v2_flash": _mimo2,
    "glm_moe_dsa": _glm_dsa,
    "kimi_linear": _kimi_linear,
    "gemma3n": _gemma3n,
    "gemma4_text": _gemma4,
    "deepseek_v2": _deepseek_v2,
    "mistral4": _mistral4,
    "gpt_neox": _gpt_neox,
    "cohere": lambda config: {"logit_scale": config.get("logit_scale", 0.0625)},
    "cohere2": lambda config: {"logit_scale": config.get("logit_scale", 0.0625)},
    "exaone4": lambda config: {
        "attention.sliding_window_pattern": [letter == "L" for letter in "LLGLLG"]
    },
    "olmo3": _olmo3,
    "hunyuan_v1_dense": _hunyuan,
    "minicpm": _minicpm,
    "qwen2_moe": lambda config: {
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]
    },
    "glm4_moe": _routed,
    "dots1": _ling,
    "cohere2_moe": _cohere2_moe,
    "nanbeige": lambda config: {
        "num_loops": config["num_loops"],
        "skip_loop_final_norm": config.get("skip_loop_final_norm", False),
    },
    "arcee": lambda config: {
        "rope.scaling.type": config["rope_scaling"]["rope_type"],
        "rope.scaling.factor": config["rope_scaling"]["factor"],
        "rope.scaling.original_context_length": config["rope_scaling"][
            "original_max_position_embeddings"
        ],
    },
    "granite_swa": lambda config: {
        "attention.sliding_window_pattern": _sliding(config),
        "attention.rope_pattern": [bool(theta) for theta in config["layer_rope_theta"]],
    },
    "bailing_moe": _ling,
    "ernie4_5_moe": lambda config: {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "expert_shared_count": config.get("moe_num_shared_experts"),
        "expert_shared_feed_forward_length": config["moe_intermediate_size"]
        * config.get("moe_num_shared_experts", 0),
        "interleave_moe_layer_step": config.get("moe_layer_interval", 1),
        "leading_dense_block_count": config.get("moe_layer_start_index", 0),
    },
    "hunyuan": lambda config: {
        **_hunyuan(config),
        "expert_used_count": config["moe_topk"],
        "expert_shared_count": config["num_shared_expert"],
        "expert_shared_feed_forward_length": config["intermediate_size"],
    },
    "nemotron-nas": _nas,
    "exaone_moe": lambda config: {
        **_ling(config),
        "attention.sliding_window_pattern": _sliding(config),
        "leading_dense_block_count": config["is_moe_layer"].index(True),
    },
    "mellum": _mellum,
    "muse_glimmer": _muse,
    "afmoe": _afmoe,
    "laguna": _laguna,
    "step3p5": _step,
    "qwen3_next": lambda config: {
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base": config["rope_theta"],
    },
    "llama4": _llama4,
    "minimax_m3_vl": _minimax_m3,
    "minimax": lambda config: {
        "rope.dimension_count": config["rotary_dim"],
        "expert_feed_forward_length": config["intermediate_size"],
    },
}


def quantized(
    numbers: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType
) -> npt.NDArray[Any]:
    """`gguf` reads NVFP4 and does not write it."""
    if kind != gguf.GGMLQuantizationType.NVFP4:
        return gguf.quants.quantize(numbers, kind)
    fours = numbers.reshape(-1, 4, 16)
    scales = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(fours).max(-1) / 6)
    factors = gguf.quants.NVFP4.ue4m3_to_fp32(scales)[..., None]
    of_all = factors * np.array(gguf.quants.NVFP4.kvalues, np.float32)
    nearest = np.abs(fours[..., None] - of_all[:, :, None, :]).argmin(-1).astype(np.uint8)
    halves = nearest[..., :8] | nearest[..., 8:] << 4
    blocks = np.concatenate([scales, halves.reshape(-1, 32)], axis=1)
    return blocks.reshape(*numbers.shape[:-1], -1)


def _split(tensors: dict[str, mx.array], config: dict[str, Any]) -> Iterator[tuple[str, mx.array]]:
    """Granite's shared experts and Qwen3-Next's projections, which stand apart in GGUF, and Gemma
    3n's projections of streams, which are one tensor there."""
    lists: dict[str, list[mx.array]] = {}
    for name, array in sorted(tensors.items()):
        if one := re.fullmatch(r"(.*altup\w*_projections)\.\d\.weight", name):
            lists.setdefault(f"{one[1]}.weight", []).append(array)
    yield from ((name, mx.stack(arrays)) for name, arrays in lists.items())
    for name, array in tensors.items():
        if "altup" in name and "_projections." in name:
            continue
        if name.endswith("in_proj_qkvz.weight"):  # see Qwen3NextModel of conversion/qwen.py
            heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
            wide = values // heads * config["linear_value_head_dim"]
            own = config["linear_key_head_dim"]
            each = array.reshape(heads, -1, array.shape[-1])
            parts = mx.split(each, [own, 2 * own, 2 * own + wide], axis=1)
            q, k, v, z = (part.reshape(-1, array.shape[-1]) for part in parts)
            yield name.replace("qkvz", "qkv"), mx.concatenate([q, k, v])
            yield name.replace("qkvz", "z"), z
        elif "shared_mlp.input_linear" in name:
            gate, up = mx.split(array, 2, axis=0)
            yield name.replace("shared_mlp.input_linear", "mlp.shared_expert.gate_proj"), gate
            yield name.replace("shared_mlp.input_linear", "mlp.shared_expert.up_proj"), up
        elif "shared_mlp.output_linear" in name:
            yield name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj"), array
        else:
            yield name, array


def _latents(
    tensors: dict[str, mx.array], config: dict[str, Any], joined: bool
) -> dict[str, mx.array]:
    """What makes keys and values of latents, in one matrix as before May 2025 or in two stacks."""
    found = dict(tensors)
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    for name in tensors:
        prefix = name.partition("self_attn.")[0] + "self_attn."
        if name.endswith("kv_b_proj.weight") and not joined:
            rows = found.pop(name).reshape(heads, -1, rank)
            keys, values = mx.split(rows, [config["qk_nope_head_dim"]], axis=1)
            found[f"{prefix}embed_q.weight"] = mx.contiguous(keys.swapaxes(1, 2))
            found[f"{prefix}unembed_out.weight"] = mx.contiguous(values)
        elif name.endswith("embed_q.weight") and joined:
            keys = found.pop(name).swapaxes(1, 2)
            both = mx.concatenate([keys, found.pop(f"{prefix}unembed_out.weight")], axis=1)
            found[f"{prefix}kv_b_proj.weight"] = both.reshape(-1, rank)
    return found


Named = list[tuple[str, npt.NDArray[np.float32]]]
Joined = Literal["", "qkv", "all"]


def _fused(tensors: Named, what: Joined) -> Named:
    """As llama.cpp's converter joins them with --fuse-qkv and --fuse-gate-up-exps, see
    prepare_qkv_fusion and modify_tensors in its conversion/base.py; of more architectures than it
    does."""
    found = dict(tensors)
    joined = {
        ("attn_q", "attn_k", "attn_v"): ("attn_qkv", 0),
        ("ffn_gate_exps", "ffn_up_exps"): ("ffn_gate_up_exps", 1),
    }
    for parts, (whole, axis) in joined.items():
        if axis and what == "qkv":
            continue
        for first in [name for name in found if f".{parts[0]}." in name]:
            names = [first.replace(parts[0], part) for part in parts]
            has_bias = any(name.replace("weight", "bias") in found for name in names)
            if found.keys() >= set(names) and not (axis and has_bias):
                arrays = [found.pop(name) for name in names]
                found[first.replace(parts[0], whole)] = np.concatenate(arrays, axis)
    return list(found.items())


def write_gguf(
    checkpoint: Path,
    file: Path,
    quantize: Quantize = plain,
    beside: Mapping[str, npt.NDArray[np.float32]] = MappingProxyType({}),
    joined_latents: bool = False,
    fused: Joined = "",
    called: str = "",
    rename: Callable[[str], str] = lambda name: name,
    **extra: Any,
) -> None:
    """A GGUF file with the checkpoint's weights and a byte-level tokenizer. `extra` metadata
    replaces what would be written; None leaves it out. `quantize` may change the numbers it is
    given, and `beside` are tensors that are written after all others. `fused`: what the converter
    may join is joined. `called`: another name for the architecture, `rename` gives tensors
    theirs."""
    config = json.loads((checkpoint / "config.json").read_text())
    config |= config.get("text_config", {}) | {"model_type": config["model_type"]}
    architecture = (ARCHITECTURES | OF_THE_CPU_ALONE)[config["model_type"]]
    if "E" in config.get("hybrid_override_pattern", ""):
        architecture = "nemotron_h_moe"
    known = _NAMED_LIKE.get(architecture, architecture)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    metadata = {
        "general.architecture": called or architecture,
        **TOKENIZER,
        **{f"{called or architecture}.{key}": number for key, number in _numbers(config).items()},
        **extra,
    }
    writer = gguf.GGUFWriter(file, str(metadata.pop("general.architecture")))
    add_metadata(writer, metadata)
    heads = config.get("num_attention_heads", 1)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    tensors = mx.load(str(checkpoint / "model.safetensors"))
    if architecture == "apertus":  # see ApertusModel of conversion/llama.py
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            layers = [f"model.layers.{i}.mlp.act_fn.{part}" for i in range(zoo.LAYERS)]
            numbers_of_layers = [tensors.pop(name).item() for name in layers]
            writer.add_array(f"xielu.{part}", numbers_of_layers)
    if "kv_lora_rank" in config and architecture != "minicpm3":
        tensors = _latents(tensors, config, joined_latents)
    named: Named = []
    for name, array in _split(tensors, config):
        name = name.removeprefix("language_model.").replace("model.language_model.", "model.")
        own, numbers = _own_name(_as_kimi(name, config), names), np.array(array.astype(mx.float32))
        numbers = _as_converted(name, numbers, config)
        if architecture in _PERMUTED and re.search(r"\.attn_[qk]\.", own):
            numbers = _permuted(numbers, len(numbers) // head_dim)
        if config["model_type"] == "jamba" and own.endswith("ffn_norm"):
            own += ".weight"
        if config["model_type"] in ("nemotron", "minimax_m3_vl") and own.endswith("norm.weight"):
            numbers = numbers + 1
        if config["model_type"] in ("gemma", "gemma2", "gemma3_text") and "norm" in own:
            numbers = numbers + 1
        if config["model_type"] == "muse_glimmer" and re.match(r"blk.*norm\.weight", own):
            numbers = numbers + 1
        named.append((own, numbers))
    if config["model_type"] == "muse_glimmer":  # see MuseGlimmerModel of conversion/muse_glimmer.py
        for layer in range(config["num_hidden_layers"]):
            for part, number in (("q", config.get("qk_scale_factor", 3.87)), ("k", 1.0)):
                whole = np.full(config["head_dim"], number, np.float32)
                named.append((f"blk.{layer}.attn_{part}_norm.weight", whole))
    for own, numbers in _fused(named, fused) if fused else named:
        kind = gguf.GGMLQuantizationType[quantize(own, numbers)]
        writer.add_tensor(rename(own), quantized(numbers, kind), raw_dtype=kind)
    if architecture == "gemma4":  # of its widest heads a quarter turns
        half = config.get("global_head_dim", 512) // 2
        factors = np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for name, numbers in beside.items():
        writer.add_tensor(name, numbers)
    finish(writer)


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """None leaves a key out."""
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, np.ndarray):  # of uint64
            of_which = gguf.GGUFValueType.UINT64
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, of_which)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plain_model(folder: Path) -> Any:
    """mlx-lm's own model of a GGUF file's folder, uncut, in float32."""
    weights = GGUFWeights(folder, mx.float32)
    classes = classes_given(lambda stored: weights.stand_ins())
    model, _ = load_model(folder, lazy=True, strict=False, get_model_classes=classes)
    weights.read_into(model, "")
    model.set_dtype(mx.float32)
    return model
