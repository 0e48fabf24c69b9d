import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exo.errors import EngineFailed, InvalidRequest
from exo.inference.sampling import SamplingParams, sample

LOGITS = np.array([1.0, 3.0, 2.0, 2.5, -1.0], np.float32)


def draws(n: int = 400, **params: object) -> list[int]:
    return [sample(LOGITS, SamplingParams(seed=s, **params), [0], 1).token_id for s in range(n)]


def test_temperature_zero_is_greedy() -> None:
    assert sample(LOGITS, SamplingParams(temperature=0), [], 0).token_id == 1


@given(st.integers(0, 2**64 - 1), st.integers(0, 50))
@example(5522, 11)  # top_p ends 3e-8 from a token's share
def test_a_draw_is_that_of_the_whole_vocabulary_sorted(seed: int, position: int) -> None:
    """What is left out, and float32, are for speed alone."""
    rng = np.random.default_rng(seed % 1000)
    logits = (rng.standard_normal(20000) * rng.uniform(0.5, 6)).astype(np.float32)
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9), (1.9, 0.99), (1e-50, 1.0)):
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        order = np.argsort(-logits, kind="stable")
        weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
        sums = np.cumsum(weights)
        uniform = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        # A millionth to either side may be another token, or have top_p keep one more.
        sides, possible = (1 - 1e-6, 1, 1 + 1e-6), set()
        for by in sides:
            kept = len(sums)
            if top_p < 1:
                kept = int(np.searchsorted(sums, by * top_p * sums[-1])) + 1
            reaches = [side * uniform * sums[kept - 1] for side in sides]
            indices = np.searchsorted(sums, reaches, side="right")
            possible |= {int(order[min(index, kept - 1)]) for index in indices}
        assert sample(logits, params, [0] * position, position).token_id in possible


@given(st.integers(0, 2**64 - 1), st.integers(1, 400), st.floats(0.01, 60))
def test_top_k_is_that_of_the_whole_vocabulary_sorted(seed: int, top_k: int, spread: float) -> None:
    """However few are nearly as likely as the likeliest."""
    rng = np.random.default_rng(seed % 1000)
    logits = (rng.standard_normal(5000) * spread).astype(np.float32)
    order = np.argsort(-logits, kind="stable")[:top_k]
    sums = np.cumsum(np.exp(logits[order].astype(np.float64) - logits.max()))
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=0)).random()
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    found = sample(logits, SamplingParams(temperature=1, top_k=top_k, seed=seed), [], 0)
    assert found.token_id == order[min(index, len(order) - 1)]


@given(st.integers(0, 2**64 - 1), st.integers(0, 50))
def test_the_same_seed_and_position_give_the_same_token(seed: int, position: int) -> None:
    params = SamplingParams(seed=seed)
    history = list(range(position))
    assert sample(LOGITS, params, history, 0) == sample(LOGITS.copy(), params, history, 0)


def test_positions_and_seeds_draw_independently() -> None:
    params = SamplingParams(seed=7, temperature=2.0)
    assert len({sample(LOGITS, params, [0] * p, p).token_id for p in range(60)}) >= 4
    assert len(set(draws(temperature=2.0))) >= 4


def test_frequencies_follow_the_distribution() -> None:
    weights = np.exp(LOGITS) / np.exp(LOGITS).sum()
    counts = np.bincount(draws(4000), minlength=5) / 4000
    assert np.abs(counts - weights).max() < 0.03


def test_top_k_top_p_and_min_p_keep_only_the_likeliest() -> None:
    assert set(draws(top_k=2)) == {1, 3}
    assert set(draws(top_k=1)) == {1}
    assert set(draws(top_p=0.01)) == {1}
    assert set(draws(top_p=0.7)) == {1, 3}
    assert set(draws(min_p=0.5)) == {1, 3}
    assert set(draws(min_p=1.0)) == {1}


def test_penalties_look_at_the_right_tokens() -> None:
    def greedy(history: list[int], prompt: int, **params: float) -> int:
        return sample(LOGITS, SamplingParams(temperature=0, **params), history, prompt).token_id

    # Presence and frequency: generated tokens only.
    assert greedy([1, 0], 2, presence_penalty=2.0) == 1
    assert greedy([0, 1], 1, presence_penalty=2.0) == 3
    assert greedy([0, 1, 1], 1, frequency_penalty=0.3) == 3
    assert greedy([0, 1], 1, frequency_penalty=0.3) == 1
    # Repetition: the prompt too, and negative logits become more negative.
    assert greedy([1], 1, repetition_penalty=2.0) == 3
    lifted = sample(
        np.array([-1.0, -1.1], np.float32),
        SamplingParams(temperature=0, repetition_penalty=1.5),
        [0],
        1,
    )
    assert lifted.token_id == 1


def test_logit_bias_forces_and_forbids() -> None:
    assert set(draws(logit_bias={4: 100.0})) == {4}
    assert 1 not in draws(logit_bias={1: -100.0, 999: 5.0})


def test_logprobs_are_those_of_the_model() -> None:
    token = sample(LOGITS, SamplingParams(temperature=0, logprobs=True, top_logprobs=2), [], 0)
    expected = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert token.logprob == pytest.approx(expected[1])
    assert [i for i, _ in token.top] == [1, 3]
    assert token.top[1][1] == pytest.approx(expected[3])


@given(data=st.data())
def test_the_likeliest_tokens_are_the_first_of_a_stable_sort(data: st.DataObject) -> None:
    value = st.sampled_from([-np.inf, -3.0, 0.0, 1.5, 2.0])
    logits = np.array([*data.draw(st.lists(value, max_size=40)), 1.0], np.float32)
    top = data.draw(st.integers(0, 20))
    params = SamplingParams(temperature=0, logprobs=True, top_logprobs=top)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum())
    expected = np.argsort(-logits, kind="stable")[:top]
    found = sample(logits, params, [], 0)
    assert [token for token, _ in found.top] == list(expected)
    assert [logprob for _, logprob in found.top] == pytest.approx(logprobs[expected], abs=1e-5)
    assert found.logprob == pytest.approx(logprobs[found.token_id], abs=1e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_damaged_logits_are_an_error_not_a_token(broken: float) -> None:
    with pytest.raises(EngineFailed, match="not finite"):
        sample(np.array([1.0, broken], np.float32), SamplingParams(), [], 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", 2.1), ("top_p", 1.5), ("min_p", -1), ("top_k", -1)],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
