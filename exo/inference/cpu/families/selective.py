"""Families of selective state spaces, Mamba's: what a channel remembers fades and gains by what
goes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.family import Experts, Family, Mixer
from exo.inference.cpu.families.positions import Config
from exo.inference.cpu.families.recurrent import MAMBA_2

ScanNorms = Literal["", "plain", "weighed"]


@dataclass(frozen=True)
class SelectiveScan:
    """`channels` remember `state_dim` numbers each; steps are made of `rank` numbers. `norms`: of
    these, and of what lets in and what reads, with weights or without."""

    channels: int
    state_dim: int
    rank: int
    norms: ScanNorms
    norm_eps: float


def scan_of(config: Config) -> SelectiveScan:
    """Raises ModelUnsupported for sizes that the kernels do not take."""
    hidden = int(config["hidden_size"])
    rank = config["mamba_dt_rank"]
    sizes = SelectiveScan(
        channels=int(config["mamba_channels"]),
        state_dim=int(config["mamba_d_state"]),
        rank=-(-hidden // 16) if rank == "auto" else int(rank),
        norms=config["mamba_norms"],
        norm_eps=float(config["mamba_norm_eps"]),
    )
    if sizes.channels % 16 or sizes.state_dim % 4:
        raise ModelUnsupported(
            f"{sizes.channels} channels with states of {sizes.state_dim}; the cpu engine takes "
            "channels that 16 divides, and states that 4 divides"
        )
    return sizes


def _mamba_config(config: Config) -> Config:
    is_normed = config["model_type"] == "falcon_mamba" or bool(config.get("use_bcdt_rms"))
    return {
        **config,
        "num_attention_heads": 1,
        "rms_norm_eps": config.get("layer_norm_epsilon") or 1e-5,
        "mamba_channels": config["intermediate_size"],
        "mamba_d_state": config["state_size"],
        "mamba_dt_rank": config["time_step_rank"],
        "mamba_norms": "plain" if is_normed else "",
        "mamba_norm_eps": config.get("mixer_rms_eps") or 1e-6,
    }


_MAMBA = replace(
    MAMBA_2,
    mixer=lambda config, layer: "selective_scan",
    config=_mamba_config,
    modules={"selective_scan": "mixer"},
)


def _jamba_config(config: Config) -> Config:
    return {
        **config,
        "mamba_channels": int(config["mamba_expand"]) * int(config["hidden_size"]),
        "mamba_dt_rank": config.get("mamba_dt_rank", "auto"),
        "mamba_norms": "weighed",
        "mamba_norm_eps": config["rms_norm_eps"],
    }


def _jamba_mixer(config: Config, layer: int) -> Mixer:
    if named := config.get("layers_block_type"):
        return "attention" if named[layer] == "attention" else "selective_scan"
    offset, period = int(config["attn_layer_offset"]), int(config["attn_layer_period"])
    return "attention" if layer % period == offset else "selective_scan"


def _jamba_has_experts(config: Config, layer: int) -> bool:
    offset, period = int(config["expert_layer_offset"]), int(config["expert_layer_period"])
    return int(config["num_experts"]) > 1 and layer % period == offset


_JAMBA = Family(
    explicit_head_dim=False,
    norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    rope=lambda config, layer: None,
    mixer=_jamba_mixer,
    experts=Experts(_jamba_has_experts, router="router", normalizes=lambda config: False),
    config=_jamba_config,
    renames={"feed_forward": "mlp", "final_layernorm": "norm"},
)

SELECTIVE: Mapping[str, Family] = {"mamba": _MAMBA, "jamba": _JAMBA}
