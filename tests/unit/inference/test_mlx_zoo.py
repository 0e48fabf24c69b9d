"""Every architecture of the installed mlx-lm computes split what it computes whole."""

from pathlib import Path

import pytest
import zoo

from exo.errors import ModelUnsupported

# Needs Metal or CUDA for a kernel of its own, or a checkpoint of a kind no test can make up.
NOT_HERE = {"bitnet", "muse_spark", "prism_hadamard_qwen35"}


# Unsplit, in mlx-lm alone, it writes outside its memory on a CPU and aborts the process.
CRASHES = {"phi3small"}


@pytest.mark.parametrize("model_type", sorted(set(zoo.architectures()) - CRASHES))
def test_split_equals_unsplit(model_type: str, tmp_path: Path) -> None:
    try:
        description, errors = zoo.split_errors(model_type, tmp_path / "model")
    except (ModelUnsupported, ValueError) as error:
        assert model_type in NOT_HERE, error
        pytest.skip(str(error))
    assert model_type not in NOT_HERE
    assert max(errors.values()) < 1e-4, errors
    if description.cuts is None:
        assert len(errors) > 1
    else:
        assert description.uncuttable


def test_a_quantized_checkpoint_split_equals_unsplit(tmp_path: Path) -> None:
    zoo.write_checkpoint("qwen3", tmp_path / "float")
    zoo.quantize_checkpoint(tmp_path / "float", tmp_path / "q4")
    description, errors = zoo.compare_splits(tmp_path / "q4")
    assert description.cuts is None
    assert max(errors.values()) < 1e-4, errors
