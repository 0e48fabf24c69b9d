"""Gemma 3n: a hidden state of several streams, keys and values that layers share, what tokens bring
to each layer, gates of which little goes on.

The arithmetic is that of mlx-lm's gemma3n.
"""

from __future__ import annotations

from statistics import NormalDist

from exo.inference.cpu.families.dense import SANDWICH_NORMS
from exo.inference.cpu.families.family import Family
from exo.inference.cpu.families.gemma4 import kv_from, scales, slides, window
from exo.inference.cpu.families.positions import Config
from exo.inference.cpu.families.rope import RopeTable, rope_table


def _rope(config: Config, layer: int) -> RopeTable:
    base = config["rope_local_base_freq"] if slides(config, layer) else config["rope_theta"]
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
    kv_from=kv_from,
    rope=_rope,
    window=window,
    scales=scales,
    token_inputs="hidden_size_per_layer_input",
    alt_up=True,
    sparsity=_sparsity,
)
