"""How many tokens of a prompt go into a step, by how long steps take."""

from __future__ import annotations

import pytest

from exo.orchestration.serving.pace import (
    ALONE_CHUNK,
    CHUNK_S,
    CHUNK_STEPS,
    COLD_CHUNK,
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
    assert pace.chunk(0) == COLD_CHUNK
    pace.took(5.0, 0, COLD_CHUNK)
    assert pace.chunk(0) == pace.chunk(3) == COLD_CHUNK
