"""Gemma 4's GGUF files: llama.cpp's conversion/gemma.py writes them, models/gemma4.cpp reads."""

from __future__ import annotations

from exo.errors import ModelUnsupported
from exo.models.gguf.families.dense import SANDWICH
from exo.models.gguf.families.family import Config, GGUFFamily, Metadata, experts, qkv_rows

_NO_TURN = 1e29
"""A frequency's factor that stands for none: they write 1e30."""

TOKEN_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
"""What a token brings to each layer."""


def layer_types(metadata: Metadata) -> list[str]:
    slides = metadata.of_layers("attention.sliding_window_pattern")
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _config(metadata: Metadata, config: Config) -> Config:
    slides = [bool(one) for one in metadata.of_layers("attention.sliding_window_pattern")]
    kv_heads = metadata.of_layers("attention.head_count_kv")
    if len(set(slides)) != 2:
        raise ModelUnsupported(
            "expected layers of both kinds in gemma4.attention.sliding_window_pattern, those that "
            f"see a window and those that see all; found {slides}"
        )
    full = [layer for layer, one in enumerate(slides) if not one]
    width = metadata("attention.key_length_swa")
    factors = metadata.factors()
    turned = 1.0 if factors is None else float((factors < _NO_TURN).mean())
    found: Config = {
        "layer_types": layer_types(metadata),
        "sliding_window": metadata("attention.sliding_window"),
        "head_dim": width,
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": kv_heads[slides.index(True)],
        "num_global_key_value_heads": kv_heads[full[0]],
        "attention_k_eq_v": not metadata.has_tensor(f"blk.{full[0]}.attn_v."),
        "num_kv_shared_layers": metadata("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": metadata("final_logit_softcapping", None),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": turned,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata("rope.freq_base_swa", 10000.0),
            },
        },
    }
    feed_forward = metadata.of_layers("feed_forward_length")
    found["intermediate_size"] = feed_forward[0]
    found["use_double_wide_mlp"] = feed_forward[-1] > feed_forward[0]
    if metadata("expert_count", 0):
        found |= {
            "enable_moe_block": True,
            "num_experts": metadata("expert_count"),
            "top_k_experts": metadata("expert_used_count"),
            "moe_intermediate_size": metadata("expert_feed_forward_length"),
        }
    return found


def _qkv_rows(config: Config, layer: int) -> tuple[int, int, int]:
    is_full = config["layer_types"][layer] == "full_attention"
    kv_heads = config["num_global_key_value_heads" if is_full else "num_key_value_heads"]
    dim = config["global_head_dim" if is_full else "head_dim"]
    return qkv_rows(config["num_attention_heads"], kv_heads, dim)


GEMMA4 = GGUFFamily(
    "gemma4_text",
    tensors={
        **SANDWICH,
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale": "layer_scalar",
        **TOKEN_INPUTS,
        **experts("router.proj", "experts.switch_glu"),
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    config=_config,
    varied=("attention.head_count_kv", "feed_forward_length", "attention.sliding_window_pattern"),
    own_factors=True,
    qkv_rows=_qkv_rows,
)
