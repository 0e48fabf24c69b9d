"""A shard needs the tensors that it reads, and with those alone computes the same."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zoo

from exo.errors import EngineFailed
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.engine import InferenceEngine
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SampledToken, SamplingParams
from exo.models.tensor_table import parts_with, weight_files
from exo.shard import Shard

ENGINES = {"mlx": MLXEngine, "cpu": CPUEngine}
FILES = 6
SAMPLING = SamplingParams(temperature=0, logprobs=True)


on_each_engine = pytest.mark.parametrize(
    ("kind", "whole"), [(kind, "llama") for kind in ENGINES], indirect=["whole"]
)


@pytest.fixture(autouse=True)
def blocks_of_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo.models.file_parts.BLOCK", 64)


@pytest.fixture
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    zoo.write_checkpoint(request.param, tmp_path / "one")
    zoo.cut_into_files(tmp_path / "one", tmp_path / "whole", FILES)
    return tmp_path / "whole"


async def answer(engines: list[InferenceEngine], shards: list[Shard]) -> list[SampledToken]:
    """A prompt and three more tokens through a ring."""
    tokens, start, found = [5, 9, 2, 77, 31, 8], 0, []
    for _ in range(4):
        batch = ForwardBatch(
            (Slice("s", start, len(tokens), SAMPLING),), np.array(tokens, np.int32)
        )
        hidden = None
        for engine, shard in zip(engines, shards, strict=True):
            output = await engine.forward(shard, batch, hidden)
            hidden = output.hidden_states
        found += output.tokens
        start, tokens = start + len(tokens), [output.tokens[0].token_id]
    return found


async def ring(kind: str, folders: list[Path], shards: list[Shard]) -> list[SampledToken]:
    engines = [ENGINES[kind]() for _ in shards]
    try:
        for engine, folder, shard in zip(engines, folders, shards, strict=True):
            await engine.load(shard, folder, lambda done, total: None)
        return await answer(engines, shards)
    finally:
        for engine in engines:
            await engine.close()


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        *(
            ("mlx", name)
            for name in ("llama", "gemma2", "qwen3_moe", "gemma3n", "gpt_oss", "mamba", "kimi_k3")
        ),
        *(("cpu", name) for name in ("llama", "gemma2", "qwen3_moe", "plamo2")),
    ],
    indirect=["whole"],
)
async def test_a_shard_computes_the_same_without_the_other_files(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    engine = ENGINES[kind]()
    headers = zoo.only_with(whole, tmp_path / "headers", ())
    description = await engine.describe("m", headers)
    assert description == await engine.describe("m", whole)
    inner = sorted(description.cuts) if description.cuts is not None else [2, 4]
    bounds = [0, *inner, description.n_layers]
    shards = [Shard("m", start, end, description.n_layers) for start, end in pairwise(bounds)]
    folders = []
    for shard in shards:
        needed = await engine.needed_tensors(shard, headers)
        assert needed == await engine.needed_tensors(shard, whole)
        folders.append(zoo.only_with(whole, tmp_path / f"from-{shard.start_layer}", needed))
        reads_embedding = "gemma3n" in description.model_type
        if shard.layer_count <= 2 and not reads_embedding:
            taken = sum(b - a for ranges in parts_with(whole, needed).values() for a, b in ranges)
            assert taken < 0.7 * sum(file.stat().st_size for file in weight_files(whole)), shard
    await engine.close()
    assert await ring(kind, folders, shards) == await ring(kind, [whole] * len(shards), shards)


@pytest.mark.parametrize(
    ("kind", "whole"), [(kind, "llama") for kind in ENGINES], indirect=["whole"]
)
async def test_a_shard_of_which_a_tensor_is_not_here_is_refused_by_its_name(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    engine = ENGINES[kind]()
    shard = Shard("m", 0, 3, zoo.LAYERS)
    needed = sorted(await engine.needed_tensors(shard, whole))
    folder = zoo.only_with(whole, tmp_path / "some", needed[:-1])
    with pytest.raises(EngineFailed, match=needed[-1]):
        await engine.load(shard, folder, lambda done, total: None)
    await engine.close()


@pytest.mark.parametrize(
    ("kind", "whole"),
    [("mlx", "llama"), ("mlx", "kimi_k3"), ("cpu", "llama")],
    indirect=["whole"],
)
async def test_a_larger_shard_is_loaded_beside_one_once_its_files_came(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    engine = ENGINES[kind]()
    first, last = (Shard("m", a, b, zoo.LAYERS) for a, b in ((0, 2), (2, zoo.LAYERS)))
    everything = Shard("m", 0, zoo.LAYERS, zoo.LAYERS)
    for shard, name in ((first, "first"), (last, "more"), (everything, "all")):
        needed = await engine.needed_tensors(shard, whole)
        needed |= await engine.needed_tensors(first, whole)
        folder = zoo.only_with(whole, tmp_path / name, needed)
        await engine.load(shard, folder, lambda done, total: None)
    expected = await ring(kind, [whole], [everything])
    assert await answer([engine], [everything]) == expected
    await engine.release(["s"])
    assert await answer([engine, engine], [first, last]) == expected
    await engine.close()
