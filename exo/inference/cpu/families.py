"""Which architectures the cpu engine runs, as one table over shared pieces.

A family says what differs from a llama: names of tensors, where norms stand, how positions turn,
what is scaled. `architecture` reads a checkpoint's config.json through its family; the defaults and
the arithmetic are those of mlx-lm's class of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exo.errors import ModelUnsupported
from exo.inference.cpu.rope import RopeTable, rope_table

Config = Mapping[str, Any]

_LLAMA_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_SANDWICH_NORMS = {
    "attention_norm": "input_layernorm",
    "after_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}
_OLMO2_NORMS = {
    "after_attention_norm": "post_attention_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Experts:
    """A mixture's tensors: below `block`, the router, stacked experts, or one by one."""

    block: str
    router: str
    stacked: str
    single: Mapping[str, str]  # of each projection below `experts.N`; empty: always stacked
    routing: str
    count: str  # config key


_QWEN3_EXPERTS = Experts(
    block="mlp",
    router="gate",
    stacked="switch_mlp",
    single={"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"},
    routing="SOFTMAX_THEN_TOP",
    count="num_experts",
)
_MIXTRAL_EXPERTS = Experts(
    block="block_sparse_moe",
    router="gate",
    stacked="switch_mlp",
    single={"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
    routing="TOP_THEN_SOFTMAX",
    count="num_local_experts",
)
_GPT_OSS_EXPERTS = Experts(
    block="mlp",
    router="router",
    stacked="experts",
    single={},
    routing="TOP_THEN_SOFTMAX",
    count="num_local_experts",
)


def _no_scales(config: Config) -> dict[str, float]:
    return {}


def _full_attention(config: Config, layer: int) -> int:
    return 0


def _llama_rope(config: Config, layer: int) -> RopeTable | None:
    return rope_table(
        _head_dim(config),
        config.get("rope_theta", 10000.0),
        config.get("rope_scaling"),
        config.get("max_position_embeddings"),
        bool(config.get("rope_traditional")),
    )


@dataclass(frozen=True)
class Family:
    """`tied` is whether the head is the embedding; with `tied_by_config` only where the config does
    not say; None: where the checkpoint has no lm_head. `scales` overrides fields of Architecture.
    `head_dim` stands in for a config without one; 0: hidden size over heads."""

    tied: bool | None = True
    tied_by_config: bool = True
    head_dim: int = 0
    activation: str = "SILU"
    norms: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NORMS)
    norm_offset: float = 0.0
    head_norms: bool = False
    fused: bool = False
    sinks: bool = False
    explicit_head_dim: bool = True
    rope: Callable[[Config, int], RopeTable | None] = _llama_rope
    window: Callable[[Config, int], int] = _full_attention
    scales: Callable[[Config], dict[str, float]] = _no_scales
    experts: Experts | None = None


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _typed_window(config: Config, layer: int) -> int:
    kinds = config.get("layer_types") or []
    sliding = kinds and kinds[layer] == "sliding_attention"
    return int(config["sliding_window"]) if sliding else 0


def _gpt_oss_window(config: Config, layer: int) -> int:
    alternating = "sliding_attention" if layer % 2 == 0 else "full_attention"
    kinds = config.get("layer_types") or [alternating] * (layer + 1)
    return int(config.get("sliding_window", 128)) if kinds[layer] == "sliding_attention" else 0


def _gpt_oss_rope(config: Config, layer: int) -> RopeTable:
    return rope_table(
        _head_dim(config), config.get("rope_theta", 150000), config.get("rope_scaling")
    )


def _plain_rope(config: Config, layer: int) -> RopeTable:
    theta = config.get("rope_theta", 10000.0)
    return rope_table(_head_dim(config), theta, interleaved=bool(config.get("rope_traditional")))


def _mixtral_rope(config: Config, layer: int) -> RopeTable:
    traditional = bool(config.get("rope_traditional"))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return rope_table(head_dim, config.get("rope_theta", 1e6), interleaved=traditional)


def _qwen2_rope(config: Config, layer: int) -> RopeTable | None:
    return _llama_rope({"rope_theta": 1000000, **config}, layer)


def _qwen3_rope(config: Config, layer: int) -> RopeTable | None:
    nested = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or nested.get("rope_theta")
    scaling = config.get("rope_scaling") or nested
    return _llama_rope(
        {**config, "rope_theta": theta, "rope_scaling": scaling, "rope_traditional": False}, layer
    )


def _smollm3_rope(config: Config, layer: int) -> RopeTable | None:
    interval = config.get("no_rope_layer_interval", 4)
    turned = config.get("no_rope_layers")
    rotates = turned[layer] if turned is not None else (layer + 1) % interval != 0
    return _llama_rope(config, layer) if rotates else None


def _phi3_rope(config: Config, layer: int) -> RopeTable:
    scaling = dict(config.get("rope_scaling") or {})
    if scaling.get("type") not in ("longrope", "su", "linear"):
        scaling = {}
    elif scaling["type"] != "linear":
        scaling["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", 4096
        )
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return rope_table(
        int(head_dim * config.get("partial_rotary_factor", 1.0)),
        config.get("rope_theta", 10000.0),
        scaling,
        config.get("max_position_embeddings", 131072),
        bool(config.get("rope_traditional")) and scaling.get("type") not in ("longrope", "su"),
    )


def _gemma3_slides(config: Config, layer: int) -> bool:
    return bool((layer + 1) % config.get("sliding_window_pattern", 6))


def _gemma3_rope(config: Config, layer: int) -> RopeTable:
    head_dim = _head_dim(config)
    if _gemma3_slides(config, layer):
        return rope_table(head_dim, config.get("rope_local_base_freq", 10000.0))
    return rope_table(
        head_dim,
        config.get("rope_theta", 1000000.0),
        config.get("rope_scaling"),
        config.get("max_position_embeddings", 32768),
    )


