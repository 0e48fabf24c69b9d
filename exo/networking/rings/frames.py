"""What flows around a ring, and its bytes: a message of RingService is one frame in MessagePack.

Not protobuf, which makes a Python object of every field that is looked at: a step costs it three
times as long to write and to read where it matters, in a process whose caches hold weights
(docs/decisions/008). A frame is an array of a number for its kind and then the fields of `_Step`,
`StepResult`, `Release` or `Rooms`, in order, the structs in them being arrays as well.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from exo.errors import InvalidFrame
from exo.inference.batch import CacheRoom, ForwardBatch, Slice
from exo.inference.sampling import Index, SampledToken
from exo.networking.rings.hidden_states import Wire, decode, encode


class Step(msgspec.Struct, frozen=True):
    """One step on its way around the ring. `hidden_states`: [tokens, hidden], None at the head."""

    number: int
    batch: ForwardBatch
    hidden_states: npt.NDArray[Any] | None = None


class _Step(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A `Step` as it travels. `hidden_states`: by `dtype`, see hidden_states.py; empty: None."""

    number: int
    slices: tuple[Slice, ...]
    token_ids: tuple[Index, ...]
    dtype: str
    hidden: Index  # of [tokens, hidden]
    hidden_states: bytes  # and no view into the message, where it would not be aligned


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What the tail sampled in a step, in the order of its sampling slices."""

    number: int
    tokens: tuple[SampledToken, ...]


class Release(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """These sequences have ended: free their KV cache, tell the next member."""

    sequence_ids: tuple[str, ...]


class MemberRoom(msgspec.Struct, frozen=True, array_like=True):
    """What a member's part of the KV cache may hold."""

    node_id: str
    room: CacheRoom


class Rooms(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The head asks how much room there is: every member adds its own, the tail gives it back."""

    members: tuple[MemberRoom, ...] = ()


Frame = Step | StepResult | Release | Rooms

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[_Step | StepResult | Release | Rooms] = msgspec.msgpack.Decoder(
    _Step | StepResult | Release | Rooms
)


def encode_frame(frame: Frame, wire: Wire = Wire.EXACT) -> bytes:
    """Raises InvalidFrame if the hidden states' dtype or a value is none that travels."""
    try:
        return _ENCODER.encode(_outgoing(frame, wire) if isinstance(frame, Step) else frame)
    except (TypeError, OverflowError) as error:
        raise InvalidFrame(f"a frame that cannot be written: {error}") from error


def _outgoing(step: Step, wire: Wire) -> _Step:
    slices, token_ids = step.batch.slices, tuple(step.batch.token_ids.tolist())
    rows = step.hidden_states
    if rows is None:
        return _Step(step.number, slices, token_ids, "", 0, b"")
    dtype, data = encode(rows, wire)
    return _Step(step.number, slices, token_ids, dtype, rows.shape[1], data)


def decode_frame(message: bytes) -> Frame:
    """Hidden states are read-only. Raises InvalidFrame where it is none, or contradicts itself."""
    try:
        frame = _DECODER.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidFrame(f"a ring frame that cannot be read: {error}") from error
    if not isinstance(frame, _Step):
        return frame
    batch = ForwardBatch(frame.slices, np.array(frame.token_ids, np.int32))
    if not frame.dtype:
        return Step(frame.number, batch)
    rows = decode(frame.dtype, len(frame.token_ids), frame.hidden, frame.hidden_states)
    return Step(frame.number, batch, rows)
