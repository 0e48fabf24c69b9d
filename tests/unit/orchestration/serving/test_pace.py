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
        chunks.append(min(pace.chunk(0, tokens, 0), tokens))
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
    for chunk in (pace.chunk(1, 900, 0), 64, 32, 16, 8, 8, 8):
        pace.took(0.005 + 0.0009 * chunk, 1, chunk)
    assert pace.chunk(1, 900, 0) == int(CHUNK_STEPS * 0.005 / 0.0009) // MIN_CHUNK * MIN_CHUNK == 8
    assert pace.chunk(0, 900, 0) > ALONE_CHUNK


def test_where_experts_are_read_from_disk_a_chunk_is_as_long_as_can_be() -> None:
    pace = Pace(2, reads_experts=True)
    assert pace.chunk(0, 900, 0) == MAX_CHUNK
    pace.took(5.0, 0, MAX_CHUNK)
    assert pace.chunk(0, 900, 0) == pace.chunk(3, 900, 0) == MAX_CHUNK


MIXTURES = {
    # Seconds in which all weights are read, and those of a token's products; experts, those of a
    # token: Qwen3 30B-A3B with 2 and 8 cores, GLM 4.5 Air and Qwen3-Next 80B with 8.
    "30B-A3B": (0.4, 0.01, 128, 8),
    "30B-A3B, 8 cores": (0.27, 0.0025, 128, 8),
    "Air": (1.0, 0.01, 128, 8),
    "Next": (0.75, 0.0025, 512, 10),
}


def serve(
    pace: Pace, members: int, mixture: str, prompt: int, beside: int, rng: random.Random
) -> tuple[float, list[int]]:
    """Seconds that a prompt takes through members that hold as much each, and its chunks."""
    read_s, token_s, experts, top = MIXTURES[mixture]

    def step_s(n: int) -> float:
        return read_s * (1 - (1 - top / experts) ** n) + token_s * n

    chunks = []
    while prompt > 0:
        chunks.append(min(pace.chunk(beside, prompt, 0), prompt))
        pace.took(beside and step_s(beside), beside, 0)
        pace.took(step_s(chunks[-1] + beside) * rng.uniform(0.9, 1.1), beside, chunks[-1])
        prompt -= chunks[-1]
    passes = [step_s(n + beside) for n in chunks]
    return (sum(passes) + (members - 1) * passes[-1]) / members, chunks


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("members", [1, 2, 4])
def test_chunks_are_as_long_as_reading_experts_for_them_is_worth(
    mixture: str, members: int
) -> None:
    read_s, token_s, experts, top = MIXTURES[mixture]
    pace, rng = Pace(members, routed_share=top / experts), random.Random(3)
    for prompt in (40, 300, 700):
        serve(pace, members, mixture, prompt, 0, rng)
    seconds, _ = serve(pace, members, mixture, 3000, 0, rng)
    longest = (3000 / MAX_CHUNK + members - 1) * (read_s + token_s * MAX_CHUNK) / members
    assert seconds < 1.35 * longest
    seconds, chunks = serve(pace, members, mixture, 3000, 2, rng)
    assert seconds < 4 * 3000 * token_s / members  # reading is to take twice as long as products
    own = [n * token_s for n in chunks]
    assert max(own) < 2 * read_s, "those that decode wait too long"


@pytest.mark.parametrize("seed", range(10))
def test_noise_makes_no_long_chunks_of_what_gains_nothing(seed: int) -> None:
    pace, rng = Pace(1), random.Random(seed)  # 8 B in 4 bits with 2 cores
    chunks = []
    for prompt in (40, 300, 700, 3000, 900, 517, 2300, 33, 1200):
        while prompt > 0:
            chunks.append(min(pace.chunk(0, prompt, 0), prompt))
            pace.took((0.11 + 0.027 * chunks[-1]) * rng.uniform(0.8, 1.2), 0, chunks[-1])
            prompt -= chunks[-1]
    assert sorted(chunks)[int(0.95 * len(chunks))] < 1.5 * ALONE_CHUNK


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("decoding", [0, 1])
def test_tokens_that_attend_to_many_are_not_taken_for_weights(members: int, decoding: int) -> None:
    """Late in a long prompt each takes longer, and chunks get shorter."""
    pace, rng = Pace(members), random.Random(2)
    for prompt in (40, 300, 700, 16_000, 16_000):
        before = 0
        while before < prompt:
            n = min(pace.chunk(decoding, prompt - before, before), prompt - before)
            attended = n * (before + n / 2)
            if decoding:
                pace.took(0.004, 1, 0)
            took = (0.004 + 0.0008 * n + 4e-7 * attended) * rng.uniform(0.9, 1.1)
            pace.took(took, decoding, n, attended)
            assert took < 2 * CHUNK_S
            before += n


@pytest.mark.parametrize("times", [0.25, 2, 4, 20])
@pytest.mark.parametrize("members", [1, 2])
def test_a_machine_that_is_slower_than_before_gets_short_chunks(members: int, times: float) -> None:
    pace, rng = Pace(members), random.Random(2)
    for index, prompt in enumerate((40, 300, 700, 1500, 900, 3000, 3000)):
        slower = times if index > 4 else 1
        before = 0
        while before < prompt:
            n = min(pace.chunk(0, prompt - before, before), prompt - before)
            attended = n * (before + n / 2)
            took = slower * (0.004 + 0.0008 * n) * rng.uniform(0.9, 1.1)
            pace.took(took, 0, n, attended)
            assert index < 6 or took < max(1.5 * CHUNK_S, slower * 0.05 * ALONE_CHUNK)
            before += n


def test_where_the_cut_is_computed_with_it_is_long_for_a_mixture() -> None:
    pace, rng = Pace(1, routed_share=1 / 16), random.Random(2)
    for prompt in (40, 300, 700, 1500, 900, 2100, 333, 3000):
        done = 0
        while done < prompt:
            n = min(pace.cut(0) - done % pace.cut(0), prompt - done)
            reading = 0.35 * (1 - (15 / 16) ** n)
            pace.took((reading + 0.001 * n) * rng.uniform(0.9, 1.1), 0, n, n * (done + n / 2))
            done += n
    assert pace.cut(0) == 1024


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