def _gemma3_window(config: Config, layer: int) -> int:
    return int(config.get("sliding_window", 512)) if _gemma3_slides(config, layer) else 0


def _bfloat16(x: float) -> float:
    """`x` as the nearest bfloat16: gemma 3 rounds its embedding's scale."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 256) / 256, exponent)


def _gemma_scales(config: Config) -> dict[str, float]:
    return {"embedding_scale": math.sqrt(config["hidden_size"])}


def _gemma2_scales(config: Config) -> dict[str, float]:
    return {
        **_gemma_scales(config),
        "attention_scale": config.get("query_pre_attn_scalar", 144.0) ** -0.5,
        "attention_soft_cap": config.get("attn_logit_softcapping", 50.0),
        "logits_soft_cap": config.get("final_logit_softcapping", 30.0),
    }


def _gemma3_scales(config: Config) -> dict[str, float]:
    return {
        "embedding_scale": _bfloat16(math.sqrt(config.get("hidden_size", 1152))),
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
    }


def _granite_scales(config: Config) -> dict[str, float]:
    return {
        "attention_scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logits_scale": 1 / config["logits_scaling"],
    }


_LLAMA = Family(window=_typed_window)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Family(rope=_qwen2_rope, explicit_head_dim=False),
    "qwen3": Family(rope=_qwen3_rope, head_norms=True),
    "smollm3": Family(rope=_smollm3_rope, window=_typed_window),
    "phi3": Family(tied=False, fused=True, rope=_phi3_rope, explicit_head_dim=False),
    "gemma": Family(
        tied_by_config=False,
        activation="GELU",
        norm_offset=1.0,
        rope=_plain_rope,
        scales=_gemma_scales,
    ),
    "gemma2": Family(
        tied_by_config=False,
        activation="GELU_TANH",
        norms=_SANDWICH_NORMS,
        norm_offset=1.0,
        rope=_plain_rope,
        scales=_gemma2_scales,
    ),
    "gemma3_text": Family(
        tied=None,
        tied_by_config=False,
        head_dim=256,
        activation="GELU_TANH",
        norms=_SANDWICH_NORMS,
        norm_offset=1.0,
        head_norms=True,
        rope=_gemma3_rope,
        window=_gemma3_window,
        scales=_gemma3_scales,
    ),
    "granite": Family(scales=_granite_scales, explicit_head_dim=False),
    "olmo2": Family(norms=_OLMO2_NORMS, head_norms=True),
    "qwen3_moe": Family(rope=_plain_rope, head_norms=True, experts=_QWEN3_EXPERTS),
    "mixtral": Family(
        tied=False, rope=_mixtral_rope, experts=_MIXTRAL_EXPERTS, explicit_head_dim=False
    ),
    "gpt_oss": Family(
        tied=False,
        tied_by_config=False,
        head_dim=64,
        activation="CLAMPED_SWIGLU",
        sinks=True,
        rope=_gpt_oss_rope,
        window=_gpt_oss_window,
        experts=_GPT_OSS_EXPERTS,
    ),
}


@dataclass(frozen=True)
class Architecture:
    """What a checkpoint computes, in one vocabulary for all families.

    `ropes` and `windows` have one entry a layer (a window of 0 sees everything before);
    `expert_layers` are the layers with a mixture."""

    family: Family
    n_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool | None
    norm_eps: float
    ropes: tuple[RopeTable | None, ...]
    windows: tuple[int, ...]
    expert_layers: frozenset[int] = frozenset()
    expert_count: int = 0
    experts_per_token: int = 0
    routing: str = "TOP_THEN_SOFTMAX"
    attention_scale: float = 1.0
    attention_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0


def architecture(config: Config) -> Architecture:
    """Read a config.json.

    Raises:
        ModelUnsupported: no family has that model_type, or the config lacks or asks for something
            this engine does not know.
    """
    family = FAMILIES.get(config["model_type"])
    if family is None:
        raise ModelUnsupported(f"the cpu engine has no family {config['model_type']!r}")
    try:
        return _read(config, family)
    except (KeyError, IndexError, TypeError) as error:
        raise ModelUnsupported(
            f"config.json of a {config['model_type']}: {type(error).__name__}: {error}"
        ) from error


def _read(config: Config, family: Family) -> Architecture:
    n_layers = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    own = {**config, "head_dim": config.get("head_dim") or family.head_dim}
    if not family.explicit_head_dim:
        own["head_dim"] = None
    head_dim = _head_dim(own)
    tied = family.tied
    if family.tied_by_config:
        tied = bool(config.get("tie_word_embeddings", tied))
    values: dict[str, Any] = {
        "attention_scale": head_dim**-0.5,
        **family.scales(config),
        **(_mixture(config, family.experts, n_layers) if family.experts else {}),
    }
    return Architecture(
        family=family,
        n_layers=n_layers,
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        tied=tied,
        norm_eps=float(config["rms_norm_eps"]),
        ropes=tuple(family.rope(own, i) for i in range(n_layers)),
        windows=tuple(family.window(config, i) for i in range(n_layers)),
        **values,
    )


def _mixture(config: Config, experts: Experts, n_layers: int) -> dict[str, Any]:
    step = config.get("decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers") or []
    layers = (i for i in range(n_layers) if i not in plain and (i + 1) % step == 0)
    renormalized = experts.routing == "SOFTMAX_THEN_TOP" and config.get("norm_topk_prob")
    return {
        "expert_layers": frozenset(layers),
        "expert_count": int(config[experts.count]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "routing": "SOFTMAX_THEN_TOP_SUMMED_1" if renormalized else experts.routing,
    }
