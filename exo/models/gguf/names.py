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


def _experts(router: str, stacked: str) -> dict[str, str]:
    named = {f"ffn_{place}_exps": f"{stacked}.{place}_proj" for place in ("gate", "up", "down")}
    return {"ffn_gate_inp": router, **named}


@dataclass(frozen=True)
class GGUFFamily:
    """`interleaved_rope`: llama.cpp permutes the rows of q and k for RoPE over neighbouring pairs.
    `norms_add_one`: norms hold 1 + weight, where mlx-lm's class
    adds the 1. `tensors`: names in a layer that differ from a llama's."""

    model_type: str
    interleaved_rope: bool = False
    norms_add_one: bool = False
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
    if name.startswith(_IN_CONFIG):
        return None
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)(?:\.(weight|bias))?", name):
        module = family.tensors.get(layer[2], _LAYER_TENSORS.get(layer[2]))
        if module is not None:
            whole = f"model.layers.{layer[1]}.{module}"
            return whole if module.endswith(".sinks") else f"{whole}.{layer[3]}"
    else:
        module_name, _, kind = name.partition(".")
        if module_name in _OUTER_TENSORS:
            return f"{_OUTER_TENSORS[module_name]}.{kind}"
    raise ModelUnsupported(f"the GGUF file has a tensor {name!r} that exo does not know")
