"""What is done for MLX's CUDA backend, as far as it can be seen without a card."""

import logging
import os
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import quantized_files
import zoo
from mlx import nn
from no_card import NoCard

from exo.inference.mlx import cuda, cuda_linear, packed_products
from exo.inference.mlx.cut_model import CutModel
from exo.inference.mlx.packed_products import Matrices


def half(module: nn.Module) -> nn.Module:
    """As checkpoints have it."""
    module.scales = module.scales.astype(mx.float16)
    module.biases = module.biases.astype(mx.float16)
    if "bias" in module:
        module.bias = module.bias.astype(mx.float16)
    return module


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> NoCard:
    card = NoCard()
    card.replace(monkeypatch)
    return card


def rows_of(shape: tuple[int, ...], key: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(key)).astype(mx.float16)


SHAPES = [
    (128,),
    (1, 128),
    (1, 1, 128),
    (2, 1, 128),
    (1, 5, 128),
    (7, 128),
    (9, 1, 128),
    (3, 4, 128),
    (1, 32, 128),
    (33, 128),
    (2, 20, 128),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_rows_are_multiplied_together(
    shape: tuple[int, ...], bias: bool, bits: int, card: NoCard
) -> None:
    linear = half(nn.QuantizedLinear(128, 192, bias=bias, group_size=32, bits=bits))
    x = rows_of(shape)
    alone = np.array(linear(x))
    cuda_linear.multiply_fast([linear], lambda: linear(rows_of((1, 128))))
    card.multiplied.clear()
    card.unpacked = 0
    found = linear(x)
    assert found.shape == alone.shape
    np.testing.assert_allclose(np.array(found), alone, rtol=0.02, atol=0.02)
    rows = x.size // 128
    few = rows <= packed_products.MOST_ROWS
    assert card.multiplied == ([(shape, 1)] if few and bits != 6 else [])
    assert card.unpacked == (not few and bits != 6)


def test_what_is_given_the_same_rows_is_multiplied_at_once(card: NoCard) -> None:
    """As queries, keys and values are made of the same rows, whatever they are called."""
    named = {
        "query": nn.QuantizedLinear(128, 64, bias=True, group_size=32, bits=4),
        "key": nn.QuantizedLinear(128, 32, bias=False, group_size=32, bits=4),
        "value": nn.QuantizedLinear(128, 32, bias=False, group_size=32, bits=4),
        "gate": nn.QuantizedLinear(128, 32, bias=False, group_size=32, bits=4),
        "wide": nn.QuantizedLinear(128, 32, bias=False, group_size=32, bits=8),
        "out": nn.QuantizedLinear(64, 128, bias=False, group_size=32, bits=4),
        "twice": nn.QuantizedLinear(128, 32, bias=False, group_size=32, bits=4),
    }
    layers = {name: half(layer) for name, layer in named.items()}

    def run(x: mx.array) -> list[mx.array]:
        same = [layers[name](x) for name in ("query", "key", "value", "gate", "wide", "twice")]
        return [*same, layers["out"](same[0]), layers["twice"](x)]

    want = [np.array(one) for one in run(rows_of((1, 128)))]
    cuda_linear.multiply_fast(layers.values(), lambda: run(rows_of((1, 128))))
    for _ in range(2):
        card.multiplied.clear()
        found = run(rows_of((1, 128)))
        together = [count for _, count in card.multiplied]
        # Three at most; other bits are another kernel, and "twice" would wait for itself.
        assert together == [3, 1, 1, 1, 1, 1]
        for one, other in zip(found, want, strict=True):
            np.testing.assert_allclose(np.array(one), other, rtol=0.02, atol=0.02)


def test_rows_that_only_one_of_them_is_given(card: NoCard) -> None:
    """A model may skip one, now or always: what was computed for it is not taken for another's."""
    one, other = (half(nn.QuantizedLinear(64, 32, group_size=32, bits=8)) for _ in range(2))
    first, second = rows_of((1, 64)), rows_of((1, 64), 1)
    want = [np.array(layer(x)) for x in (first, second) for layer in (one, other)]
    cuda_linear.multiply_fast([one, other], lambda: (one(first), other(first)))
    found = [np.array(y) for y in (one(first), one(second), other(second), other(first))]
    for y, w in zip(found, (want[0], want[2], want[3], want[1]), strict=True):
        np.testing.assert_allclose(y, w, rtol=0.02, atol=0.02)
    again = one(first), one(first)
    np.testing.assert_array_equal(np.array(again[0]), np.array(again[1]))


def test_an_embedding_as_head_does_so_too(card: NoCard) -> None:
    embedding = half(nn.QuantizedEmbedding(256, 64, group_size=64, bits=8))
    x = rows_of((3, 1, 64))
    alone, looked_up = np.array(embedding.as_linear(x)), np.array(embedding(mx.array([[7]])))
    cuda_linear.multiply_fast([embedding], lambda: embedding.as_linear(x))
    card.multiplied.clear()
    np.testing.assert_allclose(np.array(embedding.as_linear(x)), alone, rtol=0.02, atol=0.02)
    assert card.multiplied == [((3, 1, 64), 1)]
    np.testing.assert_array_equal(np.array(embedding(mx.array([[7]]))), looked_up)


@pytest.mark.parametrize(
    ("module", "fits"),
    [
        (half(nn.QuantizedLinear(128, 256, group_size=32, bits=4)), True),
        (half(nn.QuantizedLinear(128, 256, group_size=128, bits=8)), True),
        (half(nn.QuantizedLinear(96, 100, group_size=32, bits=4)), True),
        (half(nn.QuantizedLinear(128, 128, group_size=32, bits=5)), False),
        (nn.QuantizedLinear(128, 128, group_size=32, bits=4), False),  # float32
        (nn.QuantizedLinear(128, 128, group_size=32, bits=4, mode="mxfp4"), False),
    ],
)
def test_for_which_there_are_kernels(module: nn.Module, fits: bool) -> None:
    assert packed_products.fits(module) is fits


def test_other_formats_are_unpacked_for_many_rows(card: NoCard) -> None:
    linear = nn.QuantizedLinear(64, 32, bias=False, group_size=32, bits=4, mode="mxfp4")
    few, many = rows_of((7, 64)), rows_of((8, 64))
    want = [np.array(linear(x)) for x in (few, many)]
    cuda_linear.multiply_fast([linear], lambda: linear(few))
    for x, one in zip((few, many), want, strict=True):
        np.testing.assert_allclose(np.array(linear(x)), one, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("fails", ["raises", "is wrong"])
def test_kernels_that_fail_are_not_used(
    fails: str, card: NoCard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Older cards have not the instructions; and nobody has seen all kinds of cards."""

    def failing(matrices: Matrices, x: mx.array, rows: int) -> list[mx.array]:
        if fails == "raises":
            raise RuntimeError("Failed to compile kernel: mma.sync needs sm_80")
        return [1.1 * one for one in card.multiply(matrices, x, rows)]

    monkeypatch.setattr(Matrices, "multiply", failing)
    linear = half(nn.QuantizedLinear(64, 32, group_size=32, bits=8))
    x = rows_of((3, 64))
    want = np.array(linear(x))
    cuda_linear.multiply_fast([linear], lambda: linear(x))
    assert ("sm_80" if fails == "raises" else "something else") in caplog.text
    np.testing.assert_array_equal(np.array(linear(x)), want)


def test_not_many_unpacked_matrices_are_there_at_once(
    card: NoCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [half(nn.QuantizedLinear(64, 64, group_size=32, bits=4)) for _ in range(16)]
    x = rows_of((40, 64))
    cuda_linear.multiply_fast(layers, lambda: None)
    dense_bytes = 2 * 64 * 64
    monkeypatch.setattr(cuda_linear, "IN_FLIGHT_BYTES", 4 * dense_bytes)
    begun, begun_at = 0, 0
    most = 0

    def unpack(module: nn.Module) -> mx.array:
        nonlocal begun
        begun += 1
        return card.unpack(module)

    def waited(array: mx.array) -> None:
        nonlocal most, begun_at
        most, begun_at = max(most, begun - begun_at), begun
        evaluate(array)

    evaluate = mx.eval
    monkeypatch.setattr(packed_products, "unpack", unpack)
    monkeypatch.setattr(mx, "eval", waited)
    for layer in layers:
        x = layer(x)
    assert begun == 16
    assert 0 < most <= 4


def test_other_layers_stay() -> None:
    linear = nn.Linear(8, 8)
    cuda_linear.multiply_fast([linear], lambda: None)
    assert type(linear) is nn.Linear


def test_who_waits_for_kernels_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), cuda.who_waits_is_told():
        pass
    assert not caplog.text
    monkeypatch.setattr(cuda, "TELL_AFTER_S", 0.0)
    told = threading.Event()
    monkeypatch.setattr(cuda.logger, "warning", lambda text: told.set())
    with cuda.who_waits_is_told():
        assert told.wait(30)


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
