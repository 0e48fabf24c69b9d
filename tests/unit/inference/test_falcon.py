"""Falcon, of which mlx-lm has no class: the cpu engine against the architecture written out in
NumPy, as transformers' modeling_falcon.py has it; from safetensors and from GGUF files."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from exo.errors import ModelUnsupported
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.cpu.shard_model import CheckpointModel
from exo.inference.sampling import SamplingParams
from exo.models.gguf.folder import write_folder
from exo.shard import Shard

Floats = npt.NDArray[np.float32]
Weights = dict[str, Floats]

HEADS, HEAD_DIM, LAYERS, VOCABULARY = 6, 16, 3, 64
HIDDEN = HEADS * HEAD_DIM
SHAPES: dict[str, dict[str, Any]] = {
    "7B": {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    "40B": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "2-11B": {
        "num_kv_heads": 3,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
    },
    "one after the other": {"multi_query": False, "parallel_attn": False, "bias": True},
}
TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, 21).astype(np.int32)


def config_of(shape: str) -> dict[str, Any]:
    return {
        "model_type": "falcon",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": 1e-5,
        "alibi": False,
        "bias": False,
        **SHAPES[shape],
    }


def kv_heads_of(config: dict[str, Any]) -> int:
    if config.get("new_decoder_architecture"):
        return int(config["num_kv_heads"])
    return 1 if config["multi_query"] else HEADS


def norms_of(config: dict[str, Any]) -> list[str]:
    if config.get("new_decoder_architecture") and "num_ln_in_parallel_attn" not in config:
        return ["ln_attn", "ln_mlp"]
    if config.get("new_decoder_architecture") or config["parallel_attn"]:
        return ["input_layernorm"]
    return ["input_layernorm", "post_attention_layernorm"]


def random_weights(config: dict[str, Any]) -> Weights:
    rng = np.random.default_rng(1)
    found: Weights = {}

    def linear(name: str, rows: int, cols: int) -> None:
        found[f"{name}.weight"] = rng.normal(0, 0.1, (rows, cols)).astype(np.float32)
        if config["bias"]:
            found[f"{name}.bias"] = rng.normal(0, 0.1, rows).astype(np.float32)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = rng.normal(1, 0.1, HIDDEN).astype(np.float32)
        found[f"{name}.bias"] = rng.normal(0, 0.1, HIDDEN).astype(np.float32)

    embedding = rng.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float32)
    found["transformer.word_embeddings.weight"] = embedding
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}"
        rows = (HEADS + 2 * kv_heads_of(config)) * HEAD_DIM
        linear(f"{prefix}.self_attention.query_key_value", rows, HIDDEN)
        linear(f"{prefix}.self_attention.dense", HIDDEN, HIDDEN)
        linear(f"{prefix}.mlp.dense_h_to_4h", 4 * HIDDEN, HIDDEN)
        linear(f"{prefix}.mlp.dense_4h_to_h", HIDDEN, 4 * HIDDEN)
        for name in norms_of(config):
            norm(f"{prefix}.{name}")
    norm("transformer.ln_f")
    return found


def reference(config: dict[str, Any], weights: Weights) -> Floats:
    """Logits after each token [tokens, vocabulary]."""
    kv_heads, tokens = kv_heads_of(config), len(TOKENS)

    def norm(name: str, x: Floats) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(name: str, x: Floats) -> Floats:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.float32(0))

    angles = np.arange(tokens)[:, None] * 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (
        np.concatenate([part, part], -1)[:, None] for part in (np.cos(angles), np.sin(angles))
    )

    def turned(x: Floats) -> Floats:
        first, second = np.split(x, 2, -1)
        return x * cos + np.concatenate([-second, first], -1) * sin

    def attention(prefix: str, x: Floats) -> Floats:
        fused = linear(f"{prefix}.self_attention.query_key_value", x)
        groups = fused.reshape(tokens, kv_heads, HEADS // kv_heads + 2, HEAD_DIM)
        queries = turned(groups[:, :, :-2].reshape(tokens, HEADS, HEAD_DIM))
        keys, values = turned(groups[:, :, -2]), groups[:, :, -1]
        keys, values = (np.repeat(part, HEADS // kv_heads, 1) for part in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(HEAD_DIM)
        scores[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, values).reshape(tokens, HIDDEN)
        return linear(f"{prefix}.self_attention.dense", mixed)

    def mlp(prefix: str, x: Floats) -> Floats:
        up = linear(f"{prefix}.mlp.dense_h_to_4h", x)
        gelu = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
        return linear(f"{prefix}.mlp.dense_4h_to_h", gelu.astype(np.float32))

    x = weights["transformer.word_embeddings.weight"][TOKENS]
    names = norms_of(config)
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}"
        read = norm(f"{prefix}.{names[0]}", x)
        if names == ["input_layernorm", "post_attention_layernorm"]:
            x = x + attention(prefix, read)
            x = x + mlp(prefix, norm(f"{prefix}.{names[1]}", x))
        else:
            beside = read if len(names) == 1 else norm(f"{prefix}.{names[1]}", x)
            x = x + attention(prefix, read) + mlp(prefix, beside)
    return norm("transformer.ln_f", x) @ weights["transformer.word_embeddings.weight"].T


def write_gguf(config: dict[str, Any], weights: Weights, file: Path) -> None:
    """As llama.cpp's conversion/falcon.py writes it."""
    kv_heads = kv_heads_of(config)
    writer = gguf.GGUFWriter(file, "falcon")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(4 * HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("falcon")
    writer.add_token_list([*(chr(33 + i) for i in range(VOCABULARY - 1)), '!"'])
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.FALCON, LAYERS)
    for name, numbers in weights.items():
        if "query_key_value" in name:
            groups = numbers.reshape(kv_heads, HEADS // kv_heads + 2, HEAD_DIM, -1)
            parts = groups[:, :-2], groups[:, -2], groups[:, -1]
            numbers = np.concatenate([part.reshape(-1, HIDDEN) for part in parts])
        module, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(module)}.{kind}", np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(folder: Path, cuts: list[int]) -> Floats:
    """After the last token, through shards cut at `cuts`."""
    batch = ForwardBatch((Slice("s", 0, len(TOKENS), SamplingParams()),), TOKENS)
    bounds, states = [0, *cuts, LAYERS], None
    for start, end in pairwise(bounds):
        engine, shard = CPUEngine(2, precise=True), Shard("m", start, end, LAYERS)
        engine.load_shard(shard, folder, lambda done, total: None)
        states = engine.compute(shard, batch, states)
    assert states is not None
    return states[-1]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *((shape, "safetensors") for shape in SHAPES),
        # llama.cpp has those alone whose MLP is beside the attention.
        *((shape, "gguf") for shape in SHAPES if shape != "one after the other"),
    ],
)
def test_falcon(shape: str, kind: str, tmp_path: Path) -> None:
    config = config_of(shape)
    weights = random_weights(config)
    folder = tmp_path / "model"
    if kind == "gguf":
        write_gguf(config, weights, tmp_path / "m.gguf")
        write_folder([tmp_path / "m.gguf"], folder)
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        stored = {name: mx.array(numbers) for name, numbers in weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), stored)
    expected = reference(config, weights)[-1]
    for cuts in ([], [1]):
        assert np.abs(logits(folder, cuts) - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_falcon_that_does_not_turn_positions_is_refused(tmp_path: Path) -> None:
    config = config_of("one after the other") | {"alibi": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match="ALiBi"):
        CheckpointModel(tmp_path)
