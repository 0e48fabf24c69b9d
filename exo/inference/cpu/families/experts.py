"""How experts are chosen and weighed, by families that many others follow."""

from __future__ import annotations

from dataclasses import replace

from exo.inference.cpu.families.family import Experts, every_layer
from exo.inference.cpu.families.positions import (
    Config,
)


def sparse_steps(config: Config, layer: int) -> bool:
    plain = config.get("mlp_only_layers") or []
    return layer not in plain and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


QWEN3_EXPERTS = Experts(sparse_steps)
MIXTRAL_EXPERTS = Experts(
    every_layer,
    routing="TOP_THEN_SOFTMAX",
    normalized="TOP_THEN_SOFTMAX",
    count="num_local_experts",
)
GRANITE_EXPERTS = replace(MIXTRAL_EXPERTS, router="router", joined="over")


def after_first_dense(config: Config, layer: int) -> bool:
    return layer >= int(config.get("first_k_dense_replace", 0))


def routed_scale(config: Config) -> float:
    return float(config.get("routed_scaling_factor") or 1.0)


def same_limits(config: Config, layer: int) -> tuple[float, float]:
    """In experts and elsewhere."""
    limit = float(config.get("swiglu_limit") or 0.0)
    return limit, limit


def deepseek_groups(config: Config) -> tuple[int, int, int]:
    return int(config.get("n_group") or 1), int(config.get("topk_group") or 1), 2


def deepseek_layers(config: Config, layer: int) -> bool:
    return after_first_dense(config, layer) and layer % int(config.get("moe_layer_freq", 1)) == 0


GLM4_EXPERTS = Experts(
    after_first_dense,
    routing="SIGMOID",
    normalized="SIGMOID_SUMMED_1",
    count="n_routed_experts",
    shared="shared_experts",
    bias="gate.e_score_correction_bias",
    scale=routed_scale,
    groups=deepseek_groups,
)

MIXTRAL_NAMES = {
    "block_sparse_moe": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
