"""Tensors of a GGUF file by the names that mlx-lm's class of the same architecture gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from exo.errors import ModelUnsupported

_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_CONFIG = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
"""Tensors whose numbers stand in config.json elsewhere."""


_NO_MODULES = (".sinks", ".A_log", ".dt_bias", "expert_bias", "correction_bias")
"""What mlx-lm keeps as arrays of their own, with neither weight nor bias in their names."""


def _experts(router: str, stacked: str) -> dict[str, str]:
    named = {f"ffn_{place}_exps": f"{stacked}.{place}_proj" for place in ("gate", "up", "down")}
    return {"ffn_gate_inp": router, **named}


@dataclass(frozen=True)
class GGUFFamily:
    """`interleaved_rope`: llama.cpp permutes the rows of q and k for RoPE over neighbouring pairs.
    `norms_add_one`: norms hold 1 + weight, where mlx-lm's class
    adds the 1. `prefix`: before all names. `tensors`: those that differ from a llama's."""

    model_type: str
    interleaved_rope: bool = False
    norms_add_one: bool = False
    prefix: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)


_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2 = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    **_experts("mlp.router", "mlp.experts"),
}

_DELTA_NETS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
    **_experts("mlp.gate", "mlp.switch_mlp"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    **_experts("mlp.gate", "mlp.switch_mlp"),
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
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
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    **_experts("feed_forward.gate", "feed_forward.switch_mlp"),
    "exp_probs_b": "feed_forward.expert_bias",
}

FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily("llama", interleaved_rope=True),
    "smollm3": GGUFFamily("smollm3", interleaved_rope=True),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3"),
    "phi3": GGUFFamily("phi3", tensors={"ffn_up": "mlp.gate_up_proj"}),
    "gemma": GGUFFamily("gemma", norms_add_one=True),
    "gemma2": GGUFFamily("gemma2", norms_add_one=True, tensors=_SANDWICH),
    "gemma3": GGUFFamily("gemma3_text", norms_add_one=True, tensors=_SANDWICH),
    "granite": GGUFFamily("granite", interleaved_rope=True),
    "olmo2": GGUFFamily("olmo2", tensors=_OLMO2),
    "qwen3moe": GGUFFamily("qwen3_moe", tensors=_experts("mlp.gate", "mlp.switch_mlp")),
    "gpt-oss": GGUFFamily("gpt_oss", tensors=_GPT_OSS),
    "qwen35": GGUFFamily("qwen3_5", prefix="language_model.", tensors=_DELTA_NETS),
    "qwen35moe": GGUFFamily("qwen3_5_moe", prefix="language_model.", tensors=_DELTA_NETS),
    "deepseek2": GGUFFamily("glm4_moe_lite", tensors=_LATENTS),
    "lfm2": GGUFFamily("lfm2", tensors=_LFM2 | _LFM2_MLP),
    "lfm2moe": GGUFFamily("lfm2_moe", tensors=_LFM2 | _LFM2_MOE),
}
"""By `general.architecture`."""

_MIXTRAL = GGUFFamily(
    "mixtral",
    interleaved_rope=True,
    tensors=_experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"),
)
_BY_TYPE = {family.model_type: family for family in (*FAMILIES.values(), _MIXTRAL)}


def family_of(architecture: str, *, mixture: bool) -> GGUFFamily:
    """The family of a file's `general.architecture`; `mixture`: it has experts.

    Raises:
        ModelUnsupported: none that exo reads.
    """
    if architecture == "llama" and mixture:
        return _MIXTRAL
    if (family := FAMILIES.get(architecture)) is None:
        raise ModelUnsupported(
            f"the GGUF file is of architecture {architecture!r}; GGUF files are read for "
            f"{', '.join(FAMILIES)}. Use the model's safetensors instead"
        )
    return family


def family_of_type(model_type: str) -> GGUFFamily:
    """The family by config.json's model_type. Raises ModelUnsupported as above."""
    if (family := _BY_TYPE.get(model_type)) is None:
        raise ModelUnsupported(f"GGUF files of {model_type!r} are not read")
    return family


def renamed(name: str, family: GGUFFamily) -> str | None:
    """mlx-lm's name of a tensor; None if it is none there.

    Raises:
        ModelUnsupported: exo does not know the tensor.
    """
    if name.startswith(_IN_CONFIG) or ".nextn." in name:
        return None
    if layer := re.fullmatch(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?", name):
        module = family.tensors.get(layer[2], _LAYER_TENSORS.get(layer[2]))
        if module is not None:
            whole = f"{family.prefix}model.layers.{layer[1]}.{module}"
            return whole if module.endswith(_NO_MODULES) else f"{whole}.{layer[3]}"
    else:
        module_name, _, kind = name.partition(".")
        outer = family.tensors.get(module_name, _OUTER_TENSORS.get(module_name))
        if outer is not None:
            return f"{family.prefix}{outer}.{kind}"
    raise ModelUnsupported(f"the GGUF file has a tensor {name!r} that exo does not know")
