"""What GGUF files are compared with: the checkpoints they were made of, on both engines."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zoo

from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.cpu.shard_model import CheckpointModel
from exo.inference.sampling import SamplingParams
from exo.shard import Shard


def cpu_logits(folder: Path, cuts: list[int], precise: bool = True) -> npt.NDArray[np.float32]:
    """After the first of the zoo's prompts, through shards cut at `cuts`."""
    tokens = np.array(zoo.PROMPTS[0], np.int32)
    batch = ForwardBatch((Slice("s", 0, len(tokens), SamplingParams()),), tokens)
    bounds, states = [0, *cuts, zoo.LAYERS], None
    for start, end in pairwise(bounds):
        engine, shard = CPUEngine(2, precise=precise), Shard("m", start, end, zoo.LAYERS)
        engine.load_shard(shard, folder, lambda done, total: None)
        assert not engine._on_mlx
        states = engine.compute(shard, batch, states)
    assert states is not None
    return states


UNSAID: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "lfm2_moe": {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    "falcon_h1": {"lm_head_multiplier": 1.0, "embedding_multiplier": 1.0},  # in the weights there
    "qwen3_next": {"norm_topk_prob": True},
    "hunyuan": {"use_cla": False},
    "bailing_moe": {
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_bias": False,
        "use_qkv_bias": False,
    },
    "minicpm3": {
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_scaling": {"type": "longrope"},
    },
    "mamba2": {"time_step_limit": [0.0, 1e30]},
    "phimoe": {"rope_scaling": None},
    "mellum": {"rope_parameters": zoo.OF_BOTH_KINDS},
    "laguna": zoo.LAGUNA_XS,
    "step3p5": zoo.STEP_FLASH,
    "nemotron-nas": zoo.NEMOTRON_49B,
}
"""Files do not say what Gemma's attention divides by: the width of a head, but in the largest. Nor
which of Command R7B's layers see all: every fourth. Nor how LFM2 and Qwen3-Next weigh experts:
their shares are brought to a sum of 1. Nor how far a chunk of Llama 4's reaches."""


def write_source(model_type: str, more: dict[str, Any], folder: Path) -> None:
    """A checkpoint that is what a file of the model would be read as."""
    unsaid = UNSAID.get(model_type, {"query_pre_attn_scalar": 16})
    config = zoo.tiny_config(model_type) | unsaid | more
    if model_type == "llama4":
        config["text_config"] |= {"attention_chunk_size": 8192, "floor_scale": 8192}
    zoo.write_checkpoint(model_type, folder, config)


def check_both_engines(folder: Path, source: Path, cuts: list[int]) -> None:
    expected = zoo.unsplit_logits(source)
    can_be_cut = not CheckpointModel(folder).architecture.uncuttable
    through_mlx = asyncio.run(zoo.split_logits(folder, [2] if can_be_cut else [], zoo.LAYERS))
    assert zoo.worst_error(through_mlx, expected) < 1e-4
    for own in ([], cuts) if can_be_cut and cuts else ([],):
        assert zoo.worst_error([cpu_logits(folder, own)[-1]], [expected[0][0]]) < 1e-4
