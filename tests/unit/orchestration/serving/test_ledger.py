"""The head's book of pages says what the engines hold, whatever sequences do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import zoo

from exo.inference.batch import PAGE_TOKENS, CacheRoom
from exo.inference.cpu import _native as native
from exo.inference.cpu.shard_model import CheckpointModel
from exo.orchestration.serving.ledger import Ledger


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def model(tmp_path_factory: pytest.TempPathFactory, request: Any) -> native.Model:
    path = tmp_path_factory.mktemp("tiny")
    zoo.write_checkpoint(request.param, path, zoo.tiny_config(request.param))
    checkpoint = CheckpointModel(path)
    n = checkpoint.architecture.n_layers
    return checkpoint.build(0, n, lambda a, b: None, precise=False, cache_limit=lambda: 1 << 30)


def test_a_page_is_as_long_there_as_here() -> None:
    assert native.PAGE_TOKENS == PAGE_TOKENS


@pytest.mark.parametrize("seed", range(5))
def test_it_counts_the_pages_that_the_cpu_engine_uses(model: native.Model, seed: int) -> None:
    rng, ledger = random.Random(seed), Ledger()
    state_pages = -(-model.state_bytes // model.page_bytes)
    ledger.learn([CacheRoom(10_000, 0, is_paged=True, state_pages=state_pages)])
    lengths: dict[str, int] = {}
    kept: dict[str, set[int]] = {}
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
            moments = [0, start, *kept.get(name, ())]
            start = rng.choice(moments) if state_pages else rng.randint(0, start)
        elif kind == "take over" and lengths:
            source, name = rng.choice([*lengths]), f"s{number}"
            moments = [lengths[source], *kept.get(source, ())]
            start = rng.choice(moments) if state_pages else rng.randint(1, lengths[source])
        length = rng.choice([1, 1, 5, 64, 130])
        keeps = state_pages > 0 and rng.random() < 0.3
        expected = ledger.used + ledger.needs(name, start, length, source, keeps=keeps)
        ledger.extend(name, start, length, source, keeps=keeps)
        if source:
            model.take_over(name, source, start)
        part = native.Slice(name, start, length, 0, keeps)
        model.forward([part], np.zeros(length, np.int32), None)
        lengths[name] = start + length
        earlier = {moment for moment in kept.get(name, ()) if moment <= start}
        kept[name] = earlier | ({start + length} if keeps else set())
        used = model.cache_pages + model.states * state_pages
        assert ledger.used == used
        # What lay behind `start` is given back before its place is needed.
        assert used <= expected if state_pages else used == expected
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
