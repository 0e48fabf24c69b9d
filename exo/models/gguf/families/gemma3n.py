"""Gemma 3n's GGUF files: llama.cpp's conversion/gemma.py writes them, models/gemma3n.cpp reads."""

from __future__ import annotations

import re
from statistics import NormalDist

from exo.models.gguf.families.dense import SANDWICH
from exo.models.gguf.families.family import Config, GGUFFamily, Metadata
from exo.models.gguf.families.gemma4 import TOKEN_INPUTS, layer_types


def _config(metadata: Metadata, config: Config) -> Config:
    """As mlx-lm's class has it: below `text_config`, of a model that also sees and hears."""
    # Deviations of a normal distribution, where config.json has the share that lies below them.
    deviations = metadata.numbers("activation_sparsity_scale")
    shares = [float(NormalDist().cdf(deviation)) for deviation in deviations]
    text = {
        **config,
        "layer_types": layer_types(metadata),
        "sliding_window": metadata("attention.sliding_window"),
        "rope_local_base_freq": metadata("rope.freq_base_swa", 10000.0),
        "num_kv_shared_layers": metadata("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": metadata("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": metadata("final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": shares,
        "altup_num_inputs": metadata("altup.num_inputs"),
        "altup_active_idx": metadata("altup.active_idx"),
        # What no file says, and all models of the kind have.
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "laurel_rank": metadata.shape("blk.0.laurel_l.weight")[0],
    }
    return {"text_config": text}


_TENSORS = {
    **SANDWICH,
    **TOKEN_INPUTS,
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}

GEMMA3N = GGUFFamily(
    "gemma3n",
    layers="model.language_model.layers",
    tensors={
        theirs: re.sub(r"^model\b", "model.language_model", ours)
        for theirs, ours in _TENSORS.items()
    },
    config=_config,
    varied=("attention.sliding_window_pattern",),
    lists=("altup_projections", "altup_unembed_projections"),
)
