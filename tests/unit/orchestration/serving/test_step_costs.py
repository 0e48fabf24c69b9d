"""What steps take, fitted."""

from __future__ import annotations

import random

import pytest

from exo.orchestration.serving.step_costs import PromptCosts


@pytest.mark.parametrize(
    ("a", "c", "d"),
    [(0.3, 0.002, 4e-7), (0.0, 0.03, 0.0), (0.05, 0.0, 0.0), (0.1, 0.001, 0.0), (0.0, 0.0, 1e-6)],
)
def test_costs_are_found_again(a: float, c: float, d: float) -> None:
    costs, rng = PromptCosts(), random.Random(4)
    assert not costs.tells
    for _ in range(40):
        n = rng.choice((8, 32, 48, 200, 512))
        k = n * rng.uniform(n / 2, 8000)
        asked = 1 - (15 / 16) ** n
        costs.add(n, k, asked, a * asked + c * n + d * k)
    assert costs.tells
    own, weights = costs.seconds(100, 5000.0, 0.9)
    assert own == pytest.approx(c * 100 + d * 5000, rel=1e-3, abs=1e-6)
    assert weights == pytest.approx(a * 0.9, rel=1e-3, abs=1e-6)


def test_steps_of_one_length_tell_nothing() -> None:
    costs, rng = PromptCosts(), random.Random(4)
    for i in range(200):
        costs.add(32, 32 * (32 * i + 16), 1.0, 0.1 * rng.uniform(0.8, 1.2))
    assert not costs.tells and costs.seconds(32, 0.0, 1.0) == (0.0, 0.0)


def test_nothing_is_below_0_and_a_hiccup_is_no_news() -> None:
    costs, rng = PromptCosts(), random.Random(4)
    for i in range(300):
        n = rng.choice((8, 32, 48))
        took = 0.01 * n * rng.uniform(0.5, 1.5)
        costs.add(n, float(n * n), 1.0, 60.0 if i % 50 == 49 else took)
        assert min(costs.seconds(n, float(n * n), 1.0)) >= 0
    assert sum(costs.seconds(32, 32.0 * 32, 1.0)) < 1.0
