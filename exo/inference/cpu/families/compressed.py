"""Families that attend to a window, and to entries that stand for several tokens each before it:
DeepSeek V4.

The arithmetic is that of llama.cpp's deepseek4.cpp and of transformers' modeling_deepseek_v4.py;
mlx-lm has no class of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from exo.inference.cpu.families.experts import routed_scale, same_limits
from exo.inference.cpu.families.family import Experts, Family, every_layer
from exo.inference.cpu.families.positions import Config
from exo.inference.cpu.families.rope import RopeTable, rope_table


def _rope(config: Config, layer: int) -> RopeTable:
    """Layers that have entries stretch positions, without YaRN's correction of the temperature."""
    turned = int(config["qk_rope_head_dim"])
    if not config["compress_ratios"][layer]:
        return rope_table(turned, config["rope_theta"], interleaved=True)
    scaling = config.get("rope_scaling")
    if scaling is not None:
        scaling = {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}
    return rope_table(turned, config["compress_rope_theta"], scaling, interleaved=True)


COMPRESSED: Mapping[str, Family] = {
    "deepseek_v4": Family(
        tied=False,
        tied_by_config=False,
        compressed=True,
        hyper=True,
        rope=_rope,
        sinks=every_layer,
        limits=same_limits,
        limits_inputs=True,
        experts=Experts(
            every_layer,
            routing="ROOT_SOFTPLUS_SUMMED_1",
            normalized="ROOT_SOFTPLUS_SUMMED_1",
            count="n_routed_experts",
            shared="shared_experts",
            bias="gate.e_score_correction_bias",
            told="gate.tid2eid",
            joined="over",
            scale=routed_scale,
        ),
    ),
}
