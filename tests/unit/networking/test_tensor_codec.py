import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from exo.errors import InvalidFrame
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.tensor_codec import DTYPES, decode_tensor, encode_tensor

shapes = st.one_of(st.just(()), array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))


@given(shapes, st.sampled_from(sorted(DTYPES)), st.integers(0, 2**32 - 1))
def test_every_tensor_comes_back_bit_for_bit(shape: tuple[int, ...], dtype: str, seed: int) -> None:
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    raw = np.random.default_rng(seed).bytes(size)
    tensor = np.frombuffer(raw, DTYPES[dtype]).reshape(shape)
    message = pb.Tensor.FromString(encode_tensor(tensor).SerializeToString())
    back = decode_tensor(message)
    assert back.shape == tensor.shape and back.dtype == tensor.dtype
    assert back.tobytes() == raw


@given(arrays(np.float32, (3, 4)))
def test_strides_do_not_matter(tensor: np.ndarray) -> None:
    assert decode_tensor(encode_tensor(tensor.T)).tobytes() == tensor.T.tobytes()


def test_bfloat16_keeps_its_values() -> None:
    tensor = np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16)
    assert (decode_tensor(encode_tensor(tensor)) == tensor).all()


@pytest.mark.parametrize(
    "message",
    [
        pb.Tensor(dtype="float32", shape=[2, 2], data=bytes(15)),
        pb.Tensor(dtype="float32", shape=[2, 2], data=bytes(17)),
        pb.Tensor(dtype="float16", shape=[2, 2], data=bytes(16)),
        pb.Tensor(dtype="float32", shape=[], data=b""),
        pb.Tensor(dtype="float32", shape=[0], data=bytes(4)),
        pb.Tensor(dtype="float32", shape=[2**40, 2**40], data=bytes(4)),
        pb.Tensor(dtype="object", shape=[1], data=bytes(8)),
        pb.Tensor(dtype="", shape=[1], data=bytes(4)),
    ],
)
def test_a_lying_tensor_is_refused(message: pb.Tensor) -> None:
    with pytest.raises(InvalidFrame):
        decode_tensor(message)


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    with pytest.raises(InvalidFrame, match="does not travel"):
        encode_tensor(np.zeros(3, np.float64))
