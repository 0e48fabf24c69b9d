"""How long a node that is lost again and again gets no layers."""

from __future__ import annotations

from exo.orchestration.planning.flapping import (
    FIRST_REST_S,
    LONGEST_REST_S,
    WITHIN_S,
    Flapping,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.flapping = Flapping(lambda: self.now)

    def lose(self, times: int, every_s: float) -> None:
        for _ in range(times):
            self.now += every_s
            self.flapping.lost("wlan")

    def rest_s(self) -> float:
        """From now until it gets layers; 0 if it does."""
        return max(0.0, self.flapping.rest_s) if "wlan" in self.flapping.resting() else 0.0


def test_who_is_lost_seldom_comes_back_at_once() -> None:
    clock = Clock()
    clock.lose(2, 1.0)
    assert clock.rest_s() == 0.0
    clock.lose(9, WITHIN_S)
    assert clock.rest_s() == 0.0 and not clock.flapping.resting()


def test_three_losses_in_a_minute_are_a_rest_and_each_further_one_a_longer_one() -> None:
    clock = Clock()
    clock.lose(3, 10.0)
    assert clock.rest_s() == FIRST_REST_S
    assert "again and again; it gets layers in 30 s" in clock.flapping.resting()["wlan"]
    for times in range(1, 9):
        clock.lose(1, 90.0)
        assert clock.rest_s() == min(FIRST_REST_S * 2**times, LONGEST_REST_S)
    assert "other" not in clock.flapping.resting()


def test_it_is_forgiven() -> None:
    clock = Clock()
    clock.lose(4, 5.0)
    rest_s = clock.rest_s()
    clock.now += rest_s + 0.1
    assert clock.rest_s() == 0.0
    clock.now += LONGEST_REST_S
    clock.lose(2, 1.0)
    assert clock.rest_s() == 0.0
