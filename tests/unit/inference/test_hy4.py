"""Hy4's GGUF files on the cpu engine, against the architecture written out in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from in_numpy import hy4
from native_ring import TOKENS, NativeRing

from exo.errors import ModelUnsupported
from exo.inference.cpu.engine import CPUEngine
from exo.inference.mlx.engine import MLXEngine
from exo.models.gguf.folder import write_folder

INDEXER = ("head_count", "key_length", "top_k", "types")


@pytest.fixture(scope="module", params=["an indexer", "no indexer"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("hy4")
    indexed = request.param == "an indexer"
    unsaid = {} if indexed else {f"attention.indexer.{key}": None for key in INDEXER}
    hy4.write(scratch / "m.gguf", hy4.random_weights(indexed), **unsaid)
    write_folder([scratch / "m.gguf"], scratch / "model")
    return scratch / "model"


def test_it_computes_what_the_architecture_does(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    indexed = "no indexer" not in request.node.name
    expected = hy4.logits(hy4.random_weights(indexed), TOKENS[:120])
    for cuts in ((), (1, 4)):
        found = NativeRing(folder, *cuts).whole()[:120]
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_token_is_the_same_in_pieces_and_in_company(folder: Path) -> None:
    NativeRing(folder, 4, precise=False).check_pieces()


def test_it_is_cut_before_layers_that_choose(folder: Path, request: pytest.FixtureRequest) -> None:
    cuts = CPUEngine(1).describe_model("m", folder).cuts
    assert cuts == (None if "no indexer" in request.node.name else {1, 4})


def test_experts_that_softmax_weighs_are_refused(tmp_path: Path) -> None:
    hy4.write(tmp_path / "m.gguf", hy4.random_weights(), expert_gating_func=1)
    with pytest.raises(ModelUnsupported, match="softmax"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "model")


def test_mlx_says_which_engine_runs_it(folder: Path) -> None:
    with pytest.raises(ModelUnsupported, match="start exo with --inference-engine cpu"):
        MLXEngine().describe_model("m", folder)
