"""The head's book of pages says what the engines hold, whatever sequences do."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zoo

from exo.inference.batch import PAGE_TOKENS, CacheRoom
from exo.inference.cpu import _native as native
from exo.inference.cpu.shard_model import CheckpointModel
from exo.orchestration.serving.ledger import Ledger


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> native.Model:
    path = tmp_path_factory.mktemp("tiny")
    zoo.write_checkpoint("llama", path)
    checkpoint = CheckpointModel(path)
    n = checkpoint.architecture.n_layers
    return checkpoint.build(0, n, lambda a, b: None, precise=False, cache_limit=lambda: 1 << 30)


def test_a_page_is_as_long_there_as_here() -> None:
    assert native.PAGE_TOKENS == PAGE_TOKENS


@pytest.mark.parametrize("seed", range(5))
def test_it_counts_the_pages_that_the_cpu_engine_uses(model: native.Model, seed: int) -> None:
    rng, ledger = random.Random(seed), Ledger()
    ledger.learn([CacheRoom(10_000, 0, is_paged=True)])
    lengths: dict[str, int] = {}
    for number in range(300):
        kind = rng.choice(["extend", "extend", "cut", "take over", "take over", "release"])
        name = rng.choice([*lengths, f"s{number}"])
        if kind == "release":
            model.release(name)
            ledger.release(name)
            lengths.pop(name, None)
            continue
        source, start = "", lengths.get(name, 0)
        if kind == "cut":
            start = rng.randint(0, start)
        elif kind == "take over" and lengths:
            source, name = rng.choice([*lengths]), f"s{number}"
            start = rng.randint(1, lengths[source])
        length = rng.choice([1, 1, 5, 64, 130])
        expected = ledger.used + ledger.needs(name, start, length, source)
        ledger.extend(name, start, length, source)
        if source:
            model.take_over(name, source, start)
        model.forward([native.Slice(name, start, length, 0)], np.zeros(length, np.int32), None)
        lengths[name] = start + length
        assert ledger.used == expected == model.cache_bytes // model.page_bytes
    for name in lengths:
        model.release(name)
        ledger.release(name)
    assert ledger.used == ledger.shared == model.cache_bytes == 0


def test_where_pages_are_not_shared_everybody_has_their_own() -> None:
    ledger = Ledger()
    ledger.learn([CacheRoom(10, 0, is_paged=True), CacheRoom(8, 0, is_paged=False)])
    ledger.extend("a", 0, 130)
    assert ledger.needs("b", 130, 1, "a") == 3
    ledger.extend("b", 130, 1, "a")
    assert (ledger.used, ledger.shared) == (6, 0)
    assert ledger.has(2) and not ledger.has(3)


def test_a_member_that_had_less_room_than_it_said_is_believed_later() -> None:
    ledger = Ledger()
    ledger.learn([CacheRoom(100, 0, is_paged=True)])
    ledger.extend("a", 0, 64 * 50)
    ledger.shrink()
    assert not ledger.has(1)
    found = []
    for _ in range(8):
        ledger.learn([CacheRoom(100, 0, is_paged=True)])
        found.append(ledger.capacity)
    assert found == sorted(found) and found[0] < 60 and found[-1] == 100
