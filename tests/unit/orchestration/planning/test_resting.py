"""How long a node that is lost again and again, or slow, gets no layers."""

from __future__ import annotations

from exo.orchestration.planning.resting import (
    FIRST_REST_S,
    LONGEST_REST_S,
    WITHIN_S,
    Resting,
    is_slow,
    slow_among,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.resting = Resting(lambda: self.now)

    def lose(self, times: int, every_s: float) -> None:
        for _ in range(times):
            self.now += every_s
            self.resting.lost("wlan")

    def rest_s(self) -> float:
        """From now until it gets layers; 0 if it does."""
        return max(0.0, self.resting.rest_s) if "wlan" in self.resting.reasons() else 0.0


def test_who_is_lost_seldom_comes_back_at_once() -> None:
    clock = Clock()
    clock.lose(2, 1.0)
    assert clock.rest_s() == 0.0
    clock.lose(9, WITHIN_S)
    assert clock.rest_s() == 0.0 and not clock.resting.reasons()


def test_three_losses_in_a_minute_are_a_rest_and_each_further_one_a_longer_one() -> None:
    clock = Clock()
    clock.lose(3, 10.0)
    assert clock.rest_s() == FIRST_REST_S
    assert "again and again; it gets layers in 30 s" in clock.resting.reasons()["wlan"]
    for times in range(1, 9):
        clock.lose(1, 90.0)
        assert clock.rest_s() == min(FIRST_REST_S * 2**times, LONGEST_REST_S)
    assert "other" not in clock.resting.reasons()


def test_it_is_forgiven() -> None:
    clock = Clock()
    clock.lose(4, 5.0)
    rest_s = clock.rest_s()
    clock.now += rest_s + 0.1
    assert clock.rest_s() == 0.0
    clock.now += LONGEST_REST_S
    clock.lose(2, 1.0)
    assert clock.rest_s() == 0.0


def test_who_is_slow_rests_and_longer_if_it_still_is() -> None:
    clock = Clock()
    clock.resting.slow("wlan", 11.7)
    assert clock.rest_s() == FIRST_REST_S
    why = clock.resting.reasons()["wlan"]
    assert why == "it computes 12 times slower than it did; it gets layers in 30 s" and is_slow(why)
    clock.now += 10
    clock.resting.slow("wlan", 40)  # said before it lost its layers
    assert clock.rest_s() == FIRST_REST_S - 10
    clock.now += 21
    clock.resting.slow("wlan", 9)
    assert clock.rest_s() == 2 * FIRST_REST_S


def test_slow_is_who_is_slower_than_it_did_and_the_others_are_not() -> None:
    ring = ["a", "b", "c"]
    assert slow_among(ring, {"a": 1.0, "b": 10.0, "c": 1.5}) == {"b": 10.0}
    assert slow_among(ring, {"a": 7.0, "b": 1.0, "c": 1.0}) == {}
    assert slow_among(ring, {"a": 30.0, "b": 10.0, "c": 8.0}) == {}  # they share what slows them
    assert slow_among(ring, {"a": 30.0, "b": 1.0}) == {}  # who knows what the third one does
    assert slow_among(["a"], {"a": 9.0, "b": 0.0}) == {"a": 9.0}
