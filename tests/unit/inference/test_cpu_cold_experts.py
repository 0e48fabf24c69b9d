"""Mixtures of which only some experts are in memory: what they compute, and what they take."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zoo
from gguf_files import write_gguf

from exo.errors import EngineFailed, ExoError
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu import _native as native
from exo.inference.cpu.engine import CPUEngine
from exo.inference.cpu.shard_model import CheckpointModel
from exo.inference.sampling import SamplingParams
from exo.models.description import ModelDescription
from exo.models.gguf.folder import write_folder
from exo.models.tensor_table import all_tensors
from exo.shard import Shard

WHOLE = Shard("m", 0, zoo.LAYERS, zoo.LAYERS)
IN_PART = replace(WHOLE, expert_share=1 / 4)


def single_experts(source: Path, target: Path) -> None:
    """One tensor for each expert, as checkpoints are trained."""
    import mlx.core as mx

    found = {}
    for name, value in mx.load(str(source / "model.safetensors")).items():
        if ".switch_mlp." in name:
            for index in range(value.shape[0]):
                found[name.replace("switch_mlp", f"experts.{index}")] = value[index]
        else:
            found[name] = value
    target.mkdir()
    mx.save_safetensors(str(target / "model.safetensors"), found)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


def checkpoint(kind: str, folder: Path) -> Path:
    model_type, _, how = kind.partition("-")
    zoo.write_checkpoint(model_type, folder / "source")
    match how:
        case "gguf":
            write_gguf(folder / "source", folder / "m.gguf")
            write_folder([folder / "m.gguf"], folder / "made")
        case "single":
            single_experts(folder / "source", folder / "made")
        case "mxfp4":
            zoo.quantize_checkpoint(folder / "source", folder / "made", 4, "mxfp4")
        case _:
            zoo.quantize_checkpoint(folder / "source", folder / "made")
    return folder / "made"


async def steps(engine: CPUEngine, shard: Shard, folder: Path) -> npt.NDArray[np.float32]:
    """Logits of a prompt and of tokens after it."""
    await engine.load(shard, folder, lambda done, total: None)
    tokens = np.random.default_rng(2).integers(0, zoo.VOCABULARY, 40).astype(np.int32)
    found = []
    for start, end in ((0, 30), *((i, i + 1) for i in range(30, 40))):
        part = Slice("a", start, end - start, SamplingParams(temperature=0))
        batch = ForwardBatch((part,), tokens[start:end])
        found.append(await engine._begin("compute", partial(engine.compute, shard, batch, None)))
    return np.concatenate(found)


def memory_of(engine: CPUEngine) -> native.ExpertMemory:
    return engine._checkpoints["m"]._cold.memory


@pytest.mark.parametrize(
    "kind",
    ["qwen3_moe-affine", "gpt_oss-mxfp4", "qwen3_5_moe-gguf", "qwen3_moe-single"],
)
async def test_experts_that_are_read_when_asked_for_give_the_same_bits(
    kind: str, tmp_path: Path
) -> None:
    folder = checkpoint(kind, tmp_path)
    whole, in_part = CPUEngine(2), CPUEngine(2)
    expected = await steps(whole, WHOLE, folder)
    assert np.array_equal(await steps(in_part, IN_PART, folder), expected)
    memory = memory_of(in_part)
    assert memory_of(whole).packed == 0
    assert memory.packed > zoo.LAYERS * 4  # more often than there are experts
    assert whole.promised_bytes == 0
    described = await in_part.describe("m", folder)
    most = sum(described.expert_bytes) / 4 + max(described.expert_bytes)
    assert 0 < memory.bytes <= 1.1 * most
    await in_part.unload(IN_PART)
    assert "m" not in in_part._checkpoints
    await whole.close()
    await in_part.close()


async def test_with_more_memory_a_later_shard_keeps_them_all(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe-affine", tmp_path)
    engine = CPUEngine(2)
    expected = await steps(engine, IN_PART, folder)
    before = memory_of(engine).packed
    assert np.array_equal(await steps(engine, WHOLE, folder), expected)
    await engine.unload(IN_PART)
    after = memory_of(engine).packed
    assert np.array_equal(await steps(engine, WHOLE, folder), expected)
    assert memory_of(engine).packed == after > before
    await engine.close()


async def test_what_experts_will_take_is_promised_to_nobody_else(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe-affine", tmp_path)
    engine = CPUEngine(2)
    await engine.load(IN_PART, folder, lambda done, total: None)
    experts = sum((await engine.describe("m", folder)).expert_bytes)
    assert engine.promised_bytes == experts // 4
    assert engine.cache_bytes("cpu") > 0
    batch = ForwardBatch((Slice("a", 0, 1, SamplingParams(temperature=0)),), np.ones(1, np.int32))
    await engine.forward(IN_PART, batch, None)
    assert engine.promised_bytes < experts // 4
    await engine.unload(IN_PART)
    assert engine.promised_bytes == 0
    await engine.close()


async def test_files_that_get_other_names_are_read_on(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe-single", tmp_path)
    engine = CPUEngine(2)
    expected = await steps(engine, IN_PART, folder)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    tokens = np.arange(1, 20, dtype=np.int32)
    batch = ForwardBatch((Slice("b", 0, 19, SamplingParams(temperature=0)),), tokens)
    read = memory_of(engine).packed
    await engine.forward(IN_PART, batch, None)
    assert memory_of(engine).packed > read and np.isfinite(expected).all()
    await engine.close()


async def test_an_expert_that_cannot_be_packed_fails_the_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exo.inference.cpu.layers.experts import ExpertReader

    folder = checkpoint("qwen3_moe-affine", tmp_path)
    engine = CPUEngine(2)
    expected = await steps(engine, IN_PART, folder)
    tokens = np.arange(1, 20, dtype=np.int32)
    batch = ForwardBatch((Slice("b", 0, 19, SamplingParams(temperature=0)),), tokens)

    def fails(self: ExpertReader, number: int) -> native.Expert:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ExpertReader, "pack", fails)
        with pytest.raises(EngineFailed, match="the disk is gone"):
            await engine.forward(IN_PART, batch, None)
    assert np.array_equal(await steps(engine, IN_PART, folder), expected)
    await engine.close()


def expert(size: int) -> native.Expert:
    """Of about so many kilobytes."""
    made = native.Expert()
    weights = np.zeros(size * 1024, np.uint8)
    made.up = made.down = native.pack_dense(weights, native.DType.F32, size, 256)
    return made


def test_what_was_used_longest_ago_goes_first() -> None:
    asked: list[tuple[int, list[int]]] = []

    def pack(layer: int, numbers: list[int]) -> list[native.Expert]:
        asked.append((layer, numbers))
        return [expert(16) for _ in numbers]

    one = 2 * expert(16).up.nbytes
    memory = native.ExpertMemory(3 * one, pack)
    first = memory.take(0, [1, 2])
    assert memory.take(0, [2, 1])[1].up is first[0].up
    memory.take(1, [5])
    assert asked == [(0, [1, 2]), (1, [5])] and memory.bytes == 3 * one
    memory.take(0, [2])
    memory.take(0, [3])  # 1 goes: 2 was used since
    memory.take(0, [2])
    assert asked[2:] == [(0, [3])]
    memory.take(0, [1])  # 5 of the other layer goes
    memory.take(0, [2, 3])
    assert asked[3:] == [(0, [1])] and memory.bytes == 3 * one
    found = memory.take(2, [0, 1, 2, 3])  # more than fit are there at once all the same
    assert len(found) == 4 and memory.bytes == 4 * one
    memory.take(2, [3])
    assert memory.bytes == 3 * one
    memory.keep_only([0])
    assert memory.bytes == 0 and (memory.taken, memory.packed) == (16, 9)
    memory.take(0, [1, 2, 3])
    memory.set_limit(one)
    assert memory.bytes == one


async def test_a_description_says_what_experts_take(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe-affine", tmp_path)
    engine = CPUEngine(2)
    found = await engine.describe("m", folder)
    assert found.expert_bytes == CheckpointModel(folder).expert_bytes
    assert all(
        0 < own < size for own, size in zip(found.expert_bytes, found.layer_bytes, strict=True)
    )
    saved = found.bytes_of([WHOLE]) - found.bytes_of([IN_PART])
    assert saved == pytest.approx(0.75 * sum(found.expert_bytes), abs=zoo.LAYERS)
    assert found.bytes_of([WHOLE, IN_PART]) == found.bytes_of([WHOLE])
    zoo.write_checkpoint("llama", tmp_path / "dense")
    dense: ModelDescription = await engine.describe("dense", tmp_path / "dense")
    assert dense.expert_bytes == ()
    assert json.loads((folder / "config.json").read_text())["num_experts"] == 4
    await engine.close()


async def test_a_file_cut_short_while_experts_are_read_fails_the_step_and_not_the_process(
    tmp_path: Path,
) -> None:
    """What is gone of a map is SIGBUS for who reads on."""
    folder = checkpoint("qwen3_moe-single", tmp_path)
    engine = CPUEngine(2)
    expected = await steps(engine, IN_PART, folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    tokens = np.arange(1, 20, dtype=np.int32)
    batch = ForwardBatch((Slice("b", 0, 19, SamplingParams(temperature=0)),), tokens)
    with file.open("r+b") as stream:
        stream.truncate(len(whole) // 4)
    with pytest.raises(EngineFailed, match="was cut short while it was read"):
        await engine.forward(IN_PART, batch, None)
    await engine.unload(IN_PART)
    with pytest.raises(ExoError, match=r"does not fit the file|corrupt file"):
        await engine.load(IN_PART, folder, lambda done, total: None)
    file.write_bytes(whole)
    assert np.array_equal(await steps(engine, IN_PART, folder), expected)
    await engine.close()


@pytest.mark.parametrize("missing", ["most", "one byte"])
async def test_a_file_cut_short_while_it_is_loaded_is_an_error(
    missing: str, tmp_path: Path
) -> None:
    """Without its last byte a map reads a zero there."""
    folder = checkpoint("qwen3_moe-single", tmp_path)
    engine = CPUEngine(2)
    file = folder / "model.safetensors"
    whole = file.read_bytes()

    def cut(done: int, total: int) -> None:
        if done:
            os.truncate(file, 4096 if missing == "most" else len(whole) - 1)

    with pytest.raises(EngineFailed, match="was cut short while it was read"):
        await engine.load(WHOLE, folder, cut)
    file.write_bytes(whole)
    assert np.isfinite(await steps(engine, WHOLE, folder)).all()
    await engine.close()


@pytest.mark.parametrize("kind", ["qwen3_moe-affine", "qwen3_5_moe-gguf", "gemma4_text-affine"])
def test_what_decoding_a_token_reads(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    model = CheckpointModel(folder)
    arch = model.architecture
    routed = looked_up = total = 0
    for name, entry in all_tensors(folder).items():
        total += entry.nbytes
        if ".switch_mlp." in name:
            routed += entry.nbytes
        elif "embed_tokens_per_layer." in name or ("embed_tokens." in name and not model.tied):
            looked_up += entry.nbytes
    assert bool(routed) == bool(arch.expert_count) and bool(looked_up) == (
        not kind.startswith("qwen3_moe")
    )
    share = arch.experts_per_token / arch.expert_count if routed else 0
    assert model.bytes_of_a_token() == total - looked_up - routed + round(routed * share)
