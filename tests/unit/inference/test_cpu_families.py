"""Every family of the cpu engine against the MLX engine in float32, on tiny random checkpoints."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
import zoo
from mlx_lm.models import bitnet

from exo.errors import EngineFailed, ModelUnsupported
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.cpu.families.table import ALIASES, FAMILIES
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
TWINS = (
    *ALIASES,
    *("falcon", "cohere2_moe", "arcee", "granite_swa", "hy_v3"),
    *("hy_v4", "deepseek_v4", "glm5_next", "qwen4_exp"),
)
"""Names that mlx-lm has for another family's class, or for none (test_falcon.py,
test_cohere2_moe.py, test_without_a_class.py, test_deepseek_v4.py, test_hy4.py,
test_glm5.py, test_qwen4.py)."""
CHOSEN: dict[str, dict[str, Any]] = {
    "hunyuan": {"use_cla": False},
    "nemotron-nas": zoo.NEMOTRON_49B,
    "bailing_moe": {
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
}
"""Of what MLX runs of a family, what the cpu engine runs."""

NEMOTRON_SUPER = {
    "hybrid_override_pattern": "M*EM*E",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "mlp_bias": False,
}
"""Its experts are narrower than its hidden states."""

CASES = [
    *((family, CHOSEN.get(family, {})) for family in FAMILIES if family not in TWINS),
    ("laguna", zoo.LAGUNA_XS),
    ("step3p5", zoo.STEP_FLASH),
    ("qwen2_vl", {}),
    ("kimi_k25", {}),
    ("kimi_vl", {}),
    ("minimax", {"model_type": "minimax_m2"}),
    ("internlm3", {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
    ("mellum", {"rope_parameters": zoo.OF_BOTH_KINDS}),
    *(
        ("llama", {"rope_scaling": scaling, "max_position_embeddings": 128})
        for scaling in SCALINGS.values()
    ),
    ("llama", {"rope_traditional": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 5}),
    ("llama", {"head_dim": 48, "max_position_embeddings": 128}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("glm", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    ("minicpm3", {"tie_word_embeddings": True}),
    ("bailing_moe", {"norm_topk_prob": True, "norm_head": False}),
    ("phimoe", {"num_local_experts": 8, "num_experts_per_tok": 3, "router_jitter_noise": 0.2}),
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
    ("deepseek_v3", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    ("deepseek_v3", {"q_lora_rank": None}),
    (
        "bailing_moe_v3",
        {
            "expert_swiglu_limit_list": [0.0] * 4 + [0.02] * 2,
            "share_expert_swiglu_limit_list": [0.0, 0.01, 0.0, 0.0, 0.0, 0.03],
            "q_lora_rank": None,
        },
    ),
    ("kimi_linear", {"num_experts": 8, "num_expert_group": 4, "topk_group": 2}),
    ("nanbeige", {"skip_loop_final_norm": True, "loop_loss_weights": [0.5, 0.5]}),
    ("nanbeige", {"num_loops": 1}),
    ("mistral3", {}),
    ("mistral3", {"model_type": "ministral3", "rope_parameters": zoo.YARN}),
    ("stablelm", {"use_parallel_residual": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gemma4_text", zoo.GEMMA4_31B),
    ("gemma4_text", zoo.GEMMA4_26B),
    (
        "gemma3n",
        {
            "activation_sparsity_pattern": [0.95, 0.0] * 3,
            "altup_correct_scale": False,
            "altup_active_idx": 1,
        },
    ),
    ("mamba", {"model_type": "falcon_mamba", "tie_word_embeddings": False}),
    ("jamba", {"num_experts": 1, "mamba_dt_rank": "auto"}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 1, "tie_word_embeddings": False}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "nope"}),
    (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*EM*E",
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    ("nemotron_h", NEMOTRON_SUPER),
    (
        "deepseek_v2",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
    ),
]


@pytest.fixture(autouse=True)
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are not computed together by MLX, which is what others are compared with here: to
    try whether they could be takes as long as all else."""
    monkeypatch.setattr("exo.inference.mlx.engine.works", lambda model, start, end: False)


