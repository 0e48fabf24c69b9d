"""Where a cache cannot be cut back, both engines go on from a moment they were asked to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zoo

from exo.errors import CacheMiss
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.cpu.engine import CPUEngine
from exo.inference.engine import InferenceEngine
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.shard import Shard

GREEDY = SamplingParams(temperature=0)


class Session:
    def __init__(self, engine: InferenceEngine, folder: Path) -> None:
        self.engine = engine
        self.shard = Shard("m", 0, zoo.LAYERS, zoo.LAYERS)
        engine.describe_model("m", folder)
        engine.load_shard(self.shard, folder, lambda done, total: None)

    def compute(
        self, name: str, tokens: npt.NDArray[np.int32], start: int, end: int, **more: Any
    ) -> npt.NDArray[Any]:
        part = Slice(name, start, end - start, GREEDY, **more)
        if part.takes_over:
            self.engine.take_over(self.shard, part)
        return self.engine.compute(self.shard, ForwardBatch((part,), tokens[start:end]), None)


@pytest.mark.parametrize("engine", [CPUEngine, MLXEngine])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "gpt_oss", "gemma3_text"])
def test_it_goes_on_from_there_as_if_nothing_had_come_after(
    engine: type[InferenceEngine], family: str, tmp_path: Path
) -> None:
    small = {"sliding_window": 20} if family in ("gpt_oss", "gemma3_text") else {}
    zoo.write_checkpoint(family, tmp_path, zoo.tiny_config(family) | small)
    session = Session(engine(), tmp_path)
    rng = np.random.default_rng(0)
    one = rng.integers(0, zoo.VOCABULARY, 120).astype(np.int32)
    two = np.concatenate([one[:64], rng.integers(0, zoo.VOCABULARY, 30).astype(np.int32)])
    session.compute("one", one, 0, 64, keeps=True)
    before = session.engine.cache_room(session.shard).used
    session.compute("one", one, 64, 110)
    for end in range(111, 121):
        session.compute("one", one, end - 1, end)
    session.compute("fresh", two, 0, 64)
    expected = session.compute("fresh", two, 64, 94)
    taken = session.compute("two", two, 64, 94, takes_over="one")
    assert np.array_equal(taken, expected)
    assert np.array_equal(session.compute("one", two, 64, 94), expected), "itself, cut back"
    assert session.engine.cache_room(session.shard).used > before
    if session.engine.cache_room(session.shard).state_pages:
        with pytest.raises(CacheMiss):
            session.compute("three", two, 70, 94, takes_over="one")
    session.engine.release_sequences(["one", "two", "three", "fresh"])
    assert session.engine.cache_room(session.shard).used == 0
