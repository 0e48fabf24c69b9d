"""Every family of the cpu engine against the MLX engine in float32, on tiny random checkpoints."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
import zoo

from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.cpu.families import FAMILIES
from exo.inference.cpu.shard_model import CheckpointModel
from exo.inference.engine import InferenceEngine
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.shard import Shard

GREEDY = SamplingParams(temperature=0)
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.2 * i for i in range(8)],
    },
}
CASES = [
    *((family, {}) for family in FAMILIES if family != "mistral"),
    *(
        ("llama", {"rope_scaling": scaling, "max_position_embeddings": 128})
        for scaling in SCALINGS.values()
    ),
    ("llama", {"rope_traditional": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 5}),
    ("llama", {"head_dim": 48, "max_position_embeddings": 128}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    (
        "phi3",
        {
            "rope_scaling": SCALINGS["longrope"],
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
            "partial_rotary_factor": 1.0,
        },
    ),
    ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}),
]


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    scaling = case[1].get("rope_scaling", {})
    return "-".join([case[0], *case[1], *filter(None, [scaling.get("type")])])


def config_of(case: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {**zoo.tiny_config(case[0]), **case[1]}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    made: dict[str, Path] = {}

    def make(case: tuple[str, dict[str, Any]]) -> Path:
        name = name_of(case)
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            zoo.write_checkpoint(case[0], made[name], config_of(case))
        return made[name]

    return make


async def logits(
    engine: InferenceEngine, folder: Path, cuts: tuple[int, ...] = ()
) -> npt.NDArray[np.float32]:
    """Logits after each of a prompt's last tokens, prefilled in pieces and decoded, two sequences
    of different lengths sharing the steps."""
    description = await engine.describe("m", folder)
    bounds = [0, *cuts, description.n_layers]
    shards = [Shard("m", a, b, description.n_layers) for a, b in pairwise(bounds)]
    for shard in shards:
        await engine.load(shard, folder, lambda done, total: None)
    rng = np.random.default_rng(1)
    one, two = (rng.integers(0, zoo.VOCABULARY, n).astype(np.int32) for n in (23, 9))
    steps = [
        [("a", one, 0, 11), ("b", two, 0, 3)],
        [("a", one, 11, 18), ("b", two, 3, 4)],
        *([("b", two, i, i + 1), ("a", one, i + 14, i + 15)] for i in range(4, 9)),
    ]
    found = []
    for step in steps:
        parts = tuple(Slice(name, start, end - start, GREEDY) for name, _, start, end in step)
        ids = np.concatenate([tokens[start:end] for _, tokens, start, end in step])
        rows: Any = None
        for shard in shards:
            batch = ForwardBatch(parts, ids)
            rows = await engine._begin("compute", partial(engine.compute, shard, batch, rows))
        found.append(rows)
    await engine.close()
    return np.concatenate(found)


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_float32_logits_are_those_of_mlx(case: tuple, folder_of) -> None:  # type: ignore[no-untyped-def]
    folder = folder_of(case)
    CheckpointModel(folder)  # not left to MLX
    expected = await logits(MLXEngine(), folder)
    found = await logits(CPUEngine(2), folder)
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_a_split_changes_no_bit(case: tuple, folder_of) -> None:  # type: ignore[no-untyped-def]
    whole = await logits(CPUEngine(2), folder_of(case))
    split = await logits(CPUEngine(1), folder_of(case), cuts=(1, 4))
    assert np.array_equal(whole, split)


@pytest.mark.parametrize(
    ("bits", "mode"), [*((bits, "affine") for bits in (2, 3, 4, 6, 8)), (4, "mxfp4")]
)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mistral"])
async def test_quantized_logits_are_near_those_of_mlx(
    family: str,
    bits: int,
    mode: str,
    folder_of,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    # Every expert of a mixture: a rounding may otherwise turn a near-tie between two of them.
    every = {"num_experts_per_tok": 4} if FAMILIES[family].experts else {}
    zoo.quantize_checkpoint(folder_of((family, every)), tmp_path, bits, mode)
    CheckpointModel(tmp_path)
    expected = await logits(MLXEngine(), tmp_path)
    found = await logits(CPUEngine(2), tmp_path)
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) <= 0.05
    precise = await logits(CPUEngine(2, precise=True), tmp_path)
    assert np.abs(precise - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


async def test_experts_in_mxfp4_beside_affine_weights(folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As gpt-oss comes: what the config says of one module is all that is said of it."""
    from mlx_lm.utils import load_model, save_config, save_model

    model, config = load_model(folder_of(("gpt_oss", {"num_experts_per_tok": 4})))

    def how(path: str, module: Any) -> dict[str, Any] | bool:
        if not hasattr(module, "to_quantized") or "router" in path:
            return False
        if "experts" in path:
            return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        return {"group_size": 64, "bits": 8}

    own: dict[str, Any] = {}

    def noted(path: str, module: Any) -> dict[str, Any] | bool:
        said = how(path, module)
        if isinstance(said, dict) and "mode" not in said:
            own[path] = said
        return said

    nn.quantize(model, class_predicate=noted)
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4", **own}
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    CheckpointModel(tmp_path)  # not left to MLX
    expected = await logits(MLXEngine(), tmp_path)
    precise = await logits(CPUEngine(2, precise=True), tmp_path)
    assert np.abs(precise - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())
