"""What is done for MLX's CUDA backend, as far as it can be seen without a card."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

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


SHAPES = [
    (128,),
    (1, 128),
    (1, 1, 128),
    (2, 1, 128),
    (1, 5, 128),
    (7, 128),
    (9, 1, 128),
    (3, 4, 128),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [256, 192])
def test_rows_are_multiplied_together(
    shape: tuple[int, ...], bias: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = half(nn.QuantizedLinear(128, outputs, bias=bias, group_size=32, bits=4))
    x = mx.random.normal(shape, key=mx.random.key(0)).astype(mx.float16)
    alone = np.array(linear(x))
    cuda.multiply_rows_together(linear)
    seen: list[tuple[int, ...]] = []
    multiply = mx.quantized_matmul

    def watched(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen.append(x.shape)
        return multiply(x, *args, **kwargs)

    monkeypatch.setattr(mx, "quantized_matmul", watched)
    np.testing.assert_array_equal(np.array(linear(x)), alone)
    rows = x.size // 128
    # 192 outputs are no multiple of 128, for which alone there is a kernel of 8 rows.
    together = max(rows, 8) if rows > 1 and outputs == 256 else rows
    assert seen[0][-2:-1] == ((together,) if len(shape) > 1 else ())


def test_an_embedding_as_head_does_so_too() -> None:
    embedding = half(nn.QuantizedEmbedding(256, 64, group_size=64, bits=8))
    x = mx.random.normal((3, 1, 64), key=mx.random.key(0)).astype(mx.float16)
    alone, looked_up = np.array(embedding.as_linear(x)), np.array(embedding(mx.array([[7]])))
    cuda.multiply_rows_together(embedding)
    assert type(embedding) is not nn.QuantizedEmbedding
    np.testing.assert_array_equal(np.array(embedding.as_linear(x)), alone)
    np.testing.assert_array_equal(np.array(embedding(mx.array([[7]]))), looked_up)


@pytest.mark.parametrize(
    ("module", "has"),
    [
        (half(nn.QuantizedLinear(128, 256, group_size=32, bits=4)), True),
        (half(nn.QuantizedLinear(128, 256, group_size=128, bits=8)), True),
        (half(nn.QuantizedLinear(128, 192, group_size=32, bits=4)), False),
        (half(nn.QuantizedLinear(96, 128, group_size=32, bits=4)), False),
        (half(nn.QuantizedLinear(128, 128, group_size=32, bits=5)), False),
        (nn.QuantizedLinear(128, 128, group_size=32, bits=4), False),  # float32
    ],
)
def test_for_which_there_is_a_kernel_of_many_rows(module: nn.Module, has: bool) -> None:
    assert cuda._has_fast_kernel(module) is has


def test_other_layers_stay() -> None:
    linear = nn.Linear(8, 8)
    cuda.multiply_rows_together(linear)
    assert type(linear) is nn.Linear


def test_who_waits_for_kernels_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others of another format may be kept already: only time tells whether any are compiled."""
    asked: list[int] = []
    with caplog.at_level(logging.WARNING):
        cuda.compile_kernels(asked.append)
        assert asked == list(cuda.COMPILED_ROWS)
        assert not caplog.text
        monkeypatch.setattr(cuda, "TELL_AFTER_S", 0.0)
        told = threading.Event()
        monkeypatch.setattr(cuda.logger, "warning", lambda text: told.set())
        cuda.compile_kernels(lambda rows: asked.append(told.wait(30)))
    assert asked[len(cuda.COMPILED_ROWS) :] == [True] * len(cuda.COMPILED_ROWS)


def test_kernels_are_kept_by_version_and_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")  # as it was, afterwards
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    cuda.keep_kernels(tmp_path)
    assert Path(os.environ["MLX_PTX_CACHE_DIR"]).parent == tmp_path


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
