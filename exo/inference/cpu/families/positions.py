"""How a family's layers turn positions, and how far back they see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exo.inference.cpu.families.rope import RopeTable, rope_table

Config = Mapping[str, Any]


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def full_attention(config: Config, layer: int) -> int:
    return 0


def llama_rope(config: Config, layer: int) -> RopeTable | None:
    return rope_table(
        head_dim(config),
        config.get("rope_theta", 10000.0),
        config.get("rope_scaling"),
        config.get("max_position_embeddings"),
        bool(config.get("rope_traditional")),
    )


def of_rope_parameters(config: Config, theta: float) -> dict[str, Any]:
    """The base of positions and how they are scaled, which configurations since 2026 have in
    `rope_parameters`; `theta`: the base where none is said."""
    given = config.get("rope_parameters") or {}
    return {
        "rope_theta": given.get("rope_theta") or config.get("rope_theta", theta),
        "rope_scaling": given or config.get("rope_scaling"),
    }


def typed_window(config: Config, layer: int) -> int:
    kinds = config.get("layer_types") or []
    sliding = kinds and kinds[layer] == "sliding_attention"
    return int(config["sliding_window"]) if sliding else 0


def rope_by_kind(config: Config, layer: int) -> RopeTable | None:
    """Layers of each kind (`layer_types`) have parameters of their own; a linear scaling is none to
    mlx-lm's classes."""
    own = config["rope_parameters"][config["layer_types"][layer]]
    is_plain = own.get("rope_type", "default") in ("default", "linear")
    scaling = None if is_plain else {**own, "type": own["rope_type"]}
    own_theta = {"rope_theta": own["rope_theta"], "rope_scaling": scaling}
    return llama_rope({**config, **own_theta, "rope_traditional": False}, layer)


def gpt_oss_window(config: Config, layer: int) -> int:
    alternating = "sliding_attention" if layer % 2 == 0 else "full_attention"
    kinds = config.get("layer_types") or [alternating] * (layer + 1)
    return int(config.get("sliding_window", 128)) if kinds[layer] == "sliding_attention" else 0


def gpt_oss_rope(config: Config, layer: int) -> RopeTable:
    return rope_table(
        head_dim(config), config.get("rope_theta", 150000), config.get("rope_scaling")
    )


def plain_rope(config: Config, layer: int) -> RopeTable:
    theta = config.get("rope_theta", 10000.0)
    return rope_table(head_dim(config), theta, interleaved=bool(config.get("rope_traditional")))


def mixtral_rope(config: Config, layer: int) -> RopeTable:
    traditional = bool(config.get("rope_traditional"))
    width = config["hidden_size"] // config["num_attention_heads"]
    return rope_table(width, config.get("rope_theta", 1e6), interleaved=traditional)


def qwen2_rope(config: Config, layer: int) -> RopeTable | None:
    return llama_rope({"rope_theta": 1000000, **config}, layer)


def qwen3_rope(config: Config, layer: int) -> RopeTable | None:
    nested = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or nested.get("rope_theta")
    scaling = config.get("rope_scaling") or nested
    return llama_rope(
        {**config, "rope_theta": theta, "rope_scaling": scaling, "rope_traditional": False}, layer
    )


def smollm3_rope(config: Config, layer: int) -> RopeTable | None:
    interval = config.get("no_rope_layer_interval", 4)
    turned = config.get("no_rope_layers")
    rotates = turned[layer] if turned is not None else (layer + 1) % interval != 0
    return llama_rope(config, layer) if rotates else None


def phi3_rope(config: Config, layer: int) -> RopeTable:
    scaling = dict(config.get("rope_scaling") or {})
    if scaling.get("type") not in ("longrope", "su", "linear"):
        scaling = {}
    elif scaling["type"] != "linear":
        scaling["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", 4096
        )
    width = config["hidden_size"] // config["num_attention_heads"]
    return rope_table(
        int(width * config.get("partial_rotary_factor", 1.0)),
        config.get("rope_theta", 10000.0),
        scaling,
        config.get("max_position_embeddings", 131072),
        bool(config.get("rope_traditional")) and scaling.get("type") not in ("longrope", "su"),
    )


def _gemma3_slides(config: Config, layer: int) -> bool:
    return bool((layer + 1) % config.get("sliding_window_pattern", 6))


def gemma3_rope(config: Config, layer: int) -> RopeTable:
    dims = head_dim(config)
    if _gemma3_slides(config, layer):
        return rope_table(dims, config.get("rope_local_base_freq", 10000.0))
    return rope_table(
        dims,
        config.get("rope_theta", 1000000.0),
        config.get("rope_scaling"),
        config.get("max_position_embeddings", 32768),
    )


