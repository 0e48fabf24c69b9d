"""How many tokens of a prompt go into a step, by how long steps take."""

from __future__ import annotations

import random

import pytest

from exo.orchestration.serving.pace import (
    ALONE_CHUNK,
    CHUNK_S,
    CHUNK_STEPS,
    CUT_BESIDE,
    MAX_CHUNK,
    MIN_CHUNK,
    Pace,
)


def prefilled(pace: Pace, fixed_s: float, token_s: float, tokens: int = 1500) -> list[int]:
    """Chunks of a prompt that nobody decodes beside, each of which takes `fixed_s` and `token_s`
    for each token."""
    chunks = []
    while tokens > 0:
        chunks.append(min(pace.chunk(0), tokens))
        pace.took(fixed_s + token_s * chunks[-1], 0, chunks[-1])
        tokens -= chunks[-1]
    return chunks


@pytest.mark.parametrize("members", [1, 2])
def test_a_slow_link_does_not_make_chunks_small(members: int) -> None:
    assert len(prefilled(Pace(members), 0.4, 0.0001)) <= 1500 / ALONE_CHUNK + 1


def test_alone_a_chunk_takes_at_most_its_time() -> None:
    chunks = prefilled(Pace(1), 0.001, 0.001, 5000)
    assert all(0.5 * CHUNK_S < 0.001 * chunk <= CHUNK_S for chunk in chunks[2:-1])


def test_beside_others_it_takes_as_long_as_a_few_of_their_steps() -> None:
    pace = Pace(1)
    for _ in range(10):
        pace.took(0.005, 1, 0)
    for chunk in (pace.chunk(1), 64, 32, 16, 8, 8, 8):
        pace.took(0.005 + 0.0009 * chunk, 1, chunk)
    assert pace.chunk(1) == int(CHUNK_STEPS * 0.005 / 0.0009) // MIN_CHUNK * MIN_CHUNK == 8
    assert pace.chunk(0) > ALONE_CHUNK


def test_where_experts_are_read_from_disk_a_chunk_is_as_long_as_can_be() -> None:
    pace = Pace(2, reads_experts=True)
    assert pace.chunk(0) == MAX_CHUNK
    pace.took(5.0, 0, MAX_CHUNK)
    assert pace.chunk(0) == pace.chunk(3) == MAX_CHUNK


def read(pace: Pace, a: float, c: float, prompts: int = 40) -> None:
    """Prompts of some lengths, cut as the pace says, by what takes a + c n seconds."""
    for index in range(prompts):
        left = 900 + 173 * (index % 7)
        while left > 0:
            n = min(left, pace.cut(0))
            pace.took(a + c * n, 0, n)
            left -= n


@pytest.mark.parametrize(
    ("members", "a", "c", "expected"),
    [
        # An H100, 7 B in 4 bits: 2048 tokens take no quarter of a second.
        (1, 0.006, 0.000115, 1024),
        (1, 0.016, 0.0014, 256),  # an M2 Max, 8 B in 4 bits
        (1, 0.001, 0.0001, 2048),
        (2, 0.006, 0.000115, 256),
        (2, 0.016, 0.0014, 128),
        (4, 0.016, 0.0014, 64),
        (2, 0.0, 0.03, 32),
    ],
)
def test_prompts_are_cut_as_suits_what_computes_them(
    members: int, a: float, c: float, expected: int
) -> None:
    pace = Pace(members)
    read(pace, a, c)
    assert pace.cut(0) == expected
    assert pace.cut(3) == max(expected // CUT_BESIDE, pace.usual_chunk)
    for _ in range(40):
        pace.took(1.0, 0, pace.cut(0))  # the machine is slower now
    assert pace.cut(0) == pace.usual_chunk


def test_the_cut_stays_where_times_are_noisy() -> None:
    pace, rng = Pace(1), random.Random(5)
    read(pace, 0.006, 0.0002)
    before = pace.cut(0)
    for _ in range(300):
        pace.took((0.006 + 0.0002 * before) * rng.uniform(0.8, 1.3), 0, before)
        assert pace.cut(0) == before
