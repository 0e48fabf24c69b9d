"""What a planner must know of a checkpoint to place it, read from its files' headers alone."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exo import json_text
from exo.errors import ModelUnsupported
from exo.models.tensor_table import OF_EXPERTS, TensorEntry, tensors_of, weight_files
from exo.shard import Shard

KV_RESERVE_TOKENS = 4096
"""Tokens of KV cache counted with every layer when a model is placed."""

_IN_BYTES = (8 + 32 / 64) / 16
"""Of a float16 KV cache, one of bytes with a scale and an offset for 64 of them."""

_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EMBEDDING_NAME = re.compile(r"(?<!un)embed(?!_out|ding_norm)|wte|wpe|embd")
"""embed_out is GPT-NeoX's head, embedding_norm is LFM2's last norm."""
_OTHER_SENSES_NAME = re.compile(r"vision|visual|audio|multi_modal_projector|mm_projector")


@dataclass(frozen=True)
class ModelDescription:
    """`layer_bytes[i]` is layer i with its KV reserve, `first_bytes` what only the first shard
    holds, `last_bytes` what only the last one does. `cuts` lists the layer indices where the model
    may be cut, None meaning all, and `uncuttable` says why not everywhere.
    `checkpoint` is a digest of the configuration and of the tensors' names, shapes and sizes."""

    model_id: str
    model_type: str
    checkpoint: str
    layer_bytes: tuple[int, ...]
    first_bytes: int
    last_bytes: int
    context_length: int
    cuts: frozenset[int] | None = None
    uncuttable: str = ""
    kv_bytes: int = 0
    """Of each layer's bytes, the KV reserve."""
    shared_bytes: int = 0
    """Of an embedding that is also the head: part of the first and of the last, and held once."""

    expert_bytes: tuple[int, ...] = ()
    """Of each layer's bytes, those of a mixture's experts, where the engine can leave some of them
    on disk; empty where it cannot."""

    unread_bytes: tuple[int, ...] = ()
    """Of each layer's bytes, what decoding a token leaves unread: experts it is not routed to."""
    routed_share: float = 1.0
    """Of a layer's experts, those that a token is routed to; 1 where there is no choice."""

    @property
    def n_layers(self) -> int:
        return len(self.layer_bytes)

    def sizes_with(self, expert_share: float) -> tuple[int, ...]:
        """`layer_bytes` where so much of the experts is in memory."""
        if expert_share == 1 or len(self.expert_bytes) != self.n_layers:
            return self.layer_bytes
        pairs = zip(self.layer_bytes, self.expert_bytes, strict=True)
        return tuple(size - int(own * (1 - expert_share)) for size, own in pairs)

    def bytes_of(self, shards: Collection[Shard]) -> int:
        """Memory that these shards take together; layers they share count once."""
        sizes: dict[int, int] = {}
        for shard in shards:
            own = self.sizes_with(shard.expert_share)
            for i in range(shard.start_layer, shard.end_layer):
                sizes[i] = max(own[i], sizes.get(i, 0))
        first = self.first_bytes if any(shard.is_first for shard in shards) else 0
        last = self.last_bytes if any(shard.is_last for shard in shards) else 0
        last -= self.shared_bytes if first and last else 0
        return first + sum(sizes.values()) + last


def with_kv_in_bytes(found: ModelDescription) -> ModelDescription:
    """The same where the KV cache keeps bytes: less is reserved for it."""
    kv = int(found.kv_bytes * _IN_BYTES)
    layers = tuple(size - found.kv_bytes + kv for size in found.layer_bytes)
    return replace(found, layer_bytes=layers, kv_bytes=kv)


def read_config(path: Path) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        ModelUnsupported: there is none, or it is not a JSON object with a model_type.
    """
    try:
        config = json_text.object_in(path / "config.json")
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{path} has no readable config.json: {error}") from error
    if "model_type" not in config:
        raise ModelUnsupported(f"{path / 'config.json'} names no model_type")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration (multimodal ones nest it)."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            return {**config, **config[key]}
    return config


def first_of(config: dict[str, Any], *names: str) -> Any:
    """The first of `names` that the configuration gives a value, else None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def describe_checkpoint(model_id: str, path: Path, n_layers: int) -> ModelDescription:
    """Describe the checkpoint in `path` by its config.json and its weight files' headers.

    Raises:
        ModelUnsupported: no weights, or a header that cannot be read.
    """
    config = read_config(path)
    text = text_config(config)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    layers, experts = [0] * n_layers, [0] * n_layers
    first = last = embedding = 0
    tied = True  # unless there is a head; a configuration need not say so
    tokens = vocabulary(config)
    for name, entry in _tensors(path):
        size = entry.nbytes
        digest.update(f"{name}:{size}".encode())
        place = _LAYER_NAME.search(name)
        is_of_tokens = len(entry.shape) == 2 and max(entry.shape) >= tokens
        if _OTHER_SENSES_NAME.search(name):
            continue
        if place:
            if (layer := int(place[1])) < n_layers:
                layers[layer] += size
                experts[layer] += size if OF_EXPERTS.search(name) else 0
        elif _EMBEDDING_NAME.search(name):
            first += size
            if is_of_tokens and "per_layer" not in name:  # Gemma 4's second embedding is no head
                embedding += size
        else:
            last += size
            tied &= not is_of_tokens
    shared = embedding if tied else 0
    kv = _kv_bytes_per_token(text) * KV_RESERVE_TOKENS
    routed = _routed_share(text) if any(experts) else 1.0
    return ModelDescription(
        model_id=model_id,
        model_type=str(config["model_type"]),
        checkpoint=digest.hexdigest()[:16],
        layer_bytes=tuple(size + kv for size in layers),
        first_bytes=first,
        last_bytes=last + shared,
        context_length=context_length(config),
        kv_bytes=kv,
        shared_bytes=shared,
        unread_bytes=tuple(int(size * (1 - routed)) for size in experts) if routed < 1 else (),
        routed_share=routed,
    )


