"""Hidden states as bytes: as they were computed, or fewer where a link is slow.

A lossy codec is used only where a node asks for it (`--wire`), for what it sends and is sent.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from exo.errors import InvalidFrame

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""What an engine may compute, by its name in a frame."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

BLOCK: Final = 64
"""Values along the hidden dimension with one scale."""

_INT8 = "int8"
_ENTRY = np.dtype([("scale", "<f4"), ("largest", "<f4"), ("at", "u1"), ("rest", "i1", BLOCK)])
"""A block: one value dwarfs the others in some (a massive activation) and would round them to
nothing, so the largest of each goes apart, as it is."""


class Wire(StrEnum):
    """How hidden states travel, the more exact first."""

    EXACT = "exact"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


def smaller(one: Wire, other: Wire) -> Wire:
    """What a link uses whose ends want these."""
    order = list(Wire)
    return max(one, other, key=order.index)


def wanted(name: str) -> Wire:
    """What a peer says that it wants; a codec that is not known here it is not sent."""
    return Wire(name) if name in list(Wire) else Wire.EXACT


def encode(rows: npt.NDArray[Any], wire: Wire) -> tuple[str, bytes]:
    """Hidden states [tokens, hidden] as a name and bytes, row-major, little endian.

    Raises:
        InvalidFrame: a dtype that does not travel.
    """
    name = _NAMES.get(rows.dtype)
    if name is None:
        raise InvalidFrame(f"dtype {rows.dtype} does not travel; expected one of {[*DTYPES]}")
    if wire is Wire.INT8:
        return _INT8, _quantized(rows)
    if wire is Wire.BFLOAT16 and rows.dtype.itemsize > 2:
        return wire, rows.astype(ml_dtypes.bfloat16).tobytes()
    return name, rows.tobytes()


def decode(name: str, tokens: int, hidden: int, data: bytes) -> npt.NDArray[Any]:
    """[tokens, hidden], read-only.

    Raises:
        InvalidFrame: the bytes are no such hidden states.
    """
    dtype = DTYPES.get(name)
    if dtype is None and name != _INT8:
        raise InvalidFrame(f"hidden states are {name!r}; expected one of {[*DTYPES, _INT8]}")
    size = hidden * dtype.itemsize if dtype is not None else _blocks(hidden) * _ENTRY.itemsize
    if tokens * size != len(data):
        raise InvalidFrame(
            f"hidden states say {name} [{tokens}, {hidden}] and carry {len(data)} bytes"
        )
    if dtype is None:
        return _restored(np.frombuffer(data, _ENTRY), tokens, hidden)
    return np.frombuffer(data, dtype).reshape(tokens, hidden)


def _blocks(hidden: int) -> int:
    return -(-hidden // BLOCK)


def _quantized(rows: npt.NDArray[Any]) -> bytes:
    tokens, hidden = rows.shape
    blocks = np.zeros((tokens, _blocks(hidden) * BLOCK), np.float32)
    blocks[:, :hidden] = rows
    blocks = blocks.reshape(-1, BLOCK)
    entries = np.empty(len(blocks), _ENTRY)
    at = np.abs(blocks).argmax(1)
    each = np.arange(len(blocks))
    entries["at"], entries["largest"] = at, blocks[each, at]
    blocks[each, at] = 0
    scale = np.abs(blocks).max(1) / 127
    entries["scale"] = scale
    with np.errstate(invalid="ignore", divide="ignore"):
        entries["rest"] = np.rint(np.nan_to_num(blocks / scale[:, None])).astype(np.int8)
    return entries.tobytes()


def _restored(entries: npt.NDArray[Any], tokens: int, hidden: int) -> npt.NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        blocks = entries["rest"] * entries["scale"][:, None]
    blocks[np.arange(len(blocks)), entries["at"] % BLOCK] = entries["largest"]
    rows: npt.NDArray[np.float32] = blocks.reshape(tokens, -1)[:, :hidden]
    rows = np.ascontiguousarray(rows)
    rows.flags.writeable = False
    return rows
