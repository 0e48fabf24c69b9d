"""The engine's thread: in order, told of every outcome, and not ended by a call that fails."""

import asyncio
import queue
import threading
from typing import Any

import numpy as np
import pytest

from exo.errors import EngineFailed, ExoError, InvalidFrame
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.dummy.engine import DummyEngine, Faults
from exo.inference.one_thread import OneThread
from exo.shard import Shard

SHARD = Shard("m", 0, 8, 8)


def batch(tokens: list[int], start: int = 0) -> ForwardBatch:
    return ForwardBatch((Slice("s", start, len(tokens)),), np.array(tokens, np.int32))


async def next_of(outcomes: "queue.SimpleQueue[Any]") -> Any:
    return await asyncio.to_thread(outcomes.get, True, 5)


async def test_a_call_that_raises_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = OneThread("t")
    thread.post(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert await thread.submit(lambda: 7) == 7
    assert "ZeroDivisionError" in caplog.text
    thread.close()


async def test_what_is_cancelled_before_its_turn_is_skipped() -> None:
    thread, go, ran = OneThread("t"), threading.Event(), []
    first = thread.submit(go.wait)
    second = thread.submit(lambda: ran.append(2))
    third = thread.submit(lambda: ran.append(3))
    second.cancel()
    go.set()
    await asyncio.gather(first, third)
    assert ran == [3]
    thread.close()


async def test_steps_begun_are_done_in_order_on_the_engines_thread() -> None:
    engine = DummyEngine(Faults())
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for start in range(4):
        engine.begin_forward(
            SHARD,
            batch([5], start),
            None,
            lambda outcome, start=start: outcomes.put(
                (start, outcome, threading.current_thread().name)
            ),
        )
    for start in range(4):
        number, outcome, thread = await next_of(outcomes)
        assert (number, thread) == (start, "engine-dummy")
        assert not isinstance(outcome, ExoError)
    await engine.close()


async def test_a_step_that_fails_is_told_like_one_that_does_not() -> None:
    engine = DummyEngine(Faults(forward=1))
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.begin_forward(SHARD, batch([5]), None, outcomes.put)
    assert isinstance(await next_of(outcomes), EngineFailed)
    engine.begin_forward(Shard("m", 1, 8, 8), batch([5]), None, outcomes.put)
    assert isinstance(await next_of(outcomes), InvalidFrame)
    engine.begin_release(["s"], outcomes.put)
    assert await next_of(outcomes) is None
    await engine.close()


async def test_what_waits_when_the_engine_closes_is_told_so() -> None:
    engine = DummyEngine(Faults())
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    inside, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        inside.set()
        go.wait(5)

    engine.begin_release([], hold)
    await asyncio.to_thread(inside.wait, 5)
    engine.begin_forward(SHARD, batch([5]), None, outcomes.put)
    await engine.close()
    go.set()
    assert isinstance(await next_of(outcomes), EngineFailed)
    with pytest.raises(EngineFailed):
        engine.begin_forward(SHARD, batch([5]), None, outcomes.put)
