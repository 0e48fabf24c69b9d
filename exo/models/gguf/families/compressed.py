"""GGUF families that attend to a window, and to entries that stand for several tokens: DeepSeek V4.

Names of tensors are those of transformers' modeling_deepseek_v4.py, keys of the configuration those
of the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from exo.errors import ModelUnsupported
from exo.models.gguf.families.family import HYPER, Config, GGUFFamily, Metadata, hyper
from exo.models.gguf.families.latents import indexer
from exo.models.gguf.families.mixtures import ROUTED, deepseek_routing

_ROOT_SOFTPLUS = 4
"""How llama.cpp counts what weighs experts (LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS)."""

_COMPRESSOR, _INDEXER = "self_attn.compressor", "self_attn.compressor.indexer"
_DEEPSEEK4 = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    "attn_sinks": "self_attn.sinks",
    "indexer.attn_q_b": f"{_INDEXER}.q_b_proj",
    "indexer.proj": f"{_INDEXER}.scorer.weights_proj",
    **{
        f"{theirs}_compressor_{part}": f"{ours}.{name}"
        for theirs, ours in (("attn", _COMPRESSOR), ("indexer", _INDEXER))
        for part, name in (
            ("kv", "kv_proj"),
            ("gate", "gate_proj"),
            ("ape", "position_bias"),
            ("norm", "kv_norm"),
        )
    },
    **HYPER,
    **ROUTED,
    "ffn_gate_tid2eid": "mlp.gate.tid2eid",
    "exp_probs_b_vl": "",  # of tokens that are parts of pictures
}


def _deepseek4(metadata: Metadata, config: Config) -> Config:
    ratios = metadata.numbers("attention.compress_ratios")[: config["num_hidden_layers"]]
    if set(ratios) - {0, 4, 128}:
        raise ModelUnsupported(
            f"entries of {sorted(set(ratios))} tokens; DeepSeek V4 has 4 and 128"
        )
    if (weighed := metadata("expert_gating_func", _ROOT_SOFTPLUS)) != _ROOT_SOFTPLUS:
        raise ModelUnsupported(f"a DeepSeek V4 whose experts are weighed in way {weighed}")
    return {
        **deepseek_routing(metadata, config),
        **indexer(metadata),
        **hyper(metadata),
        "hc_sinkhorn_iters": metadata("hyper_connection.sinkhorn_iterations"),
        "scoring_func": "sqrtsoftplus",
        "first_k_dense_replace": 0,
        "q_lora_rank": metadata("attention.q_lora_rank"),
        "qk_rope_head_dim": metadata("rope.dimension_count"),
        "sliding_window": metadata("attention.sliding_window"),
        "compress_ratios": [int(ratio) for ratio in ratios],
        "compress_rope_theta": metadata("attention.compress_rope_freq_base"),
        "o_groups": metadata("attention.output_group_count"),
        "o_lora_rank": metadata("attention.output_lora_rank"),
        "num_hash_layers": metadata("hash_layer_count"),
    }


COMPRESSED: Mapping[str, GGUFFamily] = {
    "deepseek4": GGUFFamily("deepseek_v4", tensors=_DEEPSEEK4, config=_deepseek4),
}
