"""GGUF families of selective state spaces, Mamba's."""

from __future__ import annotations

from collections.abc import Mapping

from exo.models.gguf.families.family import Config, GGUFFamily, Metadata, experts, mlp
from exo.models.gguf.families.recurrent import BACKBONE


def _selective(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_x": f"{module}.x_proj",
        "ssm_dt": f"{module}.dt_proj",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_out": f"{module}.out_proj",
        **{f"ssm_{part}_norm": f"{module}.{part}_layernorm" for part in ("dt", "b", "c")},
    }


_MAMBA = {
    **_selective("mixer"),
    **BACKBONE,
}
_JAMBA = {
    **_selective("mamba"),
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **mlp("feed_forward"),
    **experts("feed_forward.router", "feed_forward.switch_mlp"),
}


def _mamba(metadata: Metadata, config: Config) -> Config:
    return {
        "intermediate_size": metadata("ssm.inner_size"),
        "state_size": metadata("ssm.state_size"),
        "conv_kernel": metadata("ssm.conv_kernel"),
        "time_step_rank": metadata("ssm.time_step_rank"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "use_bias": metadata.has_tensor(".ssm_in.bias"),
        "use_conv_bias": metadata.has_tensor(".ssm_conv1d.bias"),
        "use_bcdt_rms": bool(metadata("ssm.dt_b_c_rms", False)),
    }


def _jamba(metadata: Metadata, config: Config) -> Config:
    """Which layers attend and which have experts is told by what they have (jamba.cpp)."""
    layers = range(config["num_hidden_layers"])
    attending = [
        i for i, count in enumerate(metadata.of_layers("attention.head_count_kv")) if count
    ]
    routing = [i for i in layers if metadata.has_tensor(f"blk.{i}.ffn_gate_inp.")]
    attn_offset, attn_period = _regular(attending, len(layers))
    expert_offset, expert_period = _regular(routing, len(layers))
    return {
        "layers_block_type": ["attention" if i in attending else "mamba" for i in layers],
        "attn_layer_offset": attn_offset,
        "attn_layer_period": attn_period,
        "expert_layer_offset": expert_offset,
        "expert_layer_period": expert_period,
        "num_experts": metadata("expert_count", 1) if routing else 1,
        "num_experts_per_tok": metadata("expert_used_count", 1),
        "mamba_d_conv": metadata("ssm.conv_kernel"),
        "mamba_d_state": metadata("ssm.state_size"),
        "mamba_dt_rank": metadata("ssm.time_step_rank"),
        "mamba_expand": metadata("ssm.inner_size") // config["hidden_size"],
        "mamba_proj_bias": metadata.has_tensor(".ssm_in.bias"),
        "mamba_conv_bias": metadata.has_tensor(".ssm_conv1d.bias"),
    }


def _regular(layers: list[int], count: int) -> tuple[int, int]:
    """The first of them, and how many layers after it the next one comes."""
    first, second = ([*layers, count, count])[:2]
    return first, max(second - first, 1)


SELECTIVE: Mapping[str, GGUFFamily] = {
    "mamba": GGUFFamily("mamba", layers="backbone.layers", tensors=_MAMBA, config=_mamba),
    "jamba": GGUFFamily("jamba", tensors=_JAMBA, config=_jamba),
}
