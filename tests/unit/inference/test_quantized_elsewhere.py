"""Checkpoints that GPTQ, AWQ, compressed-tensors and FP8 made compute what their numbers say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
import quantized_files
import zoo
from mlx_lm.models import bitnet

from exo.errors import ModelUnsupported
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.engine import InferenceEngine
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.models.quantizers import quantizer_of
from exo.shard import Shard

WIDENED_ON_MLX = {
    "FP8 in blocks, powers": 0.03,
    "FP8 in blocks": 0.03,
    "FP8 by rows": 0.03,
    "NVFP4": 0.15,
    "NVFP4 of ModelOpt": 0.15,
}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "qwen3"
    zoo.write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    zoo.write_checkpoint("qwen3_moe", folder / "stacked")
    quantized_files.with_single_experts(folder / "stacked", folder / "single")
    return folder / "single"


def cpu() -> CPUEngine:
    return CPUEngine(precise=True)


async def logits(engine: InferenceEngine, folder: Path) -> npt.NDArray[np.float32]:
    """After the last token of a prompt."""
    tokens = zoo.PROMPTS[0]
    try:
        description = await engine.describe("tiny", folder)
        shard = Shard("tiny", 0, description.n_layers, description.n_layers)
        await engine.load(shard, folder, lambda done, total: None)
        part = Slice("s", 0, len(tokens), SamplingParams(temperature=0))
        batch = ForwardBatch((part,), np.array(tokens, np.int32))
        found = await engine._thread.submit(partial(engine.compute, shard, batch, None))
        return np.asarray(found)[-1]
    finally:
        await engine.close()


def error(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Root mean squares, relative."""
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("kind", quantized_files.KINDS)
async def test_a_layer_is_what_its_numbers_say(kind: str, plain: Path, tmp_path: Path) -> None:
    packed, numbers = tmp_path / "packed", tmp_path / "numbers"
    quantized_files.write(kind, plain, packed, numbers)
    expected = await logits(cpu(), numbers)
    assert error(expected, await logits(cpu(), plain)) > 1e-3, "it was quantized"
    engine = cpu()
    assert error(await logits(engine, packed), expected) < 1e-5
    assert not engine._on_mlx
    assert error(await logits(CPUEngine(), packed), expected) < 0.03
    limit = WIDENED_ON_MLX.get(kind, 1e-4)
    assert error(await logits(MLXEngine(precise=True), packed), expected) < limit


