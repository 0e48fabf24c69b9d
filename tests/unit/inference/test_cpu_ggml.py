"""GGUF's quantized tensors in the kernels, against PyPI's `gguf`: every number as it is there."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants

from exo.inference.cpu import _native as native
from exo.inference.cpu.grids import load_grids

FORMATS = native.ggml_formats()
# Where a block holds its float16 scales; MXFP4's is a power of two in its first byte.
SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    "IQ1_M": (),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
ROWS, COLS = 37, 512


@pytest.fixture(params=native.isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    load_grids()
    native.choose_isa(request.param)
    native.set_threads(2)
    yield request.param
    native.choose_isa("")


def random_tensor(name: str) -> npt.NDArray[np.uint8]:
    """Any bits, but for the scales: [ROWS, bytes]."""
    rng = np.random.default_rng(len(name))
    cols, size = FORMATS[name]
    data = rng.integers(0, 256, (ROWS, COLS // cols, size), dtype=np.uint8)
    for at in SCALES_AT[name]:
        scales = rng.uniform(-0.02, 0.02, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scales.view(np.uint8).reshape(*data.shape[:2], 2)
    if name == "IQ1_M":  # its scale's upper bits, spread over the block
        data[..., 55] = data[..., 55] & 15 | 0x20
    if name == "MXFP4":
        data[..., 0] = rng.integers(115, 125, data.shape[:2])
    return data.reshape(ROWS, -1)


def pack(name: str) -> tuple[native.Matrix, npt.NDArray[np.float32]]:
    data = random_tensor(name)
    weight = quants.dequantize(data, GGMLQuantizationType[name])
    return native.pack_ggml(data.reshape(-1), name, ROWS, COLS), weight


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_the_file_s(name: str) -> None:
    packed, weight = pack(name)
    assert np.array_equal(packed.read_rows(np.arange(ROWS, dtype=np.int32)), weight)


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_near_with_bytes_and_exact_with_floats(name: str) -> None:
    packed, weight = pack(name)
    x = np.random.default_rng(1).standard_normal((70, COLS)).astype(np.float32)
    x[:, 5] *= 80
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    size = np.sqrt((expected**2).mean())
    assert np.abs(packed.apply(x, precise=True) - expected).max() < 2e-5 * size
    whole = packed.apply(x)
    assert np.sqrt(((whole - expected) ** 2).mean()) < 0.01 * size
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64):  # batch invariance, to the bit
        assert np.array_equal(packed.apply(x[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_one_size_with_the_signs_of_the_weights_fit_the_sums(name: str) -> None:
    """The largest sums that there are, which kernels keep in 16 bits where they can."""
    packed, weight = pack(name)
    signs = np.where(weight < 0, -1, 1).astype(np.float32)
    x = np.concatenate([signs, -signs])
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    whole = packed.apply(x)
    size = np.sqrt((expected**2).mean())
    assert np.sqrt(((whole - expected) ** 2).mean()) < 0.01 * size
    for row in (0, 1, ROWS, 2 * ROWS - 1):  # most instruction sets multiply one in 32 bits
        assert np.array_equal(packed.apply(x[row : row + 1])[0], whole[row]), row


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name[:3] not in ("IQ1", "IQ2", "IQ3")]
)
def test_memory_is_about_the_file_s(name: str) -> None:
    cols, size = FORMATS[name]
    packed = native.pack_ggml(np.zeros(16 * 1024 // cols * size, np.uint8), name, 16, 1024)
    assert packed.nbytes <= 1.09 * (16 * 1024 // cols * size)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="no format TQ1_0"):
        native.pack_ggml(np.zeros(64, np.uint8), "TQ1_0", 1, 256)
    with pytest.raises(ValueError, match="its blocks have 256 columns"):
        native.pack_ggml(np.zeros(144, np.uint8), "Q4_K", 1, 288)
    with pytest.raises(ValueError, match="expected 288"):
        native.pack_ggml(np.zeros(144, np.uint8), "Q4_K", 1, 512)
