"""What mlx-lm's classes compute otherwise than the models they are named after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import bailing_moe_v3, ernie4_5_moe, hunyuan, jamba
from mlx_lm.models.step3p5 import ClampedSwiGLU, clamped_swiglu

from exo.errors import ModelUnsupported

_WITHOUT_A_CLASS = (
    "arcee",
    "cohere2_moe",
    "deepseek_v4",
    "falcon",
    "glm5_next",
    "granite_swa",
    "hy_v3",
    "hy_v4",
    "qwen4_exp",
)


def check_class(config: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported for what mlx-lm has no class of, and the cpu engine runs."""
    if (model_type := config.get("model_type")) in _WITHOUT_A_CLASS:
        raise ModelUnsupported(
            f"mlx-lm has no class of {model_type!r}, which exo's own kernels run: start exo with "
            "--inference-engine cpu"
        )


def check_packed(config: Mapping[str, Any]) -> None:
    """Of a checkpoint that another tool than MLX quantized.

    Raises:
        ModelUnsupported: Falcon-H1, whose multipliers mlx-lm puts into weights that are numbers.
    """
    if config.get("model_type") == "falcon_h1":
        raise ModelUnsupported(
            "MLX runs no Falcon-H1 that GPTQ or another tool packed, as its multipliers are not in "
            "the weights there: take its GGUF file, a conversion for MLX, or a node with a CPU"
        )


def _mixed(
    block: Any, x: mx.array, gates: mx.array, ranks: mx.array, top: int, *, to_one: bool = True
) -> mx.array:
    """What the experts of the `top` highest ranks give, by their gates; `to_one`: whose sum is made
    1."""
    chosen = mx.argpartition(-ranks, kth=top - 1, axis=-1)[..., :top]
    scores = mx.take_along_axis(gates, chosen, axis=-1)
    if to_one:
        scores = scores / mx.maximum(scores.sum(axis=-1, keepdims=True), 1e-12)
    mixed: mx.array = (block.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2)
    return mixed.astype(x.dtype)


class _NormedHunyuan(hunyuan.MoeBlock):
    """The weights of a token's experts have a sum of 1, as in the reference (`topk_weights /
    weight_sum`) and llama.cpp; mlx-lm's class takes them as softmax over all gave them."""

    def __call__(self, x: mx.array) -> mx.array:
        gates = mx.softmax(self.gate(x), axis=-1, precise=True)
        mixed = _mixed(self, x, gates, gates, self.top_k)
        return mixed + self.shared_mlp(x) if self.use_shared_mlp else mixed


class _PlainJamba(jamba.JambaSparseMoeBlock):
    """Experts weigh what softmax over all gave them, as in transformers' modeling_jamba.py and
    llama.cpp; mlx-lm's class makes their sum 1."""

    def __call__(self, x: mx.array) -> mx.array:
        gates = mx.softmax(self.router(x), axis=-1, precise=True)
        return _mixed(self, x, gates, gates, self.num_experts_per_tok, to_one=False)


class _BiasedErnie(ernie4_5_moe.Ernie4_5_MoeMLP):
    """A bias takes part in the choice of experts, not in their weights; mlx-lm's class leaves it
    out."""

    def __call__(self, x: mx.array) -> mx.array:
        gates = self.gate_act(self.gate(x).astype(mx.float32))
        biased = gates + self.moe_statics.e_score_correction_bias
        mixed = _mixed(self, x, gates, biased, self.k)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)


_ERNIE_BIAS = "mlp.moe_statics.e_score_correction_bias"


def kept(model: nn.Module, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights of a checkpoint that mlx-lm's class drops and should not: the model has a place for
    them now."""
    if not isinstance(model, ernie4_5_moe.Model):
        return {}
    found = {}
    for index, layer in enumerate(model.layers):
        name = f"model.layers.{index}.{_ERNIE_BIAS}"
        if name in weights:
            found[name] = weights[name].reshape(-1)
            layer.mlp.__class__ = _BiasedErnie
            layer.mlp.moe_statics = nn.Module()
            layer.mlp.moe_statics.e_score_correction_bias = mx.zeros(found[name].shape)
    return found


class _LimitedLing(bailing_moe_v3.BailingMLP):
    """The expert that every token goes through, where what it gives has a limit."""

    def __call__(self, x: mx.array) -> mx.array:
        made = clamped_swiglu(self.up_proj(x), self.gate_proj(x), self._exo_limit)
        given: mx.array = self.down_proj(made)
        return given


def _limit(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Ling 3.0 Flash was trained with limits in its last layers, which its own code, and mlx-lm's,
    leave out; without them it writes nonsense now and then (llama.cpp's swiglu_clamp_exp)."""
    for key, is_shared in (
        ("expert_swiglu_limit_list", False),
        ("share_expert_swiglu_limit_list", True),
    ):
        for layer, limit in zip(model.layers, config.get(key) or (), strict=False):
            if not limit or not isinstance(layer.mlp, bailing_moe_v3.BailingSparseMoE):
                continue
            if is_shared:
                layer.mlp.shared_experts.__class__ = _LimitedLing
                layer.mlp.shared_experts._exo_limit = float(limit)
            else:
                layer.mlp.switch_mlp.activation = ClampedSwiGLU(float(limit))


_COMPUTED_ONCE = ("_attn_res_w_eff", "_mlp_res_w_eff", "_output_res_w_eff", "_step")


def forget_computed(model: nn.Module) -> None:
    """Kimi K3's layers keep what they once computed of their weights, and on Metal a compiled step
    with the weights in it: where these give way to others, it would go on with those of before."""
    for module in model.modules():
        for name in _COMPUTED_ONCE:
            if getattr(module, name, None) is not None:
                setattr(module, name, None)


def _scale_logits(model: nn.Module, factor: float) -> None:
    kind = type(model)

    def call(self: nn.Module, *arguments: Any, **named: Any) -> mx.array:
        logits: mx.array = kind.__call__(self, *arguments, **named)
        return logits * factor

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def correct(model: nn.Module, config: Mapping[str, Any]) -> None:
    """GLM-4 9B turns half of each head, which its class does not read. MiniCPM 3's logits are
    divided (`hidden_size / dim_model_base`) also where its head is its embedding.

    Falcon-H1's keys have a factor (`key_multiplier`, 0.03 to 0.4 in the models there are), which
    mlx-lm and what it converted leave out: its `sanitize` looks for a `key_proj` that no checkpoint
    has. The products of queries and keys get it here. In a GGUF file it is in the weights."""
    if config.get("model_type") == "falcon_h1":
        for layer in model.layers:
            layer.self_attn.scale *= config.get("key_multiplier", 1.0)
    if config.get("model_type") == "glm":
        for layer in model.layers:
            attention = layer.self_attn
            share = config.get("partial_rotary_factor", 0.5)
            attention.rope.dims = int(attention.head_dim * share)
    if config.get("model_type") == "minicpm3" and config.get("tie_word_embeddings"):
        _scale_logits(model, config["dim_model_base"] / config["hidden_size"])
    if isinstance(model, bailing_moe_v3.Model):
        _limit(model, config)
    if config.get("model_type") == "jamba":
        for layer in model.layers:
            if isinstance(layer.feed_forward, jamba.JambaSparseMoeBlock):
                layer.feed_forward.__class__ = _PlainJamba
    if config.get("model_type") == "hunyuan":
        for layer in model.layers:
            if isinstance(layer.mlp, hunyuan.MoeBlock):
                layer.mlp.__class__ = _NormedHunyuan
