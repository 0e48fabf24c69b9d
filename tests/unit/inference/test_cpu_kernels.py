"""The kernels of every instruction set this processor has, against NumPy and against themselves."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo.inference.cpu import _native as native

DTYPES = {
    mx.float16: native.DType.F16,
    mx.bfloat16: native.DType.BF16,
    mx.float32: native.DType.F32,
}


@pytest.fixture(params=native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.choose_isa(request.param)
    native.set_threads(2)
    yield request.param
    native.choose_isa("")


def raw(array: mx.array) -> npt.NDArray[np.uint8]:
    return np.array(array.view(mx.uint8)).reshape(-1)


def affine(
    rows: int, cols: int, bits: int, group: int, dtype: mx.Dtype = mx.float16
) -> tuple[native.Matrix, npt.NDArray[np.float32]]:
    """A random matrix as MLX quantizes it: packed, and as float32 [rows, cols]."""
    mx.random.seed(rows + bits)
    weight = mx.random.normal((rows, cols)).astype(dtype)
    q, scales, biases = mx.quantize(weight, group, bits)
    packed = native.pack_affine(
        raw(q), raw(scales), raw(biases), DTYPES[dtype], rows, cols, bits, group
    )
    wide = scales.astype(mx.float32), biases.astype(mx.float32)
    return packed, np.array(mx.dequantize(q, *wide, group, bits))


def activations(rows: int, cols: int) -> npt.NDArray[np.float32]:
    """Normal, with some that dwarf their group in all rows and others in a few, as channels and
    tokens of real models do; a row of zeros, and tiny ones."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x[:, 5] *= 80
    x[rng.random(x.shape) < 0.003] *= 60
    x[0, 40] = -1000
    if rows > 2:
        x[1] = 0
        x[2] *= 1e-6
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_loses_nothing(bits: int, group: int, dtype: mx.Dtype) -> None:
    packed, weight = affine(37, 256, bits, group, dtype)
    assert np.allclose(packed.read_rows(np.arange(37, dtype=np.int32)), weight, 1e-6, 1e-6)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_linear_is_near_with_bytes_and_exact_with_floats(bits: int, group: int) -> None:
    packed, weight = affine(75, 384, bits, group)
    x = activations(19, 384)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    size = np.sqrt((expected**2).mean(-1, keepdims=True)) + 1e-30
    assert np.abs((packed.apply(x, precise=True) - expected) / size).max() < 1e-5
    assert np.sqrt((((packed.apply(x) - expected) / size) ** 2).mean()) < 0.01


@pytest.mark.parametrize("columns", [16_384, 28_672, 29_568, 53_248])
def test_the_widest_layers_models_have(columns: int) -> None:
    """As those of 20, 70 (Llama, Qwen) and 405 billion parameters: panels that no cache holds."""
    x = activations(23, columns)
    packed = {bits: affine(37, columns, bits, 64) for bits in (4, 6)}
    weight = mx.random.normal((37, columns)).astype(mx.bfloat16)
    dense = native.pack_dense(raw(weight), native.DType.BF16, 37, columns)
    packed[16] = dense, np.array(weight.astype(mx.float32))
    for bits, (matrix, exact) in packed.items():
        found = matrix.apply(x)
        expected = x.astype(np.float64) @ exact.T.astype(np.float64)
        size = np.sqrt((expected**2).mean(-1, keepdims=True)) + 1e-30
        assert np.sqrt((((found - expected) / size) ** 2).mean()) < 0.01, bits
        for row in (0, 22):
            assert np.array_equal(matrix.apply(x[row : row + 1])[0], found[row]), bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_linear_is_exact_up_to_the_order_of_sums(dtype: mx.Dtype) -> None:
    weight = mx.random.normal((75, 90)).astype(dtype)
    packed = native.pack_dense(raw(weight), DTYPES[dtype], 75, 90)
    wide = np.array(weight.astype(mx.float32))
    x = activations(9, 90)
    assert np.array_equal(packed.read_rows(np.arange(75, dtype=np.int32)), wide)
    expected = x.astype(np.float64) @ wide.T
    assert np.abs(packed.apply(x, precise=True) - expected).max() < 1e-5 * np.abs(expected).max()
    if dtype == mx.bfloat16:
        expected = rounded_to_bfloat16(x).astype(np.float64) @ wide.T
    assert np.abs(packed.apply(x) - expected).max() < 1e-5 * np.abs(expected).max()


def rounded_to_bfloat16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32))


@pytest.mark.parametrize("columns", [42, 77, 256, 1000])
def test_bfloat16_gives_the_same_bits_for_any_number_of_rows(columns: int, isa: str) -> None:
    """Tiles of 8, 4, 2 and 1 rows and of several blocks, chunks of 64 rows, columns that have no
    pair; a value halfway between two bfloat16 goes to the even one."""
    weight = mx.random.normal((75, columns)).astype(mx.bfloat16)
    packed = native.pack_dense(raw(weight), native.DType.BF16, 75, columns)
    x = activations(71, columns)
    x[0, :2] = [1 + 2**-8, 1 + 3 * 2**-8]
    whole = packed.apply(x)
    expected = rounded_to_bfloat16(x).astype(np.float64) @ np.array(weight.astype(mx.float32)).T
    assert np.abs(whole - expected).max() < 1e-5 * np.abs(expected).max()
    for rows in (1, 2, 3, 5, 8, 15, 64, 65):
        assert np.array_equal(packed.apply(x[:rows]), whole[:rows])
    native.choose_isa("portable")
    assert np.array_equal(packed.apply(x), whole)


