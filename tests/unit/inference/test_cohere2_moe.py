"""Cohere 2 with experts (North Mini Code, Command A+), of which mlx-lm has no class: the cpu engine
against the architecture written out in NumPy, as transformers' modeling_cohere2_moe.py has it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import zoo
from gguf_checks import cpu_logits
from gguf_files import write_gguf

from exo.errors import ModelUnsupported
from exo.inference.cpu.engine import CPUEngine
from exo.inference.mlx.engine import MLXEngine
from exo.models.gguf.folder import write_folder

Floats = npt.NDArray[np.float32]
Weights = dict[str, Floats]

HEADS, KV_HEADS, DIM, HIDDEN, WIDTH, EXPERTS, TOP = 4, 2, 16, 64, 32, 8, 2
WINDOW = 3
KINDS = ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"]
CONFIG: dict[str, Any] = {
    "model_type": "cohere2_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "prefix_dense_intermediate_size": 48,
    "num_hidden_layers": zoo.LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": zoo.VOCABULARY,
    "logit_scale": 0.25,
    "rope_theta": 50000.0,
    "sliding_window": WINDOW,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
}
SHAPES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "with a shared expert": {"num_shared_experts": 2},
    "norms with a mean": {"rms_norm_eps": None, "layer_norm_eps": 1e-4, "norm_topk_prob": False},
}
"""All weigh by a sigmoid."""


def random_weights(config: dict[str, Any]) -> Weights:
    rng = np.random.default_rng(1)

    def numbers(*shape: int) -> Floats:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    found = {"model.embed_tokens.weight": 10 * numbers(zoo.VOCABULARY, HIDDEN)}
    found["model.norm.weight"] = 1 + numbers(HIDDEN)
    for layer in range(zoo.LAYERS):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = 1 + numbers(HIDDEN)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = numbers(rows * DIM, HIDDEN)
        found[f"{prefix}.self_attn.o_proj.weight"] = numbers(HIDDEN, HEADS * DIM)
        modules: dict[str, tuple[tuple[int, ...], int]] = {"mlp": ((), 48)}
        if layer >= config["first_k_dense_replace"]:
            found[f"{prefix}.mlp.gate.weight"] = numbers(EXPERTS, HIDDEN)
            modules = {"mlp.switch_mlp": ((EXPERTS,), WIDTH)}
            if shared := config.get("num_shared_experts"):
                modules["mlp.shared_experts"] = ((), WIDTH * shared)
        for module, (stack, width) in modules.items():
            for name in ("gate", "up"):
                found[f"{prefix}.{module}.{name}_proj.weight"] = numbers(*stack, width, HIDDEN)
            found[f"{prefix}.{module}.down_proj.weight"] = numbers(*stack, HIDDEN, width)
    return found


def reference(config: dict[str, Any], weights: Weights, tokens: npt.NDArray[np.int32]) -> Floats:
    """Logits after each token [tokens, vocabulary]."""
    places = np.arange(len(tokens))

    def norm(name: str, x: Floats) -> Floats:
        if config["rms_norm_eps"] is None:
            x = x - x.mean(-1, keepdims=True)
        eps = config["rms_norm_eps"] or config["layer_norm_eps"]
        scaled: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
        return scaled * weights[f"{name}.weight"]

    angles = places[:, None] * config["rope_theta"] ** -(np.arange(0, DIM, 2) / DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(x: Floats) -> Floats:
        first, second = x[..., ::2], x[..., 1::2]
        pairs = np.stack([first * cos - second * sin, second * cos + first * sin], -1)
        return pairs.reshape(x.shape)

    def attention(layer: int, x: Floats) -> Floats:
        prefix = f"model.layers.{layer}.self_attn"
        q, k, v = (x @ weights[f"{prefix}.{n}_proj.weight"].T for n in "qkv")
        q, k, v = (part.reshape(len(tokens), -1, DIM) for part in (q, k, v))
        slides = KINDS[layer] == "sliding_attention"
        if slides or layer < config["first_k_dense_replace"]:
            q, k = turned(q), turned(k)
        k, v = (np.repeat(part, HEADS // KV_HEADS, 1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        ago = places[:, None] - places
        scores[:, (ago < 0) | (slides & (ago >= WINDOW))] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed: Floats = np.einsum("hqk,khd->qhd", shares, v).reshape(len(tokens), -1)
        return mixed @ weights[f"{prefix}.o_proj.weight"].T

    def mlp(module: str, x: Floats, *expert: int) -> Floats:
        gate, up, down = (
            weights[f"{module}.{n}_proj.weight"][expert] for n in ("gate", "up", "down")
        )
        silu = (x @ gate.T) / (1 + np.exp(-(x @ gate.T)))
        return (silu * (x @ up.T)) @ down.T

    def mixture(prefix: str, x: Floats) -> Floats:
        scores = 1 / (1 + np.exp(-(x @ weights[f"{prefix}.gate.weight"].T)))
        out = np.zeros_like(x)
        for row, own in enumerate(scores):
            chosen = np.argsort(-own)[:TOP]
            shares = own[chosen] / (own[chosen].sum() if config["norm_topk_prob"] else 1)
            for expert, share in zip(chosen, shares, strict=True):
                out[row] += share * mlp(f"{prefix}.switch_mlp", x[row], int(expert))
        if config.get("num_shared_experts"):
            out = (out + mlp(f"{prefix}.shared_experts", x)) / 2
        return out

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(zoo.LAYERS):
        prefix = f"model.layers.{layer}"
        read = norm(f"{prefix}.input_layernorm", x)
        is_dense = layer < config["first_k_dense_replace"]
        given = mlp(f"{prefix}.mlp", read) if is_dense else mixture(f"{prefix}.mlp", read)
        x = x + attention(layer, read) + given
    logits = norm("model.norm", x) @ weights["model.embed_tokens.weight"].T
    return logits * np.float32(config["logit_scale"])


def as_published(weights: Weights, joined: bool) -> Weights:
    """With experts one by one, or as transformers joins them."""
    found: Weights = {}
    for name, numbers in weights.items():
        if "switch_mlp" not in name:
            found[name] = numbers
        elif not joined:
            for expert, own in enumerate(numbers):
                found[name.replace("switch_mlp", f"experts.{expert}")] = own
        elif "gate_proj" in name:
            both = [numbers, weights[name.replace("gate_proj", "up_proj")]]
            whole = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
            found[whole] = np.concatenate(both, axis=1)
        elif "down_proj" in name:
            found[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = numbers
    return found


def write(config: dict[str, Any], weights: Weights, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: mx.array(numbers) for name, numbers in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), stored)


@pytest.mark.parametrize("kind", ["one by one", "joined", "gguf"])
@pytest.mark.parametrize("shape", SHAPES)
def test_cohere2_moe(shape: str, kind: str, tmp_path: Path) -> None:
    config = CONFIG | SHAPES[shape]
    weights = random_weights(config)
    folder = tmp_path / "model"
    if kind == "gguf":
        write(config | {"layer_types": KINDS}, weights, tmp_path / "source")
        write_gguf(tmp_path / "source", tmp_path / "m.gguf")
        write_folder([tmp_path / "m.gguf"], folder)
    else:
        write(config, as_published(weights, kind == "joined"), folder)
    expected = reference(config, weights, np.array(zoo.PROMPTS[0], np.int32))[-1]
    for cuts in ([], [1, 3]):
        got = cpu_logits(folder, cuts)[-1]
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_experts_that_softmax_weighs_are_refused(tmp_path: Path) -> None:
    write(CONFIG | {"expert_selection_fn": "softmax"}, random_weights(CONFIG), tmp_path / "model")
    with pytest.raises(ModelUnsupported, match=r"softmax.*mlx-lm has no class"):
        CPUEngine(1).describe_model("m", tmp_path / "model")


def test_mlx_says_which_engine_runs_it(tmp_path: Path) -> None:
    write(CONFIG, random_weights(CONFIG), tmp_path / "model")
    with pytest.raises(ModelUnsupported, match="start exo with --inference-engine cpu"):
        MLXEngine().describe_model("m", tmp_path / "model")
