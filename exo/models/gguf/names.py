"""Tensors of a GGUF file by the names that mlx-lm's class of the same architecture gives them."""

from __future__ import annotations

import re

from exo.errors import ModelUnsupported
from exo.models.gguf.families.family import Config, GGUFFamily

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
TENSOR_SCALE = "tensor_scale"
"""What a module calls the number that all of an NVFP4 weight is multiplied by, or each expert's."""

_IN_CONFIG = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
"""Tensors whose numbers stand in config.json elsewhere."""


_NO_MODULES = (
    *(
        ".sinks",
        ".A_log",
        ".D",
        ".dt_bias",
        "expert_bias",
        "correction_bias",
        "router_bias",
        "sink_bias",
    ),
    *(".position_bias", ".tid2eid", "_hc.fn", "_hc.base", "_hc.scale"),
    *(".hc_fn", ".hc_base", ".hc_scale", "_compress_gate", "_compress_ape"),
    *("layer_scalar", "router.scale", ".per_expert_scale", ".correct_output_scale"),
)
"""What mlx-lm keeps as arrays of their own, with neither weight nor bias in their names."""


def renamed(name: str, family: GGUFFamily, config: Config) -> str | None:
    """mlx-lm's name of a tensor; None if it is none there.

    Raises:
        ModelUnsupported: exo does not know the tensor.
    """
    if name.startswith(_IN_CONFIG) or ".nextn." in name or name.endswith(".input_scale"):
        return None
    if (
        name.endswith(".scale")
        and name.removeprefix("blk.").partition(".")[2] not in family.tensors
    ):
        weight = renamed(name.removesuffix("scale") + "weight", family, config)
        return weight and weight.removesuffix("weight") + TENSOR_SCALE
    if layer := re.fullmatch(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?", name):
        own = family.of_layer(config, int(layer[1]))
        module = own.get(layer[2], family.tensors.get(layer[2], _LAYER_TENSORS.get(layer[2])))
        if module == "":
            return None
        if module is not None:
            # Falcon-H1's norms before the MLP are there without a suffix.
            whole = f"{family.prefix}{family.layers}.{layer[1]}.{module}"
            return _with_kind(whole, layer[3] or "weight")
    else:
        module_name, _, kind = name.partition(".")
        outer = family.tensors.get(module_name, _OUTER_TENSORS.get(module_name))
        if outer is not None:
            return _with_kind(f"{family.prefix}{outer}", kind)
    raise ModelUnsupported(f"the GGUF file has a tensor {name!r} that exo does not know")


def _with_kind(module: str, kind: str) -> str:
    return module if module.endswith(_NO_MODULES) else f"{module}.{kind}"
