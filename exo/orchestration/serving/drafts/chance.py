"""How likely a guess is to be right, as it was lately."""

from __future__ import annotations


class Chance:
    """`news`: what the newest guess makes up of it. `hope`: so much of the way back to `first` it
    goes each time that guesses were not tried, so that a change is noticed."""

    def __init__(self, first: float, news: float, hope: float) -> None:
        self.value = first
        self._first, self._news, self._hope = first, news, hope

    def verified(self, right: int, drafted: int) -> None:
        """So many of the guesses made last were right; those after the first wrong one say
        nothing."""
        for number in range(min(right + 1, drafted)):
            hit = 1.0 if number < right else 0.0
            self.value += self._news * (hit - self.value)

    def not_tried(self) -> None:
        self.value += self._hope * (self._first - self.value)