def name_of(case: tuple[str, dict[str, Any]]) -> str:
    scaling = case[1].get("rope_scaling", {})
    return "-".join([case[0], *case[1], *filter(None, [scaling.get("type")])])


def config_of(case: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    config = zoo.tiny_config(case[0])
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **case[1]}}
    return {**config, **case[1]}


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


@pytest.fixture(autouse=True, scope="module")
def layers_that_run_here() -> Iterator[None]:
    """Those of mlx-lm's BitNet have a kernel for Metal alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitnet, "BitLinear", nn.Linear)
        yield


async def logits(
    engine: InferenceEngine, folder: Path, cuts: tuple[int, ...] = ()
) -> npt.NDArray[np.float32]:
    """Logits after each of a prompt's last tokens, prefilled in pieces and decoded, two sequences
    of different lengths sharing the steps. Closes the engine."""
    try:
        return await _logits(engine, folder, cuts)
    finally:
        await engine.close()


async def _logits(
    engine: InferenceEngine, folder: Path, cuts: tuple[int, ...]
) -> npt.NDArray[np.float32]:
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
    return np.concatenate(found)


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_float32_logits_are_those_of_mlx(case: tuple, folder_of) -> None:  # type: ignore[no-untyped-def]
    folder = folder_of(case)
    CheckpointModel(folder)  # not left to MLX
    expected = await logits(MLXEngine(precise=True), folder)
    found = await logits(CPUEngine(2), folder)
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_a_split_changes_no_bit(case: tuple, folder_of) -> None:  # type: ignore[no-untyped-def]
    cuts = () if CheckpointModel(folder_of(case)).architecture.uncuttable else (1, 4)
    whole = await logits(CPUEngine(2), folder_of(case))
    split = await logits(CPUEngine(1), folder_of(case), cuts)
    assert np.array_equal(whole, split)


# How weights are packed does not depend on the family: every way in some, one way in all.
PACKINGS = [*((bits, "affine") for bits in (1, 2, 3, 4, 6, 8)), (4, "mxfp4")]
QUANTIZED = [
    *((family, *how) for family in ("llama", "gpt_oss", "qwen3_5_moe") for how in PACKINGS),
    *((f, 4, "affine") for f in FAMILIES if f not in ("llama", "gpt_oss", "qwen3_5_moe", *TWINS)),
]


@pytest.mark.parametrize(("family", "bits", "mode"), QUANTIZED)
async def test_quantized_logits_are_near_those_of_mlx(
    family: str,
    bits: int,
    mode: str,
    folder_of,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    # Every expert of a mixture: a rounding may otherwise turn a near-tie between two of them.
    experts = FAMILIES[family].experts
    sizes = CHOSEN.get(family, {}) | ({experts.top: 4} if experts else {})
    if "n_group" in sizes:  # a rounding would turn which are asked
        sizes |= {"num_experts": 4, "n_group": 1}
    if family == "llama4":  # mlx-lm knows one only
        sizes = {}
    if family in ("seed_oss", "llama4_text"):  # mlx-lm multiplies by a quantized embedding's bytes
        sizes |= {"tie_word_embeddings": False}
    described = str(zoo.tiny_config(family))
    has_delta_nets = any(key in described for key in ("linear_key_head_dim", "kda_"))
    if has_delta_nets:
        # What a delta net recalls is brought to length 1: of few numbers that are next to nothing
        # a rounding would turn the direction.
        sizes |= {"hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if family == "phimoe":  # nor turn which others are near
        sizes |= {"router_jitter_noise": 1.0}
    if family == "muse_glimmer":  # products of queries and keys are large there
        sizes |= {"qk_scale_factor": 1.0}
    if "index_topk" in zoo.tiny_config(family):  # a rounding would turn which keys are chosen
        sizes |= {"index_topk": 64}
    if family.startswith("gemma4"):  # wide heads of random keys: a rounding turns who is looked at
        sizes |= {"hidden_size": 256, "global_head_dim": 32, "hidden_size_per_layer_input": 64}
    zoo.quantize_checkpoint(folder_of((family, sizes)), tmp_path, bits, mode)
    CheckpointModel(tmp_path)
    expected = await logits(MLXEngine(precise=True), tmp_path)
    found = await logits(CPUEngine(2), tmp_path)
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    # Steps, what goes in, what reads and what is read are all made of the same numbers there, and
    # multiplied: a rounding of these counts four times.
    has_normed_scans = family == "jamba"
    assert error <= (0.15 if has_delta_nets or has_normed_scans else 0.05)
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
    expected = await logits(MLXEngine(precise=True), tmp_path)
    precise = await logits(CPUEngine(2, precise=True), tmp_path)
    assert np.abs(precise - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "gpt_neox"),
        *("llama4", "qwen3_vl_moe", "gpt_oss"),
    ],
)
async def test_a_checkpoint_as_it_was_trained_is_the_same_as_mlx_lms(
    family: str,
    folder_of,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    """What mlx-lm's `sanitize` does to the files on the hub, undone: axes of convolutions, norms
    less one, experts one by one, gate over up or beside it, and the tensors of other senses."""
    converted = folder_of((family, {}))
    weights: dict[str, mx.array] = mx.load(str(converted / "model.safetensors"))  # type: ignore[assignment]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), _as_trained(weights, family))
    shutil.copy(converted / "config.json", tmp_path)
    CheckpointModel(tmp_path)  # not left to MLX
    # A convolution of as many channels as taps cannot be told from its twin, and mlx-lm reads
    # gpt-oss in MXFP4 alone.
    if family not in ("lfm2", "gpt_oss"):
        assert np.allclose(
            await logits(MLXEngine(precise=True), tmp_path),
            await logits(MLXEngine(), converted),
            atol=1e-4,
        )
    found, expected = await logits(CPUEngine(2), tmp_path), await logits(CPUEngine(2), converted)
    assert np.abs(found - expected).max() <= 1e-4  # 1 + (w - 1) is not quite w


def _as_trained(weights: dict[str, mx.array], family: str) -> dict[str, mx.array]:
    if family == "gpt_neox":
        return _as_gpt_neox(weights)
    if family in ("llama4", "qwen3_vl_moe", "gpt_oss"):
        beside = _beside(weights, alternating=family == "gpt_oss")
        if family != "qwen3_vl_moe":
            return beside
        return {
            name.replace("language_model.model", "model.language_model").removeprefix(
                "language_model."
            ): value
            for name, value in beside.items()
        }
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        if "conv.weight" in name or "conv1d.weight" in name:
            value = value.moveaxis(1, 2)
        if name.endswith("norm.weight") and "linear_attn" not in name and family != "lfm2":
            value = value - 1
        if family == "qwen3_next" and ".switch_mlp." in name:
            for index in range(value.shape[0]):
                found[name.replace("switch_mlp", f"experts.{index}")] = value[index]
            continue
        if name.startswith("language_model.model"):
            name = name.replace("language_model.model", "model.language_model")
        found[name.removeprefix("language_model.")] = value
    if family == "qwen3_5_moe":
        for name in [name for name in found if "switch_mlp.gate_proj" in name]:
            block = name.partition(".switch_mlp")[0]
            gate, up, down = (
                found.pop(f"{block}.switch_mlp.{part}_proj.weight")
                for part in ("gate", "up", "down")
            )
            found[f"{block}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
            found[f"{block}.experts.down_proj"] = down
    if family.startswith("qwen3"):
        found["mtp.fc.weight"] = mx.zeros((8, 8))
    if family.startswith("qwen3_5"):
        found["model.visual.patch_embed.proj.weight"] = mx.zeros((8, 8))
    return found


def _beside(weights: dict[str, mx.array], alternating: bool) -> dict[str, mx.array]:
    """Experts' gates and ups in one tensor with rows last, all of one before the other's or a row
    of each in turn."""
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        block, _, part = name.replace("switch_mlp", "experts").partition(".experts.")
        if not part:
            found[name] = value
            continue
        if part.startswith("up_proj"):
            continue
        ending = "" if part.endswith("weight") else "_bias"
        if part.startswith("gate_proj"):
            both = [value, weights[name.replace("gate_proj", "up_proj")]]
            if alternating:
                value = mx.stack(both, axis=2).reshape(value.shape[0], -1, *value.shape[2:])
            else:
                value = mx.concatenate(both, axis=1)
        kept = "down_proj" if part.startswith("down_proj") else "gate_up_proj"
        turned = value if ending else value.swapaxes(1, 2)
        found[f"{block}.experts.{kept}{ending}"] = mx.contiguous(turned)
    return found


def _as_gpt_neox(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Pythia's names, and the masks it keeps beside the weights."""
    found = {}
    for name, value in weights.items():
        name = name.replace("model.h.", "gpt_neox.layers.").replace("model.embed_out", "embed_out")
        found[name.replace("model.", "gpt_neox.")] = value
    for layer in {name.partition(".attention.")[0] for name in found if ".attention." in name}:
        found[f"{layer}.attention.bias"] = mx.ones((1, 1, 8, 8), mx.bool_)
        found[f"{layer}.attention.masked_bias"] = mx.array(-1e9)
    return found