@pytest.mark.parametrize("kind", ["BitNet", "BitNet, divided"])
async def test_bitnets_own_architecture(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against mlx-lm's class, whose layers have a kernel for Metal alone: with plain ones instead,
    of the same numbers."""
    monkeypatch.setattr(bitnet, "BitLinear", nn.Linear)
    zoo.write_checkpoint("bitnet", tmp_path / "source")
    packed, numbers = tmp_path / "packed", tmp_path / "numbers"
    quantized_files.write(kind, tmp_path / "source", packed, numbers)
    expected = await logits(MLXEngine(precise=True), numbers)
    engine = cpu()
    assert error(await logits(engine, packed), expected) < 1e-4
    assert not engine._on_mlx
    assert error(await logits(CPUEngine(), packed), expected) < 0.05  # squared, which doubles it


@pytest.mark.parametrize("kind", ["GPTQ", "w4a16", "FP8 in blocks", "NVFP4"])
async def test_experts_are_what_their_numbers_say(kind: str, mixture: Path, tmp_path: Path) -> None:
    packed, numbers = tmp_path / "packed", tmp_path / "numbers"
    quantized_files.write(kind, mixture, packed, numbers)
    expected = await logits(cpu(), numbers)
    engine = cpu()
    assert error(await logits(engine, packed), expected) < 1e-5
    assert not engine._on_mlx
    assert (
        error(await logits(MLXEngine(precise=True), packed), expected) < 0.12
    )  # chosen experts may change


@pytest.fixture(scope="session")
def with_multipliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Falcon-H1 as it was trained: its multipliers are not in the weights."""
    folder = tmp_path_factory.mktemp("falcon_h1") / "raw"
    more = zoo.FALCON_H1_MULTIPLIERS | {"mamba_n_heads": 8, "mamba_d_head": 8}
    zoo.write_checkpoint("falcon_h1", folder, zoo.tiny_config("falcon_h1") | more)
    quantized_files.with_convolutions_as_trained(folder)
    return folder


@pytest.mark.parametrize("kind", ["GPTQ", "AWQ", "FP8 by rows"])
async def test_multipliers_reach_what_was_packed(
    kind: str, with_multipliers: Path, tmp_path: Path
) -> None:
    """tiiuae publishes Falcon-H1 as GPTQ."""
    packed, numbers = tmp_path / "packed", tmp_path / "numbers"
    quantized_files.write(kind, with_multipliers, packed, numbers)
    expected = await logits(cpu(), numbers)
    engine = cpu()
    assert error(await logits(engine, packed), expected) < 1e-5
    assert not engine._on_mlx
    with pytest.raises(ModelUnsupported, match="take its GGUF file"):
        await logits(MLXEngine(precise=True), packed)


async def test_multipliers_of_some_rows_of_nvfp4_are_refused(
    with_multipliers: Path, tmp_path: Path
) -> None:
    quantized_files.write("NVFP4", with_multipliers, tmp_path / "packed", tmp_path / "numbers")
    with pytest.raises(ModelUnsupported):
        await logits(cpu(), tmp_path / "packed")


def say_bits(folder: Path, bits: int) -> None:
    """In place of what the configuration says."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    how = config["quantization_config"]
    for said in [how, *(group["weights"] for group in how.get("config_groups", {}).values())]:
        said.update({key: bits for key in ("bits", "num_bits") if key in said})
    file.write_text(json.dumps(config))


async def test_layers_of_other_bits_than_said_are_refused(plain: Path, tmp_path: Path) -> None:
    quantized_files.write("GPTQ", plain, tmp_path / "packed", tmp_path / "numbers")
    say_bits(tmp_path / "packed", 8)
    for engine in (cpu(), MLXEngine(precise=True)):
        with pytest.raises(ModelUnsupported, match="has other than 8 bits"):
            await logits(engine, tmp_path / "packed")


async def test_weights_of_another_width_are_an_error_not_a_wild_read(
    plain: Path, tmp_path: Path
) -> None:
    quantized_files.write("w8a16", plain, tmp_path / "packed", tmp_path / "numbers")
    say_bits(tmp_path / "packed", 4)
    with pytest.raises(ModelUnsupported, match="projection is of 64 x 128, not of 64 x 64"):
        await logits(cpu(), tmp_path / "packed")


@pytest.mark.parametrize("kind", ["AWQ", "FP8 in blocks"])
@pytest.mark.parametrize("make", [cpu, MLXEngine])
async def test_a_shard_reads_its_tensors_alone(
    make: type[MLXEngine],
    kind: str,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("exo.models.file_parts.BLOCK", 64)
    whole = tmp_path / "packed"
    quantized_files.write(kind, plain, whole, tmp_path / "numbers")
    expected = await logits(make(), whole)
    headers = zoo.only_with(whole, tmp_path / "headers", ())
    rows, tokens = None, zoo.PROMPTS[0]
    part = Slice("s", 0, len(tokens), SamplingParams(temperature=0))
    batch = ForwardBatch((part,), np.array(tokens, np.int32))
    for start, end in ((0, 2), (2, zoo.LAYERS)):
        engine, shard = make(), Shard("tiny", start, end, zoo.LAYERS)
        try:
            wanted = await engine.needed_tensors(shard, headers)
            folder = zoo.only_with(whole, tmp_path / f"{start}", wanted)
            await engine.load(shard, folder, lambda done, total: None)
            rows = await engine._thread.submit(partial(engine.compute, shard, batch, rows))
        finally:
            await engine.close()
    assert error(np.asarray(rows)[-1], expected) < 1e-5


@pytest.mark.parametrize("make", [cpu, MLXEngine])
async def test_what_nobody_reads_is_refused_in_words(
    make: type[MLXEngine], plain: Path, tmp_path: Path
) -> None:
    quantized_files.write("bitsandbytes", plain, tmp_path / "packed", tmp_path / "numbers")
    with pytest.raises(ModelUnsupported, match=r"bitsandbytes\. Take the model as GGUF"):
        await logits(make(), tmp_path / "packed")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "out of order"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version marlin"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "exl3"}, "quantized by exl3"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "norms of their own"),
        ({"quant_method": "bitnet", "quantization_mode": "online"}, "only as they are used"),
    ],
)
def test_what_is_stored_otherwise_is_named(how: dict[str, object], words: str) -> None:
    with pytest.raises(ModelUnsupported, match=words):
        quantizer_of({"quantization_config": how})


@pytest.mark.parametrize(
    "how",
    [
        {"quant_method": "mxfp4"},
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
    ],
)
def test_what_mlx_lm_reads_is_left_to_it(how: dict[str, object]) -> None:
    assert quantizer_of({"quantization_config": how}) is None
    assert quantizer_of({"quantization": {"bits": 4}, "quantization_config": how}) is None
