"""The default model on the cpu engine: how far from float32 MLX on 500 tokens of English (2,000
in docs/benchmarks.md), and the same answers through rings of cpu nodes and of cpu and MLX nodes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import aiohttp
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from cluster import cluster
from tokenizers import Tokenizer

from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.engine import InferenceEngine
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.networking.rings.hidden_states import Wire, decode, encode
from exo.shard import Shard

MODEL = "smollm2-135m"
TEXT = Path(__file__).parent / "plain_english.txt"
TOKENS, PIECE = 500, 250
"""The text is taken in pieces, each from an empty cache: MLX's attention on a CPU is slow."""

LAYERS = 30
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="session")
def pieces(checkpoint: Path) -> npt.NDArray[np.int32]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(TEXT.read_text()).ids[:TOKENS]
    assert len(ids) == TOKENS
    return np.array(ids, np.int32).reshape(-1, PIECE)


@pytest.fixture(scope="session")
def expected(
    checkpoint: Path, pieces: npt.NDArray[np.int32], tmp_path_factory: pytest.TempPathFactory
) -> npt.NDArray[np.float32]:
    """float32 MLX: log probabilities [tokens, vocabulary], by mlx-lm's own classes."""
    return once("float32_mlx", tmp_path_factory, lambda: computed_by_mlx(checkpoint, pieces))


@pytest.fixture(scope="session")
def own(
    checkpoint: Path, pieces: npt.NDArray[np.int32], tmp_path_factory: pytest.TempPathFactory
) -> npt.NDArray[np.float32]:
    """The same of the cpu engine, as it is used; a ring of it has the same bits."""

    def run() -> npt.NDArray[np.float32]:
        return asyncio.run(every_position([CPUEngine()], [], checkpoint, pieces))

    with ThreadPoolExecutor(1) as another:  # in this thread a loop may run
        return once("cpu", tmp_path_factory, lambda: another.submit(run).result())


