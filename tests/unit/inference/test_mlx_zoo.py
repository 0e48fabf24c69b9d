"""Every architecture of the installed mlx-lm computes split what it computes whole."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import zoo
from mlx import nn
from no_card import NoCard

from exo.errors import ModelUnsupported
from exo.inference.mlx import caches as kv
from exo.inference.mlx import cuda_linear, packed_products
from exo.inference.mlx.cut_model import CutModel

# Needs Metal or CUDA for a kernel of its own, or a checkpoint of a kind no test can make up.
NOT_HERE = {"bitnet", "muse_spark", "prism_hadamard_qwen35"}


# Unsplit, in mlx-lm alone, it writes outside its memory on a CPU and aborts the process.
CRASHES = {"phi3small"}

CUT_AT: dict[str, frozenset[int]] = {
    "afm7": frozenset({1, 2, 3}),
    "deepseek_v41": frozenset(),
    "gemma3n": frozenset({1, 2}),
    "gemma4": frozenset({1, 2}),
    "gemma4_text": frozenset({1, 2}),
    "gemma4_unified": frozenset({1, 2}),
    "iquestloopcoder": frozenset(),
    "nanbeige": frozenset(),
}
"""Where later layers read more of earlier ones than what is sent; all others are cut anywhere."""


@pytest.mark.parametrize("model_type", sorted(set(zoo.architectures()) - CRASHES))
def test_split_equals_unsplit(model_type: str, tmp_path: Path) -> None:
    try:
        description, errors = zoo.split_errors(model_type, tmp_path / "model")
    except (ModelUnsupported, ValueError) as error:
        assert model_type in NOT_HERE, error
        pytest.skip(str(error))
    assert model_type not in NOT_HERE
    assert max(errors.values()) < 1e-4, errors
    assert description.cuts == CUT_AT.get(model_type)
    if description.cuts is None:
        assert len(errors) > 1
    else:
        assert description.uncuttable


# Their classes multiply with the packed words of a quantized embedding as if these were weights.
NEVER_QUANTIZED = {"llama4_text", "seed_oss"}


@pytest.mark.parametrize(
    "model_type", sorted(set(zoo.architectures()) - CRASHES - NOT_HERE - NEVER_QUANTIZED)
)
def test_products_as_on_a_card_change_nothing(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is given the same rows as others: prompts whose matrices are unpacked, a few at a
    time, and steps after them come to what they do in mlx-lm's classes."""
    card = NoCard()
    card.replace(monkeypatch)
    monkeypatch.setattr(packed_products, "fits", lambda module: True)  # of float32, too
    monkeypatch.setattr(cuda_linear, "IN_FLIGHT_BYTES", 20_000)
    zoo.write_checkpoint(model_type, tmp_path)
    model = CutModel(tmp_path, mx.float32)
    nn.quantize(model.model, 32, 4, class_predicate=is_packable)
    before = outputs_of(model)
    modules = [module for layer in model.layers for module in layer.modules()]
    cuda_linear.multiply_fast(modules + model.outer_modules(), lambda: outputs_of(model, (1,)))
    card.multiplied.clear()
    for found, expected in zip(outputs_of(model), before, strict=True):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert card.multiplied


def is_packable(name: str, module: nn.Module) -> bool:
    """What mlx-lm quantizes; Kimi K3's class reads these weights as numbers."""
    if name.endswith("res_proj"):
        return False
    return type(module) in (nn.Linear, nn.Embedding) and module.weight.shape[-1] % 32 == 0


def outputs_of(
    model: CutModel, lengths: tuple[int, ...] = (40, 1, 3, 1)
) -> list[npt.NDArray[np.float32]]:
    caches, found = model.new_caches(), []
    for tokens in lengths:
        ids = mx.arange(3, 3 + tokens, dtype=mx.int32)
        logits = model.forward(0, model.n_layers, ids, None, caches, logits=tokens)
        mx.eval(logits, kv.arrays(caches))
        found.append(np.array(logits))
    return found


def test_a_quantized_checkpoint_split_equals_unsplit(tmp_path: Path) -> None:
    zoo.write_checkpoint("qwen3", tmp_path / "float")
    zoo.quantize_checkpoint(tmp_path / "float", tmp_path / "q4")
    description, errors = zoo.compare_splits(tmp_path / "q4")
    assert description.cuts is None
    assert max(errors.values()) < 1e-4, errors
