import contextlib

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo.errors import ExoError, InvalidFrame, InvalidRequest
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.sampling import SampledToken, SamplingParams
from exo.networking.rings.frames import (
    Release,
    Step,
    StepResult,
    decode_frame,
    encode_frame,
)
from exo.networking.rings.hidden_states import BLOCK, DTYPES, Wire, smaller, wanted

packed = msgspec.msgpack.encode


def a_batch(tokens: int, sampling: SamplingParams | None = None) -> ForwardBatch:
    return ForwardBatch((Slice("s", 7, tokens, sampling, 3),), np.arange(tokens, dtype=np.int32))


@given(
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 2**32 - 1),
)
def test_hidden_states_come_back_bit_for_bit(
    tokens: int, hidden: int, dtype: str, seed: int
) -> None:
    raw = np.random.default_rng(seed).bytes(tokens * hidden * DTYPES[dtype].itemsize)
    states = np.frombuffer(raw, DTYPES[dtype]).reshape(tokens, hidden)
    back = decode_frame(encode_frame(Step(4, a_batch(tokens), states)))
    assert isinstance(back, Step) and back.hidden_states is not None
    assert back.hidden_states.shape == states.shape and back.hidden_states.dtype == states.dtype
    assert back.hidden_states.tobytes() == raw
    assert back.hidden_states.flags.aligned


def test_strides_do_not_matter() -> None:
    states = np.arange(12, dtype=np.float32).reshape(3, 4).T
    back = decode_frame(encode_frame(Step(4, a_batch(4), states)))
    assert isinstance(back, Step) and back.hidden_states is not None
    assert (back.hidden_states == states).all()