def _routed_share(text: dict[str, Any]) -> float:
    """By all names that mlx-lm's classes have for it; 1 where the configuration says nothing."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    tops = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts")
    count = first_of(text, *counts)
    top = first_of(text, *tops, "moe_top_k", "moe_topk", "moe_k")
    if isinstance(top, list):  # of each layer
        top = max(top, default=None)
    if not (isinstance(count, int) and isinstance(top, int) and 0 < top < count):
        return 1.0
    return top / count


def context_length(config: dict[str, Any]) -> int:
    """Tokens of context the checkpoint says it was trained for; 4096 where it does not say."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    found = first_of(text_config(config), *names)
    return int(found) if isinstance(found, (int, float)) and found > 0 else 4096


def vocabulary(config: dict[str, Any]) -> int:
    """Tokens that the checkpoint has embeddings of; 100, which every one has, where it does not
    say."""
    found = first_of(text_config(config), "vocab_size", "padded_vocab_size")
    return int(found) if isinstance(found, (int, float)) and found > 0 else 100


def _kv_bytes_per_token(text: dict[str, Any]) -> int:
    """Bytes of float16 keys and values one layer keeps for one token, however often it runs; an
    upper bound."""
    return _kv_bytes_of_a_run(text) * int(text.get("num_loops") or 1)


def _kv_bytes_of_a_run(text: dict[str, Any]) -> int:
    if isinstance(rank := text.get("kv_lora_rank"), int):  # one latent for all heads
        indexed = int(text.get("index_head_dim") or 0)
        return 2 * 2 * (rank + int(text.get("qk_rope_head_dim") or 0) + indexed)
    if ratios := [int(ratio) for ratio in text.get("compress_ratios") or () if ratio]:
        # One key, its value, and an indexer's key for so many tokens.
        of_entry = 2 * int(text["head_dim"]) + int(text.get("index_head_dim") or 0)
        return -(-2 * of_entry // min(ratios))
    heads = first_of(text, "num_attention_heads", "n_head", "n_heads") or 1
    hidden = first_of(text, "hidden_size", "n_embd", "d_model", "dim") or 0
    kv_heads = first_of(text, "num_key_value_heads", "multi_query_group_num") or heads
    head_dim = text.get("head_dim") or (hidden // heads if isinstance(heads, int) else 0)
    if not (isinstance(kv_heads, int) and isinstance(head_dim, int)):
        return 2 * 2 * int(hidden)
    sparse = text.get("sparse_attention_config") or {}
    indexed = sparse.get("sparse_index_dim") or text.get("index_head_dim") or 0
    return 2 * (2 * kv_heads * head_dim + int(indexed))


def _tensors(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    """Every tensor by its name, by file name and then as the header lists them."""
    for file in weight_files(path):
        yield from tensors_of(file).items()


def spare_tensors(
    tensors: Collection[str], start: int, end: int, n_layers: int
) -> tuple[frozenset[str], frozenset[str]]:
    """Two guesses at which of a checkpoint's tensors layers [start, end) can do without, by their
    names; the bolder first."""
    kinds = {name: _kind(name, start, end) for name in tensors}
    own = {"layer", *(["embedding"] if start == 0 else []), *(["head"] if end == n_layers else [])}
    bold = frozenset(name for name, kind in kinds.items() if kind not in own)
    careful = frozenset(name for name, kind in kinds.items() if kind == "other")
    return bold, careful


def _kind(tensor: str, start: int, end: int) -> str:
    """Of a "layer" of [start, end), an "embedding", the "head" and what else belongs to no layer,
    or of an "other" layer."""
    if _OTHER_SENSES_NAME.search(tensor):
        return "other"
    if place := _LAYER_NAME.search(tensor):
        return "layer" if start <= int(place[1]) < end else "other"
    return "embedding" if _EMBEDDING_NAME.search(tensor) else "head"
