"""Tiny random checkpoints of every architecture the installed mlx-lm ships.

A configuration is put together from what the architecture's ModelArgs asks for: `_COMMON` gives a
small value for each name, `_SPECIAL` what one architecture wants differently.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import pkgutil
import re
import shutil
from collections.abc import Callable, Collection
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.models
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from exo.errors import ModelUnsupported
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.mlx import together
from exo.inference.mlx.corrections import correct
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.models import file_parts
from exo.models.description import ModelDescription
from exo.models.file_parts import HEADER_SUFFIX, MAP_SUFFIX, PART_SUFFIX, State, blocks_of
from exo.models.tensor_table import parts_with, safetensors_header
from exo.shard import Shard

LAYERS = 6
VOCABULARY = 128

_COMMON: dict[str, Any] = {
    # Sizes.
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "hidden_dim": 64,
    "d_model": 64,
    "n_embd": 64,
    "model_dim": 64,
    "intermediate_size": 128,
    "ffn_hidden_size": 128,
    "ff_intermediate_size": 128,
    "expert_ffn_hidden_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "n_inner": 128,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_transformer_layers": LAYERS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "block_size": 512,
    "model_max_length": 512,
    # Norms, RoPE, scales.
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "swa_rope_theta": 10000.0,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "rotary_dim": 8,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"rope_type": "default"},
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 3.0,
    "routed_scaling_factor": 1.5,
    "logits_soft_cap": 30.0,
    "gegelu_limit": 20.0,
    # Switches.
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qkv_bias": True,
    "conv_bias": True,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "tie_word_embeddings": True,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "qk_norm": True,
    "post_norm": False,
    "use_expert_bias": True,
    "hidden_act": "silu",
    # Mixtures.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_every_n_layers": 1,
    "n_group": 1,
    "n_groups": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_dense_layers": 2,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    "use_mixed_mlp_moe": True,
    # Latent attention.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 4,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    # Windows.
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "sliding_window_pattern": 3,
    "window_size": 8,
    # Recurrent layers.
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_rank": 4,
    "time_step_limit": (0.001, 100.0),
    "conv_kernel": 4,
    "conv_L_cache": 3,
    "conv1d_width": 4,
    "conv_window": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 8,
    "gate_low_rank_dim": 8,
    "decay_low_rank_dim": 8,
    "layer_group_size": 3,
    "group_norm_size": 2,
}

GEMMA4_31B: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
}
GEMMA4_26B = {
    **GEMMA4_31B,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
    "llama_4_scaling_beta": 0.1,
}
OF_BOTH_KINDS = {
    "full_attention": {
        "rope_theta": 5000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
}
LAGUNA_XS: dict[str, Any] = {
    "layer_types": list(reversed(_SLIDING)),
    "num_attention_heads_per_layer": [4, 6] * (LAYERS // 2),
    "rope_parameters": {
        "full_attention": {**OF_BOTH_KINDS["full_attention"], "partial_rotary_factor": 0.5},
        "sliding_attention": OF_BOTH_KINDS["sliding_attention"],
    },
    "moe_routed_scaling_factor": 2.5,
}
"""As Laguna XS.2 is: layers differ in their heads, and in which numbers of them positions turn."""
NEMOTRON_49B: dict[str, Any] = {
    "block_configs": [
        {
            "attention": {"no_op": True} if layer == 2 else {"n_heads_in_group": 1 + layer % 2},
            "ffn": {"no_op": True} if layer == 4 else {"ffn_mult": 6.0 * (1 + layer % 2)},
        }
        for layer in range(LAYERS)
    ]
}
"""As Llama 3.3 Nemotron Super is: layers differ, and may have no attention or no MLP."""
STEP_FLASH: dict[str, Any] = {
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 2,
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
    "num_attention_groups": 1,
    "partial_rotary_factors": ([0.5] + [1.0] * 3) * 2,
    "rope_theta": ([5000.0] + [100.0] * 3) * 2,
    "yarn_only_types": ["full_attention"],
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_layers_enum": "2,3,4,5",
    "share_expert_dim": 48,
    "swiglu_limits": [0.0] * 4 + [0.02] * 2,
    "swiglu_limits_shared": [0.0, 0.01, 0.0, 0.0, 0.0, 0.03],
}
"""As Step 3.5 Flash is: layers differ in heads, KV heads, and what limits their activations."""
_LINEAR_ATTENTION = {
    "kda_layers": [1, 2, 4, 5],
    "full_attn_layers": [3, 6],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
}

_SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _SLIDING},
    "bailing_moe_v3": {
        "kda_lower_bound": -5.0,
        "n_group": 2,
        "topk_group": 1,
        "moe_shared_expert_intermediate_size": 48,
        "rope_theta": 6e6,
    },
    "baichuan_m1": {
        "sliding_window_layers": [1, 3],
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
    },
    "deepseek": {"num_experts_per_tok": 2},
    "glm": {"partial_rotary_factor": 1.0},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy", "num_experts_per_tok": 2},
    "exaone4": {"sliding_window_pattern": "LLG"},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False] + [True] * (LAYERS - 1)},
    "falcon_h1": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "gear": {"layer_types": ["sliding_attention", "conv_mixer", "full_attention"] * (LAYERS // 3)},
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _SLIDING,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "rope_parameters": None,
    },
    "glm_moe_dsa": {"attention_bias": False},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"] * (LAYERS // 3),
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "hunyuan": {
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": {"linear_attn_config": _LINEAR_ATTENTION, "num_experts_per_token": 2},
    "lfm2": {
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 128,
        "full_attn_idxs": [2, 4],
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    },
    "lfm2_moe": {
        "full_attn_idxs": [2, 4],
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "mellum": {
        "layer_types": _SLIDING,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "head_dim": 24,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "attention_value_scale": 0.707,
        "n_shared_experts": None,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 128,
        }
    },
    "ministral3": {"rope_parameters": YARN},
    "mistral4": {"rope_parameters": YARN},
    "nanbeige": {"num_loops": 2},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {
                    "no_op": index == 2,
                    "replace_with_linear": index == 3,
                    "n_heads_in_group": None if index in (2, 3) else 2,
                },
                "ffn": {
                    "no_op": index == 4,
                    "replace_with_linear": index == 1,
                    "ffn_mult": None if index in (1, 4) else 2.0,
                },
            }
            for index in range(LAYERS)
        ]
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-", "M", "*", "-"]},
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0] * LAYERS,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "mup_attn_multiplier": 1.0,
        "mup_use_scaling": True,
        "mup_embedding_multiplier": 10.0,
        "mup_width_multiplier": 8.0,
        "blocksparse_block_size": 32,
        "dummy_token_indices": [1, 2],
        "blocksparse_num_local_blocks": 4,
        "blocksparse_vert_stride": 4,
    },
    "plamo": {"n_shared_head": 4},
    "qwen": {"kv_channels": 16},
    "qwen3": {"rope_theta": 10000.0},
    "recurrent_gemma": {
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "spark2_5": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "step3p5": {"num_attention_groups": 2, "layer_types": None},
}

# Multimodal classes wrap another architecture's language model.
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "lfm2-vl": "lfm2",
    "mistral3": "llama",
    "pixtral": "llama",
    "qwen3_5_moe": "qwen3_5",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
_TEXT_SPECIAL: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "layer_types": _SLIDING,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5] * LAYERS,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "intermediate_size": [128] * LAYERS,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 16.0,
        "final_logit_softcapping": 30.0,
        "rope_scaling": None,
    },
    "kimi_k3": {
        "linear_attn_config": _LINEAR_ATTENTION,
        "attn_res_block_size": 3,
        "activation_situ_beta": 1.0,
        "num_experts_per_token": 2,
    },
    "llama4": {
        "attention_chunk_size": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "rms_norm_eps": 1e-6,  # mlx-lm's of heads, whatever the configuration says
        "floor_scale": 4,
        "rope_scaling": None,
    },
    "qwen3_vl_moe": {"tie_word_embeddings": False},
    "minimax_m3_vl": {
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 128,
        "moe_layer_freq": [0] + [1] * (LAYERS - 1),
        "sparse_attention_freq": [0] + [1] * (LAYERS - 1),
        "index_n_heads": 2,
        "index_block_size": 64,
        "index_topk_blocks": 2,
    },
    "muse_spark": {
        "layer_types": _SLIDING,
        "layer_rope_theta": [10000.0, 0.0] * (LAYERS // 2),
        "post_norm_eps": 1e-5,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 0.5,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
}


@cache
def architectures() -> tuple[str, ...]:
    """Every module of mlx_lm.models that has a Model."""
    names = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            found = importlib.import_module(f"mlx_lm.models.{module.name}")
        except SystemExit:  # olmo's way of saying that a package is missing
            continue
        if hasattr(found, "Model") and hasattr(found, "ModelArgs"):
            names.append(module.name)
    return tuple(names)


FALCON_H1_MULTIPLIERS: dict[str, Any] = {
    "key_multiplier": 0.125,
    "attention_out_multiplier": 0.75,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.25,
    "ssm_multipliers": [0.5, 1.25, 0.75, 2.0, 1.5],
    "mlp_multipliers": [0.5, 2.0],
}
"""All unlike each other and unlike 1, as in the models there are."""


def tiny_config(model_type: str) -> dict[str, Any]:
    """A small configuration of the architecture."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    config = _filled(module.ModelArgs)
    if any(field.name == "text_config" for field in dataclasses.fields(module.ModelArgs)):
        inner = [
            getattr(module, n)
            for n in dir(module)
            if (n.startswith("Text") and "Args" in n) or n == "TextConfig"
        ]
        if model_type in _TEXT_OF:
            text = tiny_config(_TEXT_OF[model_type])
            config["text_config"] = text.get("text_config", text) | _TEXT_SPECIAL.get(
                model_type, {}
            )
        elif inner:
            config["text_config"] = _filled(inner[0]) | _TEXT_SPECIAL.get(model_type, {})
    return config | {"model_type": model_type} | _SPECIAL.get(model_type, {})