@given(st.integers(1, 9), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_fewer_bytes_are_near(tokens: int, hidden: int, seed: int) -> None:
    """Within half a step of each block's scale, whatever one value of it is."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(tokens, hidden)).astype(np.float32)
    states[rng.random(states.shape) < 0.01] *= 1e4
    for wire, size in ((Wire.BFLOAT16, 2.0), (Wire.INT8, (BLOCK + 9) / BLOCK)):
        frame = encode_frame(Step(4, a_batch(tokens), states), wire)
        back = decode_frame(frame)
        assert isinstance(back, Step) and back.hidden_states is not None
        assert back.hidden_states.shape == states.shape
        assert len(frame) < tokens * (hidden + BLOCK) * size + 9 * tokens + 99
        for begin in range(0, hidden, BLOCK):
            block = states[:, begin : begin + BLOCK]
            error = np.abs(back.hidden_states[:, begin : begin + BLOCK] - block)
            if wire is Wire.BFLOAT16:
                assert (error <= np.abs(block) / 256).all()
            else:
                largest = np.sort(np.abs(block), axis=1)
                second = largest[:, -2:-1] if block.shape[1] > 1 else np.zeros((tokens, 1))
                assert (error <= second / 253).all()


def test_values_that_are_no_numbers_stay_none() -> None:
    states = np.ones((2, BLOCK), np.float32)
    states[0, 3], states[0, 5] = np.nan, np.inf
    back = decode_frame(encode_frame(Step(4, a_batch(2), states), Wire.INT8))
    assert isinstance(back, Step) and back.hidden_states is not None
    assert not np.isfinite(back.hidden_states[0]).all() and (back.hidden_states[1] == 1).all()


def test_a_link_takes_what_either_end_wants() -> None:
    assert smaller(Wire.EXACT, Wire.INT8) is smaller(Wire.INT8, Wire.BFLOAT16) is Wire.INT8
    assert smaller(Wire.BFLOAT16, Wire.EXACT) is Wire.BFLOAT16
    assert (wanted("int8"), wanted(""), wanted("zip")) == (Wire.INT8, Wire.EXACT, Wire.EXACT)


def test_bfloat16_keeps_its_values() -> None:
    states = np.array([[1.0, -2.5, 3e38]], ml_dtypes.bfloat16)
    back = decode_frame(encode_frame(Step(4, a_batch(1), states)))
    assert isinstance(back, Step) and back.hidden_states is not None
    assert (back.hidden_states == states).all()


def test_a_step_at_the_head_comes_back() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={5: -100.0, 2**31 - 1: 100.0},
        seed=2**64 - 1,
        logprobs=True,
        top_logprobs=20,
    )
    batch = ForwardBatch(
        (Slice("é", 0, 2), Slice("t", 2**31 - 2, 1, sampling, 9)),
        np.array([0, 2**31 - 1, 5], np.int32),
    )
    back = decode_frame(encode_frame(Step(2**40, batch)))
    assert isinstance(back, Step)
    assert back.number == 2**40 and back.hidden_states is None
    assert back.batch.slices == batch.slices
    assert (back.batch.token_ids == batch.token_ids).all()
    assert back.batch.token_ids.dtype == np.int32


@pytest.mark.parametrize(
    "frame",
    [
        StepResult(9, (SampledToken(5, -0.5, ((5, -0.5), (6, -2.25)), "s"), SampledToken(0))),
        StepResult(1, ()),
        Release(("s", "t")),
        Release(()),
    ],
)
def test_the_others_come_back(frame: StepResult | Release) -> None:
    assert decode_frame(encode_frame(frame)) == frame


ONE = ["s", 0, 2, None, 0]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no MessagePack"),
        pytest.param(packed(None), id="null"),
        pytest.param(packed([9, 1]), id="no kind"),
        pytest.param(packed({"number": 1}), id="a map"),
        pytest.param(packed([1, 1, [ONE], [1, 2], "float32", 4]), id="a field is missing"),
        pytest.param(packed([1, "1", [ONE], [1, 2], "float32", 4, bytes(32)]), id="number"),
        pytest.param(packed([1, 1, [ONE], [1], "float32", 4, bytes(16)]), id="tokens"),
        pytest.param(packed([1, 1, [ONE], [1, -2], "float32", 4, bytes(32)]), id="negative token"),
        pytest.param(packed([1, 1, [ONE], [1, 2**31], "float32", 4, bytes(32)]), id="huge token"),
        pytest.param(packed([1, 1, [ONE], [1, 2], "float32", 4, bytes(31)]), id="too few bytes"),
        pytest.param(packed([1, 1, [ONE], [1, 2], "float32", 4, bytes(33)]), id="too many bytes"),
        pytest.param(packed([1, 1, [ONE], [1, 2], "float16", 4, bytes(32)]), id="another dtype"),
        pytest.param(packed([1, 1, [ONE], [1, 2], "float32", 2**40, b"x"]), id="huge width"),
        pytest.param(packed([1, 1, [ONE], [1, 2], "float32", -4, bytes(32)]), id="minus width"),
        pytest.param(packed([1, 1, [ONE], [1, 2], "object", 4, bytes(32)]), id="objects"),
        pytest.param(packed([1, 1, [["s", -1, 2]], [1, 2], "", 0, b""]), id="negative start"),
        pytest.param(packed([1, 1, [["s", 0, 2**40]], [1, 2], "", 0, b""]), id="huge length"),
        pytest.param(packed([1, 1, [["s", 0, 0]], [], "", 0, b""]), id="an empty slice"),
        pytest.param(b"\x92\x03\x91\xa1\xff", id="no UTF-8"),
        pytest.param(b"\x92\x03\xdd\xff\xff\xff\xff", id="four billion strings"),
        pytest.param(packed([2, 1, [[-1]]]), id="a negative token sampled"),
    ],
)
def test_a_lying_frame_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidFrame):
        decode_frame(message)


@pytest.mark.parametrize(
    "sampling", [[3.0], [float("nan")], [0, 1, 0, 0, 1, 0, 0, {}, 0, True, 21]]
)
def test_sampling_out_of_range_is_refused(sampling: list[object]) -> None:
    with pytest.raises(InvalidRequest):
        decode_frame(packed([1, 1, [["s", 0, 1, sampling, 0]], [1], "", 0, b""]))


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_damaged_bytes_are_refused_or_read(junk: bytes, at: int, value: int) -> None:
    states = np.ones((2, 4), np.float32)
    whole = bytearray(encode_frame(Step(1, a_batch(2, SamplingParams()), states)))
    whole[at % len(whole)] = value
    for message in (junk, bytes(whole), bytes(whole[: at % len(whole)])):
        with contextlib.suppress(ExoError):
            decode_frame(message)


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    with pytest.raises(InvalidFrame, match="does not travel"):
        encode_frame(Step(1, a_batch(3), np.zeros((3, 2), np.float64)))


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidFrame, match="cannot be written"):
        encode_frame(StepResult(1, (SampledToken(np.int64(3)),)))  # type: ignore[arg-type]
