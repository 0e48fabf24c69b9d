"""Tensors on the wire: raw little-endian bytes with shape and dtype, checked both ways."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from exo.errors import InvalidFrame
from exo.networking.generated import node_service_pb2 as pb

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype("<i4"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_TENSOR_BYTES = 256 * 2**20
"""Larger tensors are refused: a step is at most a chunk of a prompt, far below this."""


def encode_tensor(array: npt.NDArray[Any]) -> pb.Tensor:
    """The array as a message; any strides, 0-d and zero-length included.

    Raises:
        InvalidFrame: a dtype that is not for the wire, or too many bytes.
    """
    name = _NAMES.get(array.dtype)
    if name is None:
        raise InvalidFrame(f"dtype {array.dtype} does not travel; expected one of {[*DTYPES]}")
    if array.nbytes > MAX_TENSOR_BYTES:
        raise InvalidFrame(f"a tensor of {array.nbytes} bytes is over {MAX_TENSOR_BYTES}")
    return pb.Tensor(dtype=name, shape=array.shape, data=array.tobytes())


def decode_tensor(message: pb.Tensor) -> npt.NDArray[Any]:
    """The message as a read-only array.

    Raises:
        InvalidFrame: unknown dtype, or shape and size contradict each other.
    """
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidFrame(f"a tensor says dtype {message.dtype!r}; expected one of {[*DTYPES]}")
    shape = tuple(message.shape)
    data = message.data  # a copy, each time it is asked for
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise InvalidFrame(
            f"a tensor says {message.dtype} {list(shape)}, which is {expected} bytes, "
            f"and carries {len(data)}"
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)
