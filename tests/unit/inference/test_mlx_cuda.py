"""What is done for MLX's CUDA backend, as far as it can be seen without a card."""

import logging
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import quantized_files
import zoo
from mlx import nn

from exo.inference.mlx import cuda
from exo.inference.mlx.cut_model import CutModel


def half(module: nn.Module) -> nn.Module:
    """As checkpoints have it."""
    module.scales = module.scales.astype(mx.float16)
    module.biases = module.biases.astype(mx.float16)
    return module


@pytest.mark.parametrize("shape", [(1, 128), (2, 1, 128), (1, 5, 128), (7, 128), (9, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_filled_up_where_the_kernel_of_eight_is_faster(
    shape: tuple[int, ...], bias: bool
) -> None:
    linear = half(nn.QuantizedLinear(128, 256, bias=bias, group_size=32, bits=4))
    x = mx.random.normal(shape, key=mx.random.key(0)).astype(mx.float16)
    alone = np.array(linear(x))
    cuda.multiply_few_rows_together(linear)
    assert type(linear) is not nn.QuantizedLinear
    np.testing.assert_array_equal(np.array(linear(x)), alone)


def test_an_embedding_as_head_is_filled_up_too() -> None:
    embedding = half(nn.QuantizedEmbedding(256, 64, group_size=64, bits=8))
    x = mx.random.normal((3, 1, 64), key=mx.random.key(0)).astype(mx.float16)
    alone, looked_up = np.array(embedding.as_linear(x)), np.array(embedding(mx.array([[7]])))
    cuda.multiply_few_rows_together(embedding)
    np.testing.assert_array_equal(np.array(embedding.as_linear(x)), alone)
    np.testing.assert_array_equal(np.array(embedding(mx.array([[7]]))), looked_up)


@pytest.mark.parametrize(
    "module",
    [
        half(nn.QuantizedLinear(128, 192, group_size=32, bits=4)),  # no multiple of 128 rows
        half(nn.QuantizedLinear(96, 128, group_size=32, bits=4)),  # none of 64 columns
        half(nn.QuantizedLinear(128, 128, group_size=32, bits=5)),
        nn.QuantizedLinear(128, 128, group_size=32, bits=4),  # float32
        nn.Linear(128, 128),
    ],
)
def test_what_has_no_such_kernel_stays(module: nn.Module) -> None:
    before = type(module)
    cuda.multiply_few_rows_together(module)
    assert type(module) is before


def test_who_waits_for_kernels_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    asked: list[int] = []
    try:
        cuda.keep_kernels(tmp_path)
        kept = Path(os.environ["MLX_PTX_CACHE_DIR"])
        assert kept.parent == tmp_path
        with caplog.at_level(logging.WARNING):
            cuda.compile_kernels(asked.append)
        assert "compiling kernels for this GPU" in caplog.text
        assert asked == list(cuda.COMPILED_ROWS)
        caplog.clear()
        kept.mkdir()
        (kept / "qmm_sm80_tn_float16_m16_b4_g64_affine.ptx").touch()
        with caplog.at_level(logging.WARNING):
            cuda.compile_kernels(asked.append)
        assert not caplog.text
    finally:
        os.environ.pop("MLX_PTX_CACHE_DIR", None)


def test_kernels_stay_where_the_user_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/mine")
    cuda.keep_kernels(tmp_path)
    assert os.environ["MLX_PTX_CACHE_DIR"] == "/mine"


@pytest.mark.parametrize("kind", ["GPTQ", "AWQ"])
def test_matrices_of_other_tools_lie_row_by_row(kind: str, tmp_path: Path) -> None:
    """CUDA's kernels refuse views, which Metal's and the CPU's take."""
    zoo.write_checkpoint("qwen3", tmp_path / "plain")
    quantized_files.write(kind, tmp_path / "plain", tmp_path / "packed", tmp_path / "numbers")
    model = CutModel(tmp_path / "packed", mx.float16)
    linear = model.layers[0].self_attn.q_proj
    mx.eval(linear.parameters())
    assert isinstance(linear, nn.QuantizedLinear)
    for part in ("weight", "scales", "biases"):
        assert np.asarray(linear[part]).flags.c_contiguous, part