def once(
    name: str,
    tmp_path_factory: pytest.TempPathFactory,
    compute: Callable[[], npt.NDArray[np.float32]],
) -> npt.NDArray[np.float32]:
    """What is computed by one of pytest's workers for all."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    file = folder / f"{name}.npy"
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            np.save(file, compute())
    return np.load(file, mmap_mode="r")


def computed_by_mlx(checkpoint: Path, pieces: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    engine = MLXEngine(precise=True)
    engine.load_shard(Shard(MODEL, 0, LAYERS, LAYERS), checkpoint, lambda done, total: None)
    cut = engine._loaded[MODEL].model
    cut._cut.passive = True
    rows = [np.array(cut.model(mx.array(piece)[None])[0]) for piece in pieces]
    return log_softmax(np.concatenate(rows))


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


async def every_position(
    engines: list[InferenceEngine],
    cuts: list[int],
    path: Path,
    pieces: npt.NDArray[np.int32],
    wire: Wire = Wire.EXACT,
    at_once: int = PIECE,
) -> npt.NDArray[np.float32]:
    """Log probabilities after every token. The last engine, which is a cpu engine, is given
    `at_once` tokens a step and asked for the logits of each, as with guesses; the others a piece.
    """
    bounds = [0, *cuts, LAYERS]
    shards = [Shard(MODEL, bounds[i], bounds[i + 1], LAYERS) for i in range(len(engines))]
    for engine, shard in zip(engines, shards, strict=True):
        await engine.load(shard, path, lambda done, total: None)
    found = []
    for number, piece in enumerate(pieces):
        whole = ForwardBatch((Slice(f"s{number}", 0, PIECE, None),), piece)
        rows = None
        for engine, shard in zip(engines[:-1], shards[:-1], strict=True):
            rows = await engine._thread.submit(partial(engine.compute, shard, whole, rows))
            name, data = encode(np.asarray(rows), wire)
            rows = decode(name, *rows.shape, data)
        for i in range(0, PIECE, at_once):
            part = Slice(f"s{number}", i, at_once, GREEDY, drafts=at_once - 1)
            some = ForwardBatch((part,), piece[i : i + at_once])
            hidden = None if rows is None else rows[i : i + at_once]
            compute = partial(engines[-1].compute, shards[-1], some, hidden)
            found.append(await engines[-1]._thread.submit(compute))
    for engine in engines:
        await engine.close()
    return log_softmax(np.concatenate(found))


def divergence(
    found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
) -> tuple[float, float]:
    """Mean Kullback-Leibler divergence from `expected`, and the share of equal top tokens."""
    kl = (np.exp(expected) * (expected - found)).sum(-1)
    return float(kl.mean()), float((found.argmax(-1) == expected.argmax(-1)).mean())


async def test_it_stays_near_float32_mlx(
    checkpoint: Path,
    pieces: npt.NDArray[np.int32],
    expected: npt.NDArray[np.float32],
    own: npt.NDArray[np.float32],
) -> None:
    kl, same = divergence(own, expected)
    assert kl < 0.004 and same >= 0.96, (kl, same)
    one_by_one = await every_position([CPUEngine()], [], checkpoint, pieces[:1], at_once=1)
    assert np.array_equal(one_by_one, own[:PIECE])


async def test_with_float_activations_it_is_float32_mlx(
    checkpoint: Path, pieces: npt.NDArray[np.int32], expected: npt.NDArray[np.float32]
) -> None:
    found = await every_position([CPUEngine(precise=True)], [], checkpoint, pieces)
    kl, same = divergence(found, expected)
    assert kl < 1e-5 and same >= 0.998, (kl, same)


async def test_half_on_mlx_and_half_on_cpu_stays_as_near(
    checkpoint: Path, pieces: npt.NDArray[np.int32], expected: npt.NDArray[np.float32]
) -> None:
    engines = [MLXEngine(precise=True), CPUEngine()]
    found = await every_position(engines, [15], checkpoint, pieces)
    kl, same = divergence(found, expected)
    assert kl < 0.004 and same >= 0.96, (kl, same)


@pytest.mark.parametrize("wire", [Wire.BFLOAT16, Wire.INT8])
async def test_fewer_bytes_on_the_wire_change_answers_little(
    wire: Wire, checkpoint: Path, pieces: npt.NDArray[np.int32], own: npt.NDArray[np.float32]
) -> None:
    """Against exact hidden states; docs/benchmarks.md has all of them."""
    engines: list[InferenceEngine] = [CPUEngine(), CPUEngine()]
    found = await every_position(engines, [15], checkpoint, pieces, wire)
    kl, same = divergence(found, own)
    assert 0 < kl < 0.002 and same >= 0.95, (kl, same)


async def test_a_cache_of_eight_bits_changes_answers_little(
    checkpoint: Path, pieces: npt.NDArray[np.int32], own: npt.NDArray[np.float32]
) -> None:
    """Against the cache of 16 bits; docs/benchmarks.md has what it is for 2,000 tokens."""
    engine = CPUEngine()
    engine.kv_bits = 8
    kl, same = divergence(await every_position([engine], [], checkpoint, pieces), own)
    assert 0 < kl < 0.002 and same >= 0.95, (kl, same)


QUESTION = "Name three primary colours."


async def test_rings_of_cpu_nodes_give_one_nodes_answer(
    checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    texts = []
    for nodes in (1, 2, 3):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        async with cluster(folder, exo_home) as c:
            for i in range(nodes):
                memory = ("--memory", f"{2 * (nodes - i)}GB", "--threads", "1")
                c.add(f"n{i}", *memory, engine="cpu", DEBUG="1")
            await c.together()
            texts.append(await c.nodes["n0"].chat(QUESTION, MODEL, max_tokens=40))
            assert len(await c.nodes["n0"].ring(MODEL)) == nodes
    assert texts[0] == texts[1] == texts[2]
    assert "Red" in texts[0]


async def test_hidden_states_travel_as_either_end_wants(
    checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        c.add("n0", "--memory", "4GB", "--no-speculation", engine="cpu")
        c.add("n1", "--memory", "3GB", "--wire", "int8", engine="cpu")
        await c.together()
        text = await c.nodes["n0"].chat(QUESTION, MODEL, max_tokens=40)
        assert "Red" in text
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{c.nodes['n0'].url}/metrics") as got:
                series = re.compile(r"^exo_ring_sent_bytes_total\{.*\} (\S+)$", re.MULTILINE)
                told = series.search(await got.text())
    # 576 values a token: 2304 bytes as float32, 657 as int8; the prompt has about 40 tokens.
    assert told and 80 * 657 * 0.5 < float(told[1]) < 80 * 2304 * 0.5, told


@pytest.mark.parametrize("first", ["cpu", "mlx"])
async def test_a_cpu_and_an_mlx_node_share_a_ring(
    first: str, checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        c.add("n0", "--memory", "4GB", engine=first, DEBUG="1")
        c.add("n1", "--memory", "3GB", engine="mlx" if first == "cpu" else "cpu", DEBUG="1")
        await c.together()
        text = await c.nodes["n1"].chat("What is 2+2?", MODEL, max_tokens=16)
        assert len(await c.nodes["n0"].ring(MODEL)) == 2
        assert "4" in text
