"""Which layers attend to chosen blocks of keys alone: MiniMax M3's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exo.errors import ModelUnsupported
from exo.inference.batch import PAGE_TOKENS


@dataclass(frozen=True)
class Blocks:
    """A query attends to `most` blocks of `size` tokens, of which the `local` newest are always
    among them; an indexer with a head of `dim` numbers for each KV head chooses the others, in
    these layers. A block is whole pages of the KV cache."""

    layers: frozenset[int]
    dim: int
    size: int
    most: int
    local: int


def no_blocks(config: Mapping[str, Any]) -> Blocks | None:
    """All attend to all keys they see."""
    return None


def minimax_blocks(config: Mapping[str, Any]) -> Blocks | None:
    """As mlx-lm's minimax_m3_vl.py reads them, in the published words or in those of transformers.

    Raises:
        ModelUnsupported: other blocks than the kernels have.
    """
    given = config.get("sparse_attention_config") or {}

    def said(theirs: str, ours: str, *default: Any) -> Any:
        return given[theirs] if theirs in given else config.get(ours, *default)

    size = said("sparse_block_size", "index_block_size")
    if size is None:
        return None
    n_layers = int(config["num_hidden_layers"])
    if (kinds := config.get("layer_types")) is not None:
        chooses = [kind != "full_attention" for kind in kinds]
    else:
        often = said("sparse_attention_freq", "sparse_attention_freq")
        chooses = [True] * n_layers if often is None else [bool(one) for one in often]
    blocks = Blocks(
        layers=frozenset(layer for layer in range(n_layers) if chooses[layer]),
        dim=int(said("sparse_index_dim", "index_head_dim")),
        size=int(size),
        most=int(said("sparse_topk_blocks", "index_topk_blocks")),
        local=int(said("sparse_local_block", "index_local_blocks", 1)),
    )
    heads = int(said("sparse_num_index_heads", "index_n_heads"))
    if heads != int(config["num_key_value_heads"]):
        raise ModelUnsupported(
            f"an indexer of {heads} heads for {config['num_key_value_heads']} KV heads; the cpu "
            "engine has one for each"
        )
    if blocks.dim < int(config["rotary_dim"]):
        raise ModelUnsupported(
            f"an indexer's heads of {blocks.dim}, of which positions turn {config['rotary_dim']}"
        )
    if said("sparse_score_type", "index_score_type", "max") != "max" or said(
        "sparse_init_block", "index_init_blocks", 0
    ):
        raise ModelUnsupported(
            "blocks chosen otherwise than by their best key and by being the newest"
        )
    if blocks.size % PAGE_TOKENS or blocks.dim % 16 or not 1 <= blocks.local <= blocks.most:
        raise ModelUnsupported(
            f"{blocks.most} blocks of {blocks.size} tokens, {blocks.local} of them the newest, by "
            f"heads of {blocks.dim}; the cpu engine takes blocks that {PAGE_TOKENS} divides, heads "
            "that 16 divides, and at least the newest block"
        )
    return blocks
