"""DeepSeek V4's GGUF files on the cpu engine, against the architecture written out in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from in_numpy import deepseek_v4
from in_numpy.parts import Numbers, Weights, write_gguf
from native_ring import TOKENS, NativeRing, part

from exo.errors import CacheMiss, ModelUnsupported, Overloaded
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu import _native as native
from exo.inference.cpu.engine import CPUEngine
from exo.inference.mlx.engine import MLXEngine
from exo.models.gguf.folder import write_folder
from exo.shard import Shard


@pytest.fixture(scope="module")
def weights() -> Weights:
    return deepseek_v4.random_weights()


@pytest.fixture(scope="module")
def folder(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(weights, tmp_path_factory.mktemp("deepseek"))


def made(weights: Weights, scratch: Path, **extra: Any) -> Path:
    deepseek_v4.write(scratch / "m.gguf", weights, **extra)
    write_folder([scratch / "m.gguf"], scratch / "model")
    return scratch / "model"


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.choose_isa(request.param)
    yield request.param
    native.choose_isa("")


@pytest.mark.parametrize("cuts", [(), (1, 3), (2, 5)])
def test_it_computes_what_the_architecture_does(
    cuts: tuple[int, ...], weights: Weights, folder: Path
) -> None:
    expected = deepseek_v4.logits(weights, TOKENS)
    found = NativeRing(folder, *cuts).whole()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_token_is_the_same_in_pieces_and_in_company(folder: Path, isa: str) -> None:
    NativeRing(folder, 3, precise=False).check_pieces()


def test_all_instruction_sets_give_the_same_bits(folder: Path) -> None:
    found = []
    for name in native.isas():
        native.choose_isa(name)
        found.append(NativeRing(folder, precise=False).whole())
    native.choose_isa("")
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("moment", [128, 131])
def test_it_goes_on_from_a_moment_that_was_kept(folder: Path, moment: int) -> None:
    ring = NativeRing(folder)
    expected = ring.whole()
    ring.step(part("first", 0, moment, keeps=True))
    ring.step(part("first", moment, 100))  # goes on, over pages that the other shares
    ring.take_over("second", "first", moment)
    found = ring.step(part("second", moment, len(TOKENS) - moment))
    assert (found == expected[moment:]).all()
    ring.step(part("first", moment, 1))  # and back to it itself
    assert (ring.step(part("first", moment + 1, 20)) == expected[moment + 1 : moment + 21]).all()
    with pytest.raises(CacheMiss):
        ring.take_over("third", "first", moment - 5)


def test_keys_of_eight_bits_are_near(folder: Path) -> None:
    expected = NativeRing(folder).whole()
    found = NativeRing(folder, precise=False, kv_bits=8).whole()
    far = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
    assert 0 < far < 0.2


def test_files_as_others_make_them(weights: Weights, folder: Path, tmp_path: Path) -> None:
    """antirez's have what mixes states in float16, and speak of a layer that guesses, which is not
    there; in others all that has two axes is packed."""
    expected = NativeRing(folder).whole()
    metadata = deepseek_v4.metadata(deepseek_v4.TINY) | {"nextn_predict_layers": 1}

    def kind(name: str, numbers: Numbers) -> str:
        if numbers.ndim < 2 or numbers.shape[-1] % 32:
            return "F32"
        return "F16" if "token_embd" in name or "ffn_gate_inp" in name else "Q8_0"

    for named, quantize in (("halves", lambda name, numbers: "F16"), ("packed", kind)):
        write_gguf(tmp_path / f"{named}.gguf", "deepseek4", metadata, weights, quantize)
        write_folder([tmp_path / f"{named}.gguf"], tmp_path / named)
        found = NativeRing(tmp_path / named).whole()[:30]
        far = np.abs(found - expected[:30]).max() / np.abs(expected).max()
        assert far < (0.01 if named == "halves" else 0.2)


def test_memory_is_counted_and_given_back(folder: Path) -> None:
    ring = NativeRing(folder)
    (engine, shard), model = ring.parts[0], ring.parts[0][0]._models[ring.parts[0][1]]
    assert model.cache_bytes == 0
    ring.whole()
    room = engine.cache_room(shard)
    # A few pages of each kind may be begun.
    pages = -(-len(TOKENS) // native.PAGE_TOKENS) + room.state_pages
    assert pages <= room.used <= pages + 2
    assert model.cache_bytes >= len(TOKENS) // native.PAGE_TOKENS * model.page_bytes
    engine.release_sequences(["whole"])
    assert model.cache_bytes == 0 and engine.cache_room(shard).used == 0


def test_a_full_cache_says_so_and_the_step_can_be_asked_again(folder: Path) -> None:
    engine, shard = CPUEngine(2), Shard("m", 0, zoo.LAYERS, zoo.LAYERS)
    engine.load_shard(shard, folder, lambda done, total: None)
    spare = engine._models[shard]
    engine.kv_memory = 4 * (spare.state_bytes + 8 * spare.page_bytes)
    engine.unload_shard(shard)
    engine.load_shard(shard, folder, lambda done, total: None)
    tokens = np.array(TOKENS, np.int32)
    sequences = [f"s{i}" for i in range(100)]
    with pytest.raises(Overloaded, match=r"(256|300) tokens of this sequence would need"):
        for sequence in sequences:
            engine.compute(shard, ForwardBatch((Slice(sequence, 0, 300),), tokens), None)
    engine.release_sequences(sequences)
    engine.compute(shard, ForwardBatch((Slice("again", 0, 300),), tokens), None)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"expert_gating_func": 2}, "weighed in way 2"),
        ({"attention.compress_ratios": [0, 0, 8, 128, 4, 128]}, "entries of .* DeepSeek V4 has"),
    ],
)
def test_what_it_does_not_compute_is_refused(
    extra: dict[str, Any], said: str, weights: Weights, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=said):
        made(weights, tmp_path, **extra)


def test_experts_that_are_not_there_are_refused(weights: Weights, tmp_path: Path) -> None:
    name = "blk.1.ffn_gate_tid2eid.weight"
    changed = weights | {name: weights[name] + deepseek_v4.TINY.experts}
    engine, shard = CPUEngine(2), Shard("m", 0, zoo.LAYERS, zoo.LAYERS)
    with pytest.raises(ModelUnsupported, match="tells not 2 of 8 experts"):
        engine.load_shard(shard, made(changed, tmp_path), lambda done, total: None)


def test_mlx_says_which_engine_runs_it(folder: Path) -> None:
    with pytest.raises(ModelUnsupported, match="start exo with --inference-engine cpu"):
        MLXEngine().describe_model("m", folder)