async def test_a_configuration_that_lies_about_heads_is_an_error_not_a_wild_write(
    folder_of,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    for heads in (1, 2, 4):
        folder = tmp_path / str(heads)
        shutil.copytree(folder_of(("llama", {})), folder)
        config = json.loads((folder / "config.json").read_text())
        right = config["num_key_value_heads"] == heads
        (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": heads}))
        if right:
            await logits(CPUEngine(2), folder)
            continue
        with pytest.raises(ModelUnsupported, match=r"config\.json describes: layer 0"):
            await logits(CPUEngine(2), folder)


@pytest.mark.parametrize(
    ("family", "lie", "told"),
    [
        ("mamba", {"time_step_rank": 5}, "x_proj is"),
        ("mamba", {"time_step_rank": 12, "state_size": 12}, "dt_proj is"),
        ("mamba", {"intermediate_size": 64}, "in_proj is|conv1d is"),
        ("mamba", {"state_size": 15}, "states that 4 divides"),
        ("jamba", {"mamba_dt_rank": 12, "mamba_d_state": 12}, "dt_layernorm is|dt_proj is"),
    ],
)
async def test_a_configuration_that_lies_about_a_scan(
    family: str,
    lie: dict[str, Any],
    told: str,
    folder_of,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    shutil.copytree(folder_of((family, {})), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, **lie}))
    with pytest.raises((ModelUnsupported, EngineFailed), match=told):
        await logits(CPUEngine(2), tmp_path / "m")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
async def test_falcon_h1_as_it_was_trained(
    dtype: mx.Dtype,
    folder_of,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    """Its multipliers stand in the configuration, not in the weights. What mlx-lm makes of them
    lacks the keys' (exo/inference/mlx/corrections.py)."""
    more = zoo.FALCON_H1_MULTIPLIERS | {"tie_word_embeddings": False}
    converted = folder_of(("falcon_h1", more))
    weights: dict[str, mx.array] = mx.load(str(converted / "model.safetensors"))  # type: ignore[assignment]
    raw = {
        name: (value.moveaxis(1, 2) if "conv1d.weight" in name else value).astype(dtype)
        for name, value in weights.items()
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), raw)
    shutil.copy(converted / "config.json", tmp_path)
    CheckpointModel(tmp_path)  # not left to MLX
    expected = await logits(MLXEngine(precise=True), tmp_path)
    precise = await logits(CPUEngine(2, precise=True), tmp_path)
    few = 1e-4 if dtype == mx.float32 else 2e-2  # of which each rounds products in its own way
    assert np.abs(precise - expected).max() <= few * np.abs(expected).max()
    without = json.loads((converted / "config.json").read_text()) | {"key_multiplier": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(without))
    assert not np.allclose(await logits(CPUEngine(2, precise=True), tmp_path), precise, atol=1e-2)


async def test_gpt_oss_as_its_makers_packed_it(folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Experts in MXFP4, 16 bytes for each 32 columns, a row of a gate and one of an up in turn."""
    converted = folder_of(("gpt_oss", {}))
    weights: dict[str, mx.array] = mx.load(str(converted / "model.safetensors"))  # type: ignore[assignment]
    found: dict[str, mx.array] = {}
    for name, value in _beside(weights, alternating=True).items():
        if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name:
            packed, scales = mx.quantize(mx.contiguous(value.swapaxes(1, 2)), mode="mxfp4")
            found[f"{name}_blocks"] = packed.view(mx.uint8).reshape(*scales.shape, 16)
            found[f"{name}_scales"] = scales
        else:
            found[name] = value.astype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), found)
    config = json.loads((converted / "config.json").read_text())
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    CheckpointModel(tmp_path)  # not left to MLX
    expected = await logits(MLXEngine(precise=True), tmp_path)
    precise = await logits(CPUEngine(2, precise=True), tmp_path)
    assert np.abs(precise - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


def test_a_tensor_of_another_familys_name_is_not_read(folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    converted = folder_of(("qwen3_moe", {}))
    weights: dict[str, mx.array] = mx.load(str(converted / "model.safetensors"))  # type: ignore[assignment]
    beside = _beside(weights, alternating=False)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), beside)
    shutil.copy(converted / "config.json", tmp_path)
    with pytest.raises(ModelUnsupported, match="switch_mlp"):
        CheckpointModel(tmp_path)


async def test_ernie_chooses_experts_with_a_bias(tmp_path: Path) -> None:
    """Which mlx-lm's class leaves out (llama.cpp and the reference do not): it is not part of an
    expert's weight."""
    folders = [tmp_path / name for name in ("without", "of-zeros", "with")]
    for folder in folders:
        zoo.write_checkpoint("ernie4_5_moe", folder)
    rng = np.random.default_rng(5)
    for folder, scale in zip(folders[1:], (0.0, 1.0), strict=True):
        weights = mx.load(str(folder / "model.safetensors"))
        for layer in range(zoo.LAYERS):
            bias = rng.uniform(-0.5, 0.5, (1, 4)) * scale
            weights[f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"] = mx.array(
                bias.astype(np.float32)
            )
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    through_mlx = [await logits(MLXEngine(precise=True), folder) for folder in folders]
    found = [await logits(CPUEngine(2, precise=True), folder) for folder in folders]
    for ours, theirs in zip(found, through_mlx, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert np.array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 0.1


async def test_step_as_it_was_trained(folder_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Its mixtures are called otherwise there, and norms hold one less."""
    converted = folder_of(("step3p5", zoo.STEP_FLASH))
    parts = {
        ".mlp.switch_mlp.": ".moe.",
        ".mlp.gate.gate.": ".moe.gate.",
        ".mlp.gate.router_bias": ".moe.router_bias",
        ".mlp.share_expert.": ".share_expert.",
    }
    weights = {}
    for name, array in mx.load(str(converted / "model.safetensors")).items():
        for own, raw in parts.items():
            name = name.replace(own, raw)
        weights[name] = array - 1 if name.endswith("norm.weight") else array
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "pt"})
    shutil.copy(converted / "config.json", tmp_path)
    expected = await logits(MLXEngine(precise=True), converted)
    for engine in (MLXEngine(precise=True), CPUEngine(2, precise=True)):
        assert np.abs(await logits(engine, tmp_path) - expected).max() <= 1e-4
