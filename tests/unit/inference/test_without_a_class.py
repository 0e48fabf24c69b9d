"""Architectures that mlx-lm has no class of, on the cpu engine, from safetensors and from GGUF:
against a class of mlx-lm's with what differs from it written here, as transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import zoo
from gguf_checks import check_both_engines, cpu_logits, write_source
from gguf_files import write_gguf
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import granite, llama

from exo.errors import ModelUnsupported
from exo.models.gguf.folder import write_folder

WINDOW = 4
_KINDS = ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"]


class Squared(nn.Module):
    """Of AFM: no gate, and relu(x)^2."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        given: mx.array = self.down_proj(mx.square(nn.relu(self.up_proj(x))))
        return given


class Windowed(nn.Module):
    """Of Granite with windows: sinks, and a base of positions for each layer, or none."""

    def __init__(self, args: granite.ModelArgs, window: int, theta: float) -> None:
        super().__init__()
        self.heads, self.kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.dim = args.hidden_size // self.heads
        self.scale, self.window, self.theta = args.attention_multiplier, window, theta
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            self[f"{name}_proj"] = nn.Linear(args.hidden_size, heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, args.hidden_size, bias=False)
        self.sinks = mx.zeros(self.heads)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        count = x.shape[1]
        q, k, v = (
            self[f"{name}_proj"](x).reshape(1, count, -1, self.dim).swapaxes(1, 2) for name in "qkv"
        )
        if self.theta:
            turn = nn.RoPE(self.dim, base=self.theta)
            q, k = turn(q), turn(k)
        ago = mx.arange(count)[:, None] - mx.arange(count)
        seen = (ago >= 0) & (ago < (self.window or count))
        mixed = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=self.scale, mask=seen, sinks=self.sinks
        )
        given: mx.array = self.o_proj(mixed.swapaxes(1, 2).reshape(1, count, -1))
        return given


def afm() -> tuple[dict[str, Any], nn.Module]:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = zoo.tiny_config("llama") | {"tie_word_embeddings": False, "rope_scaling": scaling}
    model = llama.Model(llama.ModelArgs.from_dict(config))
    for layer in model.layers:
        layer.mlp = Squared(config["hidden_size"], config["intermediate_size"])
    return config | {"model_type": "arcee"}, model


def granite_swa() -> tuple[dict[str, Any], nn.Module]:
    thetas = [0 if kind == "full_attention" else 5000.0 for kind in _KINDS]
    own = {"layer_types": _KINDS, "sliding_window": WINDOW, "rope_theta": 5000.0}
    config = zoo.tiny_config("granite") | own
    args = granite.ModelArgs.from_dict(config)
    model = granite.Model(args)
    for layer, theta in zip(model.layers, thetas, strict=True):
        layer.self_attn = Windowed(args, WINDOW if theta else 0, theta)
    return config | {"model_type": "granite_swa", "layer_rope_theta": thetas}, model


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "gguf, joined"])
@pytest.mark.parametrize("made", [afm, granite_swa])
def test_the_cpu_engine_computes_it(made: Any, kind: str, tmp_path: Path) -> None:
    mx.random.seed(0)
    config, model = made()
    model.update(tree_map(lambda a: a + 0.05 * mx.random.normal(a.shape), model.parameters()))
    source = folder = tmp_path / "source"
    write(config, dict(tree_flatten(model.parameters())), source)
    if "gguf" in kind:
        folder = tmp_path / "folder"
        write_gguf(source, tmp_path / "m.gguf", fused="qkv" if "joined" in kind else "")
        write_folder([tmp_path / "m.gguf"], folder)
    expected = np.array(model(mx.array([zoo.PROMPTS[0]]))[0, -1])
    for cuts in ([], [1, 3]):
        assert zoo.worst_error([cpu_logits(folder, cuts)[-1]], [expected]) < 1e-4


HY3 = {
    "use_qk_norm": True,
    "partial_rotary_factor": 1.0,
    "rope_scaling": None,
    "rope_theta": 11158840.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""What GLM 4.5's class must hear to compute Hy3."""


def test_hy3(tmp_path: Path) -> None:
    """Under the names of Tencent's checkpoint."""
    write_source("glm4_moe", HY3, tmp_path / "source")
    expected = zoo.unsplit_logits(tmp_path / "source")[0][0]
    glm = json.loads((tmp_path / "source/config.json").read_text())
    config = {
        **{key: glm[key] for key in zoo.tiny_config("llama") if key in glm},
        **{"model_type": "hy_v3", "rope_parameters": {"rope_type": "default"}},
        **{key: glm[key] for key in ("head_dim", "moe_intermediate_size", "num_experts_per_tok")},
        "num_experts": glm["n_routed_experts"],
        "num_shared_experts": glm["n_shared_experts"],
        "router_scaling_factor": glm["routed_scaling_factor"],
        "tie_word_embeddings": False,
    }
    config["rope_parameters"]["rope_theta"] = HY3["rope_theta"]
    weights: dict[str, mx.array] = {}
    for name, array in mx.load(str(tmp_path / "source/model.safetensors")).items():
        if "switch_mlp" in name:
            for expert in range(config["num_experts"]):
                weights[name.replace("switch_mlp", f"experts.{expert}")] = array[expert]
            continue
        renamed = name.replace("mlp.gate.e_score_correction_bias", "mlp.expert_bias")
        renamed = renamed.replace("mlp.gate.weight", "mlp.router.gate.weight")
        weights[renamed.replace("shared_experts", "shared_mlp")] = array
    write(config, weights, tmp_path / "hy3")
    for cuts in ([], [1, 3]):
        assert zoo.worst_error([cpu_logits(tmp_path / "hy3", cuts)[-1]], [expected]) < 1e-4


def _as_in_hy3(name: str) -> str:
    """Of GLM 4.5's names."""
    return name.replace("post_attention_norm", "ffn_norm").replace("probs_b.bias", "probs_b")


def test_hy3_as_gguf(tmp_path: Path) -> None:
    """Its files say neither which layers are dense nor how many experts all tokens go through."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    write_source("glm4_moe", HY3, source)
    unsaid = dict.fromkeys(
        ("hy_v3.leading_dense_block_count", "hy_v3.expert_shared_count", "hy_v3.expert_group_count")
    )
    config = json.loads((source / "config.json").read_text())
    width = config["n_shared_experts"] * config["moe_intermediate_size"]
    said = {"hy_v3.expert_gating_func": 2, "hy_v3.expert_shared_feed_forward_length": width}
    write_gguf(
        source,
        tmp_path / "m.gguf",
        called="hy_v3",
        rename=_as_in_hy3,
        **unsaid,
        **said,
    )
    write_folder([tmp_path / "m.gguf"], folder)
    check_both_engines(folder, source, [3])


def test_granite_with_windows_and_experts_is_refused(tmp_path: Path) -> None:
    config, model = granite_swa()
    write(config, dict(tree_flatten(model.parameters())), tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **{"granite_swa.expert_count": 8})
    with pytest.raises(ModelUnsupported, match="windows and experts"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "folder")


def write(config: dict[str, Any], weights: dict[str, mx.array], folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