@pytest.mark.parametrize("group", [32, 128, 200])
def test_float8_is_what_its_format_says(group: int, isa: str) -> None:
    values = np.arange(75 * 200, dtype=np.uint32).astype(np.uint8).reshape(75, 200)
    values[(values & 0x7F) == 0x7F] = 0  # NaN
    groups = -(-200 // group)
    scales = np.random.default_rng(0).uniform(0.1, 2, (75, groups)).astype(np.float32)
    packed = native.pack_float8(values.reshape(-1), scales, 75, 200, group)
    numbers = np.array(mx.from_fp8(mx.array(values), mx.float32))
    wide = numbers * scales.repeat(group, axis=1)[:, :200]
    assert np.array_equal(packed.read_rows(np.arange(75, dtype=np.int32)), wide)
    x = activations(9, 200)
    found, expected = packed.apply(x), x.astype(np.float64) @ wide.T
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    for rows in (1, 2, 3, 4, 5, 8):
        assert np.array_equal(packed.apply(x[:rows]), found[:rows])


def test_float4_is_mlxs_nvfp4(isa: str) -> None:
    weight = mx.random.normal((75, 224))
    values, scales = mx.quantize(weight, group_size=16, bits=4, mode="nvfp4")
    numbers = mx.dequantize(values, scales, group_size=16, bits=4, mode="nvfp4")
    wide = np.array(numbers.astype(mx.float32))
    octets = np.array(values).reshape(-1).view(np.uint8)
    packed = native.pack_float4(octets, np.array(scales).reshape(-1), 0.5, 75, 224)
    assert np.array_equal(packed.read_rows(np.arange(75, dtype=np.int32)), 0.5 * wide)
    x = activations(17, 224)
    found, expected = packed.apply(x), x.astype(np.float64) @ (0.5 * wide).T
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    for rows in (1, 2, 3, 4, 5, 12):
        assert np.array_equal(packed.apply(x[:rows]), found[:rows])


def test_bias_is_added(isa: str) -> None:
    packed, _ = affine(20, 64, 4, 32)
    x = np.zeros((2, 64), np.float32)
    packed.set_bias([float(i) for i in range(20)])
    assert np.array_equal(packed.apply(x), np.tile(np.arange(20, dtype=np.float32), (2, 1)))
    with pytest.raises(ValueError, match="bias"):
        packed.set_bias([1.0])


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_row_is_the_same_bits_in_every_number_of_rows(bits: int, precise: bool) -> None:
    packed, _ = affine(75, 256, bits, 32)
    x = activations(37, 256)
    whole = packed.apply(x, precise=precise)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33):
        assert np.array_equal(packed.apply(x[:rows], precise=precise), whole[:rows]), rows
    for row in range(37):
        assert np.array_equal(packed.apply(x[row : row + 1], precise=precise)[0], whole[row])


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_all_instruction_sets_give_the_same_bits(bits: int, precise: bool) -> None:
    for columns in (96, 256, 2048):  # sums of 1 and of 8 parts
        packed, _ = affine(75, columns, bits, 32)
        x = activations(41, columns)
        native.choose_isa("portable")
        portable = packed.apply(x, precise=precise)
        for isa in native.isas():
            native.choose_isa(isa)
            assert np.array_equal(packed.apply(x, precise=precise), portable), isa


def test_a_sum_is_that_of_its_parts() -> None:
    """Whoever holds a half or a quarter of the columns computes terms of the same sum: here
    of eight groups, each a part."""
    mx.random.seed(0)
    weight = mx.random.normal((40, 512))
    x = activations(11, 512)

    def product(begin: int, end: int) -> npt.NDArray[np.float32]:
        values, scales, offsets = mx.quantize(weight[:, begin:end], group_size=64, bits=4)
        as_stored = raw(values), raw(scales), raw(offsets), native.DType.F32
        packed = native.pack_affine(*as_stored, 40, end - begin, 4, 64)
        return packed.apply(np.ascontiguousarray(x[:, begin:end]))

    whole = product(0, 512)
    for parts in (2, 4, 8):
        width = 512 // parts
        sums = [product(begin, begin + width) for begin in range(0, 512, width)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        assert np.array_equal(sums[0], whole)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 50), groups=st.integers(1, 9), many=st.integers(1, 20))
def test_any_shape_can_be_packed(rows: int, groups: int, many: int) -> None:
    packed, weight = affine(rows, 32 * groups, 4, 32)
    x = np.ones((many, 32 * groups), np.float32)
    expected = weight.sum(-1)
    assert np.allclose(packed.apply(x), np.tile(expected, (many, 1)), 1e-4, 1e-3)


def test_shapes_that_lie_are_refused_by_name() -> None:
    some = np.zeros(64, np.uint8)
    f16 = native.DType.F16
    for bits, group, cols in ((7, 32, 64), (4, 16, 64), (4, 32, 48), (4, 0, 64)):
        with pytest.raises(ValueError):
            native.pack_affine(
                some[: cols * bits // 8], some[:4], some[:4], f16, 1, cols, bits, group
            )
    with pytest.raises(ValueError, match="values: 3 bytes, expected 32"):
        native.pack_affine(some[:3], some[:4], some[:4], f16, 1, 64, 4, 32)
    packed, _ = affine(4, 64, 4, 32)
    with pytest.raises(ValueError, match="columns"):
        packed.apply(np.zeros((1, 63), np.float32))
    with pytest.raises(IndexError):
        packed.read_rows(np.array([4], np.int32))


def test_an_instruction_set_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="is unknown; expected one of"):
        native.choose_isa("sse9")
