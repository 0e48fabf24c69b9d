"""GLM 5.3's GGUF files on the cpu engine, against the architecture written out in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from in_numpy import glm5
from native_ring import TOKENS, NativeRing, part

from exo.errors import CacheMiss, ModelUnsupported
from exo.inference.cpu.engine import CPUEngine
from exo.inference.mlx.engine import MLXEngine
from exo.models.gguf.folder import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("glm5")
    glm5.write(scratch / "m.gguf", glm5.random_weights())
    write_folder([scratch / "m.gguf"], scratch / "model")
    return scratch / "model"


@pytest.mark.parametrize("cuts", [(), (1, 4), (3,)])
def test_it_computes_what_the_architecture_does(cuts: tuple[int, ...], folder: Path) -> None:
    expected = glm5.logits(glm5.random_weights(), TOKENS)
    found = NativeRing(folder, *cuts).whole()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_token_is_the_same_in_pieces_and_in_company(folder: Path) -> None:
    NativeRing(folder, 4, precise=False).check_pieces()


def test_it_is_cut_before_layers_that_choose(folder: Path) -> None:
    """Or remember, and the next that attends chooses."""
    assert CPUEngine(1).describe_model("m", folder).cuts == {1, 3, 4}


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


def test_what_it_does_not_compute_is_refused(tmp_path: Path) -> None:
    unselected = {"attention.indexer.kpool_select_tail": False}
    glm5.write(tmp_path / "m.gguf", glm5.random_weights(), **unselected)
    with pytest.raises(ModelUnsupported, match="leaves out tokens after the last whole pool"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "model")


def test_mlx_says_which_engine_runs_it(folder: Path) -> None:
    with pytest.raises(ModelUnsupported, match="start exo with --inference-engine cpu"):
        MLXEngine().describe_model("m", folder)
