"""GGUF files of the llama family as mlx-lm directories: config, tokenizer and weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. MLX reads the file; Q4_0, Q4_1
and Q8_0 tensors arrive as its own affine layout (weight, scales, biases in groups of 32) without
loss, everything else as float16.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from exo.download.gguf_tokenizer import write_tokenizer
from exo.errors import ModelUnsupported


@dataclass(frozen=True)
class _Family:
    """`interleaved_rope`: llama.cpp permutes the rows of q and k for RoPE over neighbouring pairs,
    which mlx-lm calls traditional."""

    model_type: str
    interleaved_rope: bool


_FAMILIES = {
    "llama": _Family("llama", True),
    "smollm3": _Family("smollm3", True),
    "qwen2": _Family("qwen2", False),
    "qwen3": _Family("qwen3", False),
}

_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GROUP_SIZE = 32


_READ = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K")
"""Formats of tensors that MLX reads."""


def _found(source: Path) -> str:
    """What is in a file that MLX does not read, and what it would."""
    from gguf import GGUFReader  # late: only failures need it

    try:
        tensors = GGUFReader(source).tensors
    except (ValueError, OSError, IndexError, KeyError, OverflowError) as error:
        return f"not a GGUF file, or not a whole one ({error})"
    counts = Counter(tensor.tensor_type.name for tensor in tensors)
    others = [f"{count} tensors of {name}" for name, count in counts.items() if name not in _READ]
    return (
        f"it holds {', '.join(others) or 'a tensor of a shape MLX refuses'}; exo reads "
        f"{', '.join(_READ)}. Take another quantization, or the model's safetensors"
    )


def convert_gguf(source: Path, target: Path, quantize: int | None = None) -> None:
    """Write `source` as an mlx-lm directory. Quantized tensors stay bit for bit what they are.

    `quantize`: bits (2, 3, 4, 6 or 8) for the matrices that arrive as float16; None keeps them.

    Raises:
        ModelUnsupported: not a GGUF file, or an architecture, tensor or tokenizer outside the
            llama family; the message names it.
    """
    try:
        loaded: Any = mx.load(str(source), return_metadata=True)
        tensors, metadata = loaded
    except (RuntimeError, ValueError) as error:
        raise ModelUnsupported(f"{source} cannot be read: {_found(source)}") from error
    architecture = metadata.get("general.architecture")
    family = _FAMILIES.get(str(architecture))
    if family is None:
        raise ModelUnsupported(
            f"{source} is of architecture {architecture!r}; GGUF files are read for "
            f"{', '.join(_FAMILIES)}. Use the model's safetensors instead"
        )
    weights = {_rename(name): array for name, array in tensors.items() if "rope_freqs" not in name}
    config = _config(family, str(architecture), metadata, tensors)
    if quantize is not None:
        weights = _quantized(weights, quantize)
    if any(name.endswith(".scales") for name in weights):
        # The default for modules the file quantizes; mlx-lm infers each one's bits from shapes.
        config["quantization"] = {"group_size": _GROUP_SIZE, "bits": quantize or 4}
    target.mkdir(parents=True)
    write_tokenizer(metadata, target, config)
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config, indent=1))


def _rename(name: str) -> str:
    """GGUF's tensor name as mlx-lm's."""
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias|scales|biases)", name):
        if (module := _LAYER_TENSORS.get(layer[2])) is not None:
            return f"model.layers.{layer[1]}.{module}.{layer[3]}"
    else:
        module_name, _, kind = name.partition(".")
        if module_name in _OUTER_TENSORS:
            return f"{_OUTER_TENSORS[module_name]}.{kind}"
    raise ModelUnsupported(f"the GGUF file has a tensor {name!r} that exo does not know")


def _config(
    family: _Family, architecture: str, metadata: dict[str, Any], tensors: dict[str, mx.array]
) -> dict[str, Any]:
    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ModelUnsupported(f"the GGUF file has no {architecture}.{key}")
        return found.item() if isinstance(found, mx.array) else found

    heads = value("attention.head_count")
    hidden = value("embedding_length")
    head_dim = value("attention.key_length", hidden // heads)
    config = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rope_theta": value("rope.freq_base", 10000.0),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if family.interleaved_rope:
        config["rope_traditional"] = True
    if (scaling := _rope_scaling(value, tensors, head_dim, config["rope_theta"])) is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(
    value: Callable[..., Any], tensors: dict[str, mx.array], head_dim: int, theta: float
) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensors:
        return _llama3_scaling(np.array(tensors["rope_freqs.weight"]), head_dim, theta)
    kind = value("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": value("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = value("rope.scaling.original_context_length")
    elif kind != "linear":
        raise ModelUnsupported(f"the GGUF file asks for rope scaling {kind!r}")
    return scaling


def _llama3_scaling(factors: Any, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF stores as the factor of each frequency.

    Formula: section 3.4.1 of https://arxiv.org/abs/2407.21783 as in Meta's reference code; the
    parameters are checked against the stored factors.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ratio = 8192 / wavelengths
    smooth = np.clip((ratio - 1.0) / 3.0, 0, 1)
    expected = 1 / ((1 - smooth) / factors.max() + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-2):
        raise ModelUnsupported("the GGUF file's rope_freqs are not those of Llama 3")
    return scaling


def _quantized(weights: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    """Every float matrix in MLX's affine layout of `bits`; norms and biases stay."""
    result: dict[str, mx.array] = {}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        floating = mx.issubdtype(array.dtype, mx.floating)
        matrix = name.endswith(".weight") and array.ndim == 2 and array.shape[1] % _GROUP_SIZE == 0
        if floating and matrix:
            packed, scales, biases = mx.quantize(array, group_size=_GROUP_SIZE, bits=bits)
            result |= {name: packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
        else:
            result[name] = array
    return result
