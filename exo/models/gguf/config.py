"""A GGUF file's metadata as the config.json of the same model."""

from __future__ import annotations

from typing import Any

from exo.errors import ModelUnsupported
from exo.models.gguf.families.family import Metadata
from exo.models.gguf.families.rope_factors import llama3_scaling
from exo.models.gguf.families.table import FAMILIES, family_of
from exo.models.gguf.hadamard import hadamard_of
from exo.models.gguf.header import GGUF, GGUFTensor

_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Of the frequencies with which positions turn."""


def tensors_in_config(gguf: GGUF) -> list[GGUFTensor]:
    """Those whose numbers `config_of` reads."""
    family = FAMILIES.get(gguf.architecture)
    names = (*_FACTORS, *(family.in_config if family is not None else ()))
    return [gguf.tensors[name] for name in names if name in gguf.tensors]


def config_of(gguf: GGUF) -> dict[str, Any]:
    """config.json as mlx-lm's class of the architecture reads it; token ids are the tokenizer's
    part.

    Raises:
        ModelUnsupported: an architecture, or a way of scaling positions, that exo does not read.
    """
    family = family_of(gguf.architecture, Metadata(gguf))
    value = Metadata(gguf, family.varied)
    kv_heads = value.of_layers("attention.head_count_kv")
    heads = max(value.of_layers("attention.head_count")) or 1  # Mamba's files say 0
    hidden = value("embedding_length")
    head_dim = value("attention.key_length", hidden // heads)
    may_differ = family.narrow_values or value("attention.kv_lora_rank", 0)
    if value("attention.value_length", head_dim) != head_dim and not may_differ:
        raise ModelUnsupported("keys and values of different lengths")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": value.layers,
        "num_nextn_predict_layers": value.guessing_layers,
        "intermediate_size": max(value.of_layers("feed_forward_length"), default=0),
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads) if kv_heads else heads,
        "head_dim": head_dim,
        "rms_norm_eps": _norm_eps(value),
        "vocab_size": len(gguf.metadata["tokenizer.ggml.tokens"]),
        "rope_theta": value("rope.freq_base", 10000.0),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": value.has_tensor(".attn_q.bias"),
        "mlp_bias": value.has_tensor(".ffn_up.bias"),
    }
    scaling = None if family.own_factors else _rope_scaling(gguf, value, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if hadamard := hadamard_of(gguf, config["num_hidden_layers"]):
        config["hadamard"] = hadamard.as_config()
    if family.name:
        config["gguf_family"] = family.name
    return {**config, **family.config(value, config)}


def _norm_eps(value: Metadata) -> float:
    """Of RMS norms or of LayerNorms, whichever the architecture has."""
    found = value("attention.layer_norm_rms_epsilon", None)
    return float(value("attention.layer_norm_epsilon") if found is None else found)


def _rope_scaling(gguf: GGUF, value: Metadata, config: dict[str, Any]) -> dict[str, Any] | None:
    factors, long, short = map(gguf.floats, _FACTORS)
    if factors is not None:
        return llama3_scaling(factors, config["head_dim"], config["rope_theta"])
    context = config["max_position_embeddings"]
    original = value("rope.scaling.original_context_length", context)
    if long is not None and short is not None:
        return {
            "type": "longrope",
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": original,
        }
    kind = value("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"type": kind, "rope_type": kind, "factor": value("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (found := value(f"rope.scaling.{theirs}", None)) is not None:
                scaling[ours] = found
    elif kind != "linear":
        raise ModelUnsupported(f"the GGUF file asks for rope scaling {kind!r}")
    return scaling
