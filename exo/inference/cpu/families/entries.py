"""Attention to entries that stand for several tokens each: DeepSeek V4's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from exo.errors import ModelUnsupported
from exo.inference.cpu.families.positions import Config


@dataclass(frozen=True)
class Compressed:
    """Of DeepSeek V4's attention, by layer how many tokens an entry stands for (0: there are none)
    and which have an indexer, to how many entries a query attends there; how many newest tokens
    each query sees, and in how many parts what heads attended goes out."""

    ratios: tuple[int, ...]
    indexed: frozenset[int]
    most: int
    index_heads: int
    index_dim: int
    window: int
    groups: int


_INDEXED = 4
"""Where an entry stands for so many tokens, an indexer chooses (DeepSeek V4)."""


def compressed_of(config: Config) -> Compressed:
    n_layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    ratios = tuple(map(int, config["compress_ratios"][:n_layers]))
    groups, head_dim = int(config["o_groups"]), int(config["head_dim"])
    if heads % groups or head_dim % 16 or int(config["index_head_dim"]) % 16:
        raise ModelUnsupported(
            f"{heads} heads of {head_dim} in {groups} groups; the cpu engine takes sizes that 16 "
            "divides, and heads that their groups divide"
        )
    return Compressed(
        ratios=ratios,
        indexed=frozenset(i for i, ratio in enumerate(ratios) if ratio == _INDEXED),
        most=int(config["index_topk"]),
        index_heads=int(config["index_n_heads"]),
        index_dim=int(config["index_head_dim"]),
        window=int(config["sliding_window"]),
        groups=groups,
    )