def _filled(arguments: Any) -> dict[str, Any]:
    """The common values for what a dataclass needs, and for defaults that would be too large."""
    config = {"model_type": "tiny"}
    for field in dataclasses.fields(arguments):
        if field.name not in _COMMON:
            continue
        required = field.default is dataclasses.MISSING and (
            field.default_factory is dataclasses.MISSING
        )
        too_large = isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
        sizes = field.default is None and field.name.endswith(
            ("_dim", "_size", "_heads", "_rank", "experts", "_layers")
        )
        if required or too_large or sizes:
            config[field.name] = _COMMON[field.name]
    return config


def write_tokenizer(folder: Path) -> None:
    """One token a word ("word1" to the vocabulary's end), and a chat template."""
    words = {"<unk>": 0} | {f"word{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    described["chat_template"] = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def write_checkpoint(model_type: str, folder: Path, config: dict[str, Any] | None = None) -> None:
    """A float32 checkpoint of the architecture with random weights, as mlx-lm writes them."""
    config = config or tiny_config(model_type)
    model_class, arguments = _get_classes(config)
    mx.random.seed(0)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.float32)

    def shaken(parameter: mx.array) -> mx.array:
        # Gates and biases begin as zeros, which would hide a layer that is skipped.
        if not mx.issubdtype(parameter.dtype, mx.floating):
            return parameter
        return parameter + 0.05 * mx.random.normal(parameter.shape)

    model.update(tree_map(shaken, model.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def cut_into_files(source: Path, target: Path, count: int) -> list[str]:
    """The same checkpoint in `count` weight files: the embedding, the layers in order, the rest.
    Returns the files' names."""
    weights: dict[str, mx.array] = {}
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            weights |= mx.load(str(file))
        else:
            shutil.copy(file, target)

    def place(name: str) -> tuple[int, str]:
        layer = re.search(r"\.(\d+)\.", name)
        return (int(layer[1]) if layer else -1 if "embed" in name else LAYERS, name)

    names = sorted(weights, key=place)
    size = -(-len(names) // count)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        part = {name: weights[name] for name in names[i * size : (i + 1) * size]}
        mx.save_safetensors(str(target / file), part, metadata={"format": "mlx"})
    return files


def only_with(source: Path, target: Path, tensors: Collection[str]) -> Path:
    """A folder as exo/download/outline.py makes it: of weight files what holds these tensors, or
    the header; where data would be missing it is no number."""
    parts = parts_with(source, tensors)
    target.mkdir()
    for file in source.iterdir():
        link, data = target / file.name, file.read_bytes()
        if file.suffix != ".safetensors":
            link.symlink_to(file)
            continue
        if ranges := parts.get(file.name):
            blocks = np.zeros(blocks_of(0, len(data))[1], np.uint8)
            for start, end in ranges:
                blocks[slice(*blocks_of(start, end))] = State.SAVED
            here = blocks.repeat(file_parts.BLOCK)[: len(data)] == State.SAVED
            part = target / f"{file.stem}{PART_SUFFIX}"
            part.with_suffix(MAP_SUFFIX).write_bytes(blocks.tobytes())
            part.write_bytes(np.where(here, np.frombuffer(data, np.uint8), 0xFF).tobytes())
        else:
            part = target / f"{file.stem}{HEADER_SUFFIX}"
            header = safetensors_header(file)[0]
            part.write_bytes(data[:header] + b"\xff" * (len(data) - header))
        link.symlink_to(part.name)
    return target


PROMPTS = ([5, 9, 2, 77, 31, 8, 4, 60, 12, 3, 90], [44, 7, 19])
"""Two sequences of different lengths; the first is longer than the sliding windows."""

FOLLOWING = ([21, 6, 101], [88, 3, 54])
"""What is decoded after each of them, whatever the model says."""


class RecordingEngine(MLXEngine):
    """The engine under test, keeping the logits it would have sampled from."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[npt.NDArray[np.float32]] = []

    def compute(self, shard, batch, hidden_states):  # type: ignore[no-untyped-def]
        computed = super().compute(shard, batch, hidden_states)
        if shard.is_last:
            self.logits.append(computed)
        return computed


def unsplit_logits(folder: Path) -> list[npt.NDArray[np.float32]]:
    """mlx-lm's own model, where it is right, one sequence at a time: the logits after the prompt
    and after each following token; [steps][sequences, vocabulary]."""
    model, config = load_model(folder, lazy=True)
    correct(model, config)
    model.set_dtype(mx.float32)
    rows = []
    for prompt, following in zip(PROMPTS, FOLLOWING, strict=True):
        cache = make_prompt_cache(model)
        steps = [model(mx.array([prompt]), cache=cache)[0, -1]]
        steps += [model(mx.array([[token]]), cache=cache)[0, -1] for token in following]
        rows.append([np.array(step) for step in steps])
    return [np.stack(step) for step in zip(*rows, strict=True)]


async def describe(folder: Path) -> ModelDescription:
    """What a planner learns of the checkpoint. Raises ModelUnsupported."""
    engine = MLXEngine(precise=True)
    try:
        return await engine.describe("tiny", folder)
    finally:
        await engine.close()


async def split_logits(folder: Path, cuts: list[int], n_layers: int) -> list[npt.NDArray]:
    """The same through engines that hold one shard each, both sequences in every step."""
    bounds = [0, *cuts, n_layers]
    shards = [Shard("tiny", a, b, n_layers) for a, b in pairwise(bounds)]
    engines = [RecordingEngine() for _ in shards]
    greedy = SamplingParams(temperature=0)
    try:
        for engine, shard in zip(engines, shards, strict=True):
            await engine.load(shard, folder, lambda done, total: None)
        starts = [0] * len(PROMPTS)
        for step in range(1 + len(FOLLOWING[0])):
            tokens = [
                prompt if step == 0 else [following[step - 1]]
                for prompt, following in zip(PROMPTS, FOLLOWING, strict=True)
            ]
            batch = ForwardBatch(
                tuple(
                    Slice(f"s{i}", starts[i], len(tokens[i]), greedy) for i in range(len(tokens))
                ),
                np.array([token for part in tokens for token in part], np.int32),
            )
            hidden_states = None
            for engine, shard in zip(engines, shards, strict=True):
                hidden_states = (await engine.forward(shard, batch, hidden_states)).hidden_states
            starts = [start + len(part) for start, part in zip(starts, tokens, strict=True)]
        return engines[-1].logits
    finally:
        for engine in engines:
            await engine.close()


def worst_error(found: list[npt.NDArray], expected: list[npt.NDArray]) -> float:
    """Largest difference of any logit, relative to the largest logit where that is above 1."""
    return max(
        float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))
        for a, b in zip(found, expected, strict=True)
    )


def some_cuts(description: ModelDescription) -> list[list[int]]:
    """An uneven 3-way split, whose shards have one layer, two and three, and one layer per node, of
    those the architecture allows."""
    n_layers = description.n_layers
    allowed = [c for c in range(1, n_layers) if description.cuts is None or c in description.cuts]
    wanted = [[1, 3], list(range(1, n_layers))]
    kept = [[c for c in cuts if c in allowed] for cuts in wanted]
    return [list(cuts) for cuts in dict.fromkeys(map(tuple, kept)) if cuts]


def once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Gives what the first call gave or raised: whether a model computes for sequences together is
    tried on all of its layers, and not on each shard's again, which takes more time than the rest.
    """
    found: list[Any] = []

    def remembered(*args: Any) -> Any:
        if not found:
            try:
                found.append(call(*args))
            except together._FAILURES as error:
                found.append(error)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return remembered


def split_errors(model_type: str, folder: Path) -> tuple[ModelDescription, dict[str, float]]:
    """How far each split of a tiny checkpoint of the architecture is from the unsplit model.

    Raises:
        ModelUnsupported: the architecture does not run on this machine at all.
    """
    write_checkpoint(model_type, folder)
    return compare_splits(folder)


def compare_splits(folder: Path) -> tuple[ModelDescription, dict[str, float]]:
    """The same for any small checkpoint."""

    async def compared() -> tuple[ModelDescription, dict[str, float]]:
        description = await describe(folder)
        expected = unsplit_logits(folder)
        if not all(np.isfinite(step).all() for step in expected):
            raise ModelUnsupported(f"{folder}: the tiny model's logits are not finite")
        errors = {}
        with mock.patch.object(together, "_tried", once(together._tried)):
            for cuts in [[], *some_cuts(description)]:
                found = await split_logits(folder, cuts, description.n_layers)
                errors[str(cuts)] = worst_error(found, expected)
        return description, errors

    return asyncio.run(compared())


def quantize_checkpoint(source: Path, target: Path, bits: int = 4, mode: str = "affine") -> None:
    """The checkpoint with its matrices in one of MLX's layouts, as mlx_lm.convert writes it."""
    from mlx_lm.utils import quantize_model, save_config, save_model

    model, config = load_model(source)
    model, config = quantize_model(model, config, 32, bits, mode=mode)
    save_model(target, model)
    save_config(config, target / "config.json")