def gemma3_window(config: Config, layer: int) -> int:
    return int(config.get("sliding_window", 512)) if _gemma3_slides(config, layer) else 0


def partial_rope(config: Config, layer: int) -> RopeTable | None:
    """Of the first `partial_rotary_factor` of each head."""
    factor = config.get("partial_rotary_factor", 1.0)
    dims = int(head_dim(config) * factor)
    return llama_rope({**config, "head_dim": dims}, layer)


def interleaved_rope(config: Config, layer: int) -> RopeTable | None:
    return llama_rope({**config, "rope_traditional": True, "rope_scaling": None}, layer)


def _cohere2_slides(config: Config, layer: int) -> bool:
    return bool((layer + 1) % config.get("sliding_window_pattern", 4))


def cohere2_rope(config: Config, layer: int) -> RopeTable | None:
    """Only layers that see a window know positions."""
    if not _cohere2_slides(config, layer):
        return None
    return interleaved_rope({"rope_theta": 50000.0, **config}, layer)


def cohere2_window(config: Config, layer: int) -> int:
    return int(config.get("sliding_window", 4096)) if _cohere2_slides(config, layer) else 0


def exaone4_rope(config: Config, layer: int) -> RopeTable | None:
    """Where some layers see a window, only these know positions."""
    pattern = config.get("sliding_window_pattern")
    if pattern and not _exaone4_slides(config, layer):
        return None
    return llama_rope({**config, "rope_traditional": False}, layer)


def _exaone4_slides(config: Config, layer: int) -> bool:
    pattern = config.get("sliding_window_pattern") or "G"
    return bool(pattern[layer % len(pattern)] == "L")


def exaone4_window(config: Config, layer: int) -> int:
    return int(config["sliding_window"]) if _exaone4_slides(config, layer) else 0


def olmo3_window(config: Config, layer: int) -> int:
    kinds = config.get("layer_types")
    full = kinds[layer] == "full_attention" if kinds else (layer + 1) % 4 == 0
    return 0 if full else int(config["sliding_window"])


def olmo3_rope(config: Config, layer: int) -> RopeTable | None:
    scaling = config.get("rope_scaling") if olmo3_window(config, layer) == 0 else None
    return llama_rope({**config, "rope_traditional": False, "rope_scaling": scaling}, layer)


def hunyuan_rope(config: Config, layer: int) -> RopeTable:
    """NTK-aware scaling by `alpha`, as in Hunyuan's reference code."""
    dims = head_dim(config)
    alpha = (config.get("rope_scaling") or {}).get("alpha", 1.0)
    return rope_table(dims, config.get("rope_theta", 10000.0) * alpha ** (dims / (dims - 2)))


def latent_rope(config: Config, layer: int) -> RopeTable:
    scaling = dict(config.get("rope_scaling") or {})
    return rope_table(
        int(config["qk_rope_head_dim"]),
        config.get("rope_theta", 10000.0),
        scaling,
        config.get("max_position_embeddings"),
        interleaved=True,
    )


def minicpm3_rope(config: Config, layer: int) -> RopeTable:
    """Of what is not made of a latent, as `latent_rope`, but over halves."""
    scaling = {"original_max_position_embeddings": 4096, **(config.get("rope_scaling") or {})}
    return rope_table(
        int(config["qk_rope_head_dim"]),
        config.get("rope_theta", 1000000.0),
        scaling if "long_factor" in scaling else None,
        config.get("max_position_embeddings"),
    )


def deepseek_rope(config: Config, layer: int) -> RopeTable:
    """DeepSeek V1's; its class scales positions in one way alone."""
    scaling = config.get("rope_scaling") or {}
    is_linear = scaling.get("type") == "linear"
    theta = config.get("rope_theta", 10000.0)
    return rope_table(head_dim(config), theta, scaling if is_linear else None)


def phimoe_rope(config: Config, layer: int) -> RopeTable:
    """Phi 3.5's mixture; the smaller ones have no scaling."""
    scaling = dict(config.get("rope_scaling") or {})
    if scaling:
        scaling["type"] = "longrope"
        scaling["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", 4096
        )
    theta, most = config.get("rope_theta", 10000.0), config.get("max_position_embeddings", 131072)
    return rope_table(head_dim(config), theta, scaling, most)


def minimax_rope(config: Config, layer: int) -> RopeTable:
    return rope_table(int(config["rotary_dim"]), config["rope_theta"])
