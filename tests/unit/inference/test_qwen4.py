"""Qwen3.8 Flash Next's GGUF files on the cpu engine, against the architecture in NumPy."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import zoo
from in_numpy import qwen4
from native_ring import TOKENS, NativeRing, part

from exo.errors import CacheMiss, ModelUnsupported
from exo.inference.cpu.engine import CPUEngine
from exo.inference.mlx.engine import MLXEngine
from exo.models.gguf.folder import write_folder
from exo.models.tensor_table import expert_bytes
from exo.shard import Shard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("qwen4")
    qwen4.write(scratch / "m.gguf", qwen4.random_weights())
    write_folder([scratch / "m.gguf"], scratch / "model")
    return scratch / "model"


@pytest.mark.parametrize("cuts", [(), (1, 4), (3,)])
def test_it_computes_what_the_architecture_does(cuts: tuple[int, ...], folder: Path) -> None:
    expected = qwen4.logits(qwen4.random_weights(), TOKENS)
    found = NativeRing(folder, *cuts).whole()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_its_table_may_be_packed(kind: str, tmp_path: Path) -> None:
    weights, of_kind = qwen4.random_weights(), gguf.GGMLQuantizationType[kind]
    qwen4.write(
        tmp_path / "m.gguf", weights, lambda name, _: kind if name == qwen4.TABLE else "F32"
    )
    write_folder([tmp_path / "m.gguf"], tmp_path / "model")
    packed = gguf.quants.quantize(weights[qwen4.TABLE], of_kind)
    weights[qwen4.TABLE] = gguf.quants.dequantize(packed, of_kind)
    expected = qwen4.logits(weights, TOKENS)
    found = NativeRing(tmp_path / "model").whole()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_it_is_read_as_files_on_the_hub_have_it(tmp_path: Path) -> None:
    """Experts' gates over their ups in one tensor, and said to have a layer that guesses, which
    stands in a file of its own."""
    weights = qwen4.random_weights()
    expected = qwen4.logits(weights, TOKENS)
    for layer in range(zoo.LAYERS):
        both = (weights.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        weights[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(list(both), axis=1)
    qwen4.write(tmp_path / "m.gguf", weights, **{"nextn_predict_layers": 1})
    write_folder([tmp_path / "m.gguf"], tmp_path / "model")
    found = NativeRing(tmp_path / "model").whole()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_token_is_the_same_in_pieces_and_in_company(folder: Path) -> None:
    NativeRing(folder, 4, precise=False).check_pieces()


def test_it_is_cut_anywhere_and_its_table_stays_on_disk(folder: Path) -> None:
    """Which the layer alone needs that reads it."""
    engine = CPUEngine(1)
    described = engine.describe_model("m", folder)
    assert described.cuts is None
    assert described.first_bytes == zoo.VOCABULARY * qwen4.TINY.hidden * 4
    for start, end, reads in ((0, 1, False), (1, 2, True), (2, zoo.LAYERS, False)):
        names = engine.tensors_of_shard(Shard("m", start, end, zoo.LAYERS), folder)
        assert any("ngram_embedding" in name or name == qwen4.TABLE for name in names) == reads
    weights = qwen4.random_weights()
    stay = [weights[name].nbytes for name in weights if name == qwen4.TABLE or "_exps." in name]
    assert expert_bytes(folder) == expert_bytes(folder / "model.gguf") == sum(stay)
    seen: list[tuple[int, int]] = []
    whole = Shard("m", 0, zoo.LAYERS, zoo.LAYERS)
    engine.load_shard(whole, folder, lambda done, total: seen.append((done, total)))
    size = sum(numbers.nbytes for numbers in weights.values())
    assert seen[-1][1] == size - sum(qwen4.TINY.rows) * qwen4.TINY.row * 4


@pytest.mark.parametrize("moment", [63, 131])
def test_it_goes_on_from_a_moment_that_was_kept(folder: Path, moment: int) -> None:
    """In the middle of a pool, or at its end."""
    ring = NativeRing(folder)
    expected = ring.whole()
    ring.step(part("first", 0, moment, keeps=True))
    ring.step(part("first", moment, 100))
    ring.take_over("second", "first", moment)
    found = ring.step(part("second", moment, len(TOKENS) - moment))
    assert (found == expected[moment:]).all()
    with pytest.raises(CacheMiss):
        ring.take_over("third", "first", moment - 5)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"ple.layers": [0, 1]}, "n-grams in 2 layers"),
        ({"attention.recurrent_layers": [True] * 6}, "whose layers remember as"),
        ({"attention.compress_ratios": [0, 0, 4, 0, 0, 0]}, r"pools of \[0, 4\] tokens"),
    ],
)
def test_what_it_does_not_compute_is_refused(
    metadata: dict[str, object], says: str, tmp_path: Path
) -> None:
    qwen4.write(tmp_path / "m.gguf", qwen4.random_weights(), **metadata)
    with pytest.raises(ModelUnsupported, match=says):
        write_folder([tmp_path / "m.gguf"], tmp_path / "model")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"ple.head_vocab_sizes": [101, 0, 107, 109]}, r"rows from \(0, 101, 204, 311\) on"),
        ({"ple.head_offsets": [0, 101, 204]}, "4 parts of a table, 3 beginnings"),
        (
            {"ple.head_offsets": [0, 101, 204, 312]},
            "a table of 420 rows of 32 where 4 of up to 421",
        ),
    ],
)
def test_a_table_that_is_not_as_it_says_is_refused(
    metadata: dict[str, object], says: str, tmp_path: Path
) -> None:
    """And no step divides by its parts, or reads beyond it."""
    qwen4.write(tmp_path / "m.gguf", qwen4.random_weights(), **metadata)
    write_folder([tmp_path / "m.gguf"], tmp_path / "model")
    with pytest.raises(ModelUnsupported, match=says):
        CPUEngine(1).describe_model("m", tmp_path / "model")


def test_mlx_says_which_engine_runs_it(folder: Path) -> None:
    with pytest.raises(ModelUnsupported, match="start exo with --inference-engine cpu"):
        MLXEngine().describe_model("m", folder)
