"""GGUF files of Qwen3.8 Flash Next, which llama.cpp calls qwen4exp."""

from __future__ import annotations

from exo.errors import ModelUnsupported
from exo.models.gguf.families.family import Config, GGUFFamily, Metadata
from exo.models.gguf.families.recurrent import DELTA_NETS, attending_rows, qwen3_5

_PARTS = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_TENSORS = {
    **DELTA_NETS,
    **{
        f"hc_{place}_{part}": f"{module}_hyper_connection.{name}"
        for place, module in (("attn", "attn"), ("ffn", "mlp"))
        for part, name in _PARTS.items()
    },
    **{f"output_hc_{part}": f"model.hyper_connection_mixer.{_PARTS[part]}" for part in _PARTS},
    **{f"indexer.{part}_proj": f"self_attn.indexer.{part}_proj" for part in "qk"},
    **{f"indexer.{part}_norm": f"self_attn.indexer.{part}_layernorm" for part in "qk"},
    **{f"ple_{part}": f"ple.{part}_proj" for part in ("key", "value")},
    **{f"ple_norm_{part}": f"ple.norm_{part}" for part in ("key", "query", "conv")},
    "ple_conv1d": "ple.conv1d",
    "per_layer_token_embd": "model.ngram_embedding",
}


def _ngrams(metadata: Metadata) -> Config | None:
    layers = metadata.numbers("ple.layers")
    if not layers:
        return None
    if len(layers) > 1:
        raise ModelUnsupported(f"a Qwen3.8 Flash Next with n-grams in {len(layers)} layers")
    return {
        "layer": int(layers[0]),
        **{
            ours: metadata.integers(f"ple.{theirs}")
            for ours, theirs in (
                ("multipliers", "layer_multipliers"),
                ("sizes", "head_vocab_sizes"),
                ("starts", "head_offsets"),
            )
        },
        "end": metadata("ple.eos_token_id"),
        "taps": metadata("ple.conv_kernel"),
    }


def _qwen4(metadata: Metadata, config: Config) -> Config:
    found = qwen3_5(metadata, config)
    interval, layers = found["full_attention_interval"], range(config["num_hidden_layers"])
    remembers = metadata.of_layers("attention.recurrent_layers")
    if remembers and any(bool(one) != bool((i + 1) % interval) for i, one in enumerate(remembers)):
        raise ModelUnsupported(f"a Qwen3.8 Flash Next whose layers remember as {remembers}")
    ratios = metadata.of_layers("attention.compress_ratios") or [0 for _ in layers]
    attending = {ratios[i] for i in layers if (i + 1) % interval == 0}
    if len(attending) > 1:
        raise ModelUnsupported(f"a Qwen3.8 Flash Next with pools of {sorted(attending)} tokens")
    if (pool := next(iter(attending), 0)) > 0:
        found |= {
            "indexer_n_heads": metadata("attention.indexer.head_count"),
            "indexer_head_dim": metadata("attention.indexer.key_length"),
            "indexer_budget": metadata("attention.indexer.top_k"),
            "indexer_compress_ratio": pool,
        }
    return {
        **found,
        "hc_count": metadata("hyper_connection.count"),
        "hc_lowrank": metadata("hyper_connection.low_rank"),
        "output_gate_type": "sigmoid",
        "ngrams": _ngrams(metadata),
    }


QWEN4 = GGUFFamily("qwen4_exp", tensors=_TENSORS, config=_qwen4, qkv_rows=attending_rows)
