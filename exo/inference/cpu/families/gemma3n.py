"""Gemma 3n: a hidden state of several streams, keys and values that layers share, what tokens bring
to each layer, gates of which little goes on.

The arithmetic is that of mlx-lm's gemma3n.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from exo.inference.cpu.families.dense import SANDWICH_NORMS
from exo.inference.cpu.families.family import Family
from exo.inference.cpu.families.positions import Config
from exo.inference.cpu.families.rope import RopeTable, rope_table


def _slides(config: Config, layer: int) -> bool:
    return bool(config["layer_types"][layer] == "sliding_attention")


def _kv_from(config: Config, layer: int) -> int:
    """The last layers read what the last of their kind cached that has keys of its own."""
    own = int(config["num_hidden_layers"]) - int(config["num_kv_shared_layers"])
    if layer < own:
        return layer
    return max(one for one in range(own) if _slides(config, one) == _slides(config, layer))


def _rope(config: Config, layer: int) -> RopeTable:
    base = config["rope_local_base_freq"] if _slides(config, layer) else config["rope_theta"]
    return rope_table(int(config["head_dim"]), base)


def _sparsity(config: Config, layer: int) -> float | None:
    """Deviations above which so much of a normal distribution does not lie."""
    shares = config.get("activation_sparsity_pattern")
    share = shares[layer] if shares else 0.0
    return NormalDist().inv_cdf(share) if share > 0 else None


GEMMA3N = Family(
    tied_by_config=False,
    activation="GELU_TANH",
    norms=SANDWICH_NORMS,
    head_norms=True,
    plain_norms=lambda config, layer: "v",
    kv_from=_kv_from,
    rope=_rope,
    window=lambda config, layer: int(config["sliding_window"]) if _slides(config, layer) else 0,
    scales=lambda config: {
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "attention_scale": 1.0,
        "logits_soft_cap": config["final_logit_softcapping"] or 0.0,
    },
    token_inputs="hidden_size_per_layer_input",
    alt_up=True,
    sparsity=_sparsity,
)
