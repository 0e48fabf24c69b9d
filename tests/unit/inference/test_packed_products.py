"""The kernels for NVIDIA cards, run on the host: `tests/cuda_on_host` stands in for the card."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx import nn

from exo.inference.mlx import cuda, packed_products

ROOT = Path(__file__).resolve().parents[3]
DTYPES = {mx.float16: np.float16, mx.bfloat16: ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "exo's own kernels need one too"
    built = tmp_path_factory.mktemp("kernels") / "packed_products.so"
    here = ROOT / "tests/cuda_on_host"
    command = [compiler, "-std=c++20", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    command += ["-pthread", f"-I{here}", f"-I{Path(packed_products.__file__).parent}"]
    subprocess.run([*command, here / "packed_products.cpp", "-o", built], check=True)
    return ctypes.CDLL(built).packed_products


def bits_of(array: mx.array) -> npt.NDArray[Any]:
    return np.array(array if array.dtype == mx.uint32 else array.view(mx.uint16))


def floats(array: mx.array) -> npt.NDArray[np.float32]:
    return np.array(array.astype(mx.float32))


def pointers(arrays: list[npt.NDArray[Any]]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 32), (8, 128)])
@pytest.mark.parametrize(
    ("outputs", "cols", "rows"),
    [((16, 9), 128, 1), ((17, 3), 1152, 8), ((3, 18), 384, 9), ((4, 5), 640, 32)],
)
def test_kernels_compute_what_mlx_does(
    dtype: mx.Dtype,
    bits: int,
    group: int,
    outputs: tuple[int, int],
    cols: int,
    rows: int,
    kernels: Any,
) -> None:
    """Outputs that fill no block, columns that fill no tile, and a row alone as in company."""
    matrices = []
    for i, count in enumerate(outputs):
        weight = mx.random.normal((count, cols), key=mx.random.key(i)).astype(dtype)
        matrices.append(mx.quantize(weight, group_size=group, bits=bits))
    x = mx.random.normal((rows, cols), key=mx.random.key(9)).astype(dtype)
    packed, scales, biases = (
        [bits_of(part) for part in parts] for parts in zip(*matrices, strict=True)
    )

    def run(x: mx.array) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
        count = x.shape[0]
        products = [np.full((count, n), 0x7FFF, np.uint16) for n in outputs]
        dense = [np.full((n, cols), 0x7FFF, np.uint16) for n in outputs]
        values = bits_of(x)
        where = values.ctypes.data_as(ctypes.c_void_p)
        sizes = (ctypes.c_int * 2)(*outputs)
        parts = map(pointers, (packed, scales, biases, products, dense))
        is_bfloat = dtype == mx.bfloat16
        assert kernels(is_bfloat, bits, group, where, count, cols, sizes, *parts)
        return products, dense

    products, dense = run(x)
    [alone, _] = run(x[rows - 1 :])
    ulp = 2**-10 if dtype == mx.float16 else 2**-7
    for i in range(2):
        want = mx.dequantize(*matrices[i], group_size=group, bits=bits)
        found = dense[i].view(DTYPES[dtype]).astype(np.float32)
        np.testing.assert_allclose(found, floats(want), atol=2 * ulp * np.abs(found).max())
        exact = floats(x).astype(np.float64) @ found.T
        product = products[i].view(DTYPES[dtype]).astype(np.float32)
        np.testing.assert_allclose(product, exact, rtol=ulp, atol=1e-4)
        np.testing.assert_array_equal(products[i][-1], alone[i][0])


@pytest.mark.skipif(not cuda.is_used(), reason="needs an NVIDIA card")
def test_kernels_on_a_card() -> None:
    formats = [(t, b, g) for t in DTYPES for b in (4, 8) for g in (32, 64, 128)]
    for dtype, bits, group in formats:
        for outputs, cols in ((256, 4096), (100, 640), (16, 128)):
            layers = []
            for count in (outputs, 48, outputs + 7):
                layer = nn.QuantizedLinear(cols, count, bias=False, group_size=group, bits=bits)
                layer.scales, layer.biases = layer.scales.astype(dtype), layer.biases.astype(dtype)
                layers.append(layer)
            x = mx.random.normal((32, cols), key=mx.random.key(0)).astype(dtype)
            together = packed_products.Matrices(layers).multiply(x, 32)
            for layer, found in zip(layers, together, strict=True):
                assert not packed_products.why_not(layer)
                for rows in (1, 2, 7, 8, 9, 16, 17, 31):
                    [fewer] = packed_products.Matrices([layer]).multiply(x[:rows], rows)
                    np.testing.assert_array_equal(floats(fewer), floats(found)[:rows])
