"""GGUF files as Ollama's own converter wrote them, seen as llama.cpp's writes them.

Ollama's library has files of both. Its own are of one piece with what sees and hears, call some
architectures, keys and tensors otherwise, and leave out what its engine took for granted. What they
are: https://github.com/ollama/ollama/tree/main/convert, and llama/compat there, which does for
llama.cpp what this does here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from exo.models.gguf.chat_templates import usual_template
from exo.models.gguf.header import GGUF, GGUFTensor

Tensors = dict[str, GGUFTensor]

_ARCHITECTURES = {
    "gptoss": "gpt-oss",
    "olmo3": "olmo2",
    "glm4moelite": "deepseek2",
    "qwen25vl": "qwen2vl",
}
_NOT_OF_TEXT = re.compile(r"(v|a|s|mm|mtp|model\.vision_tower)\.")
"""Eyes, ears, and layers that guess further tokens."""

_KEYS = {
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope.scaling_beta": "attention.temperature_scale",
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.swa.freq_base": "rope.freq_base_swa",
    "rope.swa.dimension_count": "rope.dimension_count_swa",
}
_TENSORS: Mapping[str, Mapping[str, str]] = {
    "gpt-oss": {".attn_out.": ".attn_output."},
    "laguna": {".attn_g.": ".attn_gate."},
    "gemma4": {".ffn_gate_inp.per_expert_scale": ".ffn_down_exps.scale"},
    "nemotron_h_moe": {
        ".ffn_latent_in.": ".ffn_latent_down.",
        ".ffn_latent_out.": ".ffn_latent_up.",
    },
}
"""Parts of names, by architecture."""

_BYTE, _NORMAL = 6, 1
"""Of tokenizer.ggml.token_type."""


def as_llama_cpp_writes(gguf: GGUF) -> GGUF:
    """A file's header; what llama.cpp's converter wrote stays as it is."""
    metadata = dict(gguf.metadata)
    _name_architecture(metadata)
    architecture = str(metadata.get("general.architecture"))
    is_theirs = architecture != gguf.architecture
    for theirs, ours in _KEYS.items():
        if (found := metadata.get(f"{architecture}.{theirs}")) is not None:
            metadata.setdefault(f"{architecture}.{ours}", found)
            is_theirs = True
    tensors = {name: one for name, one in gguf.tensors.items() if not _NOT_OF_TEXT.match(name)}
    is_theirs = is_theirs or len(tensors) < len(gguf.tensors)
    for theirs, ours in _TENSORS.get(architecture, {}).items():
        tensors = {name.replace(theirs, ours): one for name, one in tensors.items()}
    if (mend := _MENDING.get(architecture)) is not None:
        mend(metadata, tensors)
    if is_theirs and "tokenizer.chat_template" not in metadata:
        template = usual_template(metadata.get("tokenizer.ggml.tokens") or [])
        if template is not None:
            metadata["tokenizer.chat_template"] = template
    return replace(gguf, metadata=metadata, tensors=tensors)


def _name_architecture(metadata: dict[str, Any]) -> None:
    theirs = str(metadata.get("general.architecture"))
    ours = _ARCHITECTURES.get(theirs)
    if theirs == "nemotron_h_omni":
        has_experts = metadata.get("nemotron_h_omni.expert_count", 0) > 0
        ours = "nemotron_h_moe" if has_experts else "nemotron_h"
    if ours is None:
        return
    metadata["general.architecture"] = ours
    for key in [key for key in metadata if key.startswith(f"{theirs}.")]:
        metadata[f"{ours}{key.removeprefix(theirs)}"] = metadata.pop(key)


def _set_pre_tokenizer(metadata: dict[str, Any], name: str) -> None:
    """Where none is named, or that of GPT-2."""
    if metadata.get("tokenizer.ggml.pre", "default") in ("", "default"):
        metadata["tokenizer.ggml.pre"] = name


def _gpt_oss(metadata: dict[str, Any], tensors: Tensors) -> None:
    if "gpt-oss.rope.scaling.factor" in metadata:
        metadata.setdefault("gpt-oss.rope.scaling.type", "yarn")
    _part_gates_from_ups(tensors)
    if (gates := tensors.get("blk.0.ffn_gate_exps.weight")) is not None:
        metadata.setdefault("gpt-oss.expert_feed_forward_length", gates.shape[1])
    _set_pre_tokenizer(metadata, "gpt-4o")


def _part_gates_from_ups(tensors: Tensors) -> None:
    """In files of August 2025 they stand as in gpt-oss' own checkpoint: a gate's row, then an
    up's."""
    for name in [name for name in tensors if ".ffn_gate_up_exps." in name]:
        both = tensors[name]
        weight = tensors.get(f"{name.rpartition('.')[0]}.weight")
        if weight is None or weight.format != "MXFP4_PAIRS":
            continue
        shape = (both.shape[0], both.shape[1] // 2, *both.shape[2:])
        for half, part in enumerate(("gate", "up"), 1):
            tensors[name.replace("gate_up", part)] = replace(
                both, shape=shape, nbytes=both.nbytes // 2, every_second=half
            )
    for name in [name for name in tensors if ".ffn_gate_up_exps." in name]:
        if name.replace("gate_up", "gate") in tensors:
            del tensors[name]


def _llama(metadata: dict[str, Any], tensors: Tensors) -> None:
    """Llama 3 in files of its first weeks, from whichever converter."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if len(tokens) > 128009 and tokens[128009] == "<|eot_id|>":
        _set_pre_tokenizer(metadata, "llama-bpe")


def _gemma3(metadata: dict[str, Any], tensors: Tensors) -> None:
    """Those that see have no epsilon, no bases and no scaling. The vocabulary may have tokens for
    images, which the embedding has not."""
    metadata.setdefault("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    metadata.setdefault("gemma3.rope.freq_base", 1e6)
    metadata.setdefault("gemma3.rope.freq_base_swa", 1e4)
    is_long = metadata.get("gemma3.context_length", 0) >= 131072
    if is_long and "gemma3.rope.scaling.type" not in metadata:
        metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    if (embedding := tensors.get("token_embd.weight")) is not None:
        for key in ("tokens", "scores", "token_type"):
            if (found := metadata.get(f"tokenizer.ggml.{key}")) is not None:
                metadata[f"tokenizer.ggml.{key}"] = found[: embedding.shape[0]]


def _gemma3n(metadata: dict[str, Any], tensors: Tensors) -> None:
    """Where what tokens bring to layers has fewer rows, the vocabulary is not typed."""
    inputs, embedding = map(tensors.get, ("per_layer_token_embd.weight", "token_embd.weight"))
    types = metadata.get("tokenizer.ggml.token_type")
    if not inputs or not embedding or types is None or inputs.shape[0] == embedding.shape[0]:
        return
    metadata["tokenizer.ggml.model"] = "llama"
    types = np.array(types)
    for index, token in enumerate(metadata["tokenizer.ggml.tokens"][: len(types)]):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[index] = _BYTE
        elif token.startswith("<unused"):
            types[index] = _NORMAL
    metadata["tokenizer.ggml.token_type"] = types


def _gemma4(metadata: dict[str, Any], tensors: Tensors) -> None:
    if metadata.get("tokenizer.ggml.model") == "llama" and "tokenizer.ggml.merges" in metadata:
        metadata["tokenizer.ggml.model"] = "gemma4"


def _lfm2(metadata: dict[str, Any], tensors: Tensors) -> None:
    if (norm := tensors.pop("output_norm.weight", None)) is None:
        return
    tensors.setdefault("token_embd_norm.weight", norm)
    _set_pre_tokenizer(metadata, "lfm2")
    if (gate := tensors.get("blk.0.ffn_gate.weight")) is not None:
        metadata["lfm2.feed_forward_length"] = gate.shape[0]


def _mistral3(metadata: dict[str, Any], tensors: Tensors) -> None:
    _set_pre_tokenizer(metadata, "tekken")


def _deepseek2(metadata: dict[str, Any], tensors: Tensors) -> None:
    """GLM 4.7 Flash: the lengths of each head stand where those of latents belong."""
    lengths = ("key_length_mla", "kv_lora_rank", "key_length")
    latent, rank, heads = (metadata.get(f"deepseek2.attention.{key}") for key in lengths)
    turned = metadata.get("deepseek2.rope.dimension_count")
    if not (latent and rank and heads and turned) or heads == rank + turned:
        return
    metadata |= {
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": rank + turned,
        "deepseek2.attention.value_length": rank,
        "deepseek2.attention.key_length_mla": heads,
        "deepseek2.attention.value_length_mla": heads,
    }
    _set_pre_tokenizer(metadata, "glm4")


def _nemotron_h_moe(metadata: dict[str, Any], tensors: Tensors) -> None:
    inward = next((one for name, one in tensors.items() if ".ffn_latent_down." in name), None)
    if inward is not None:
        metadata.setdefault("nemotron_h_moe.moe_latent_size", inward.shape[0])


_MENDING: Mapping[str, Callable[[dict[str, Any], Tensors], None]] = {
    "llama": _llama,
    "gpt-oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "lfm2": _lfm2,
    "mistral3": _mistral3,
    "deepseek2": _deepseek2,
    "nemotron_h_moe": _nemotron_h_moe,
}
