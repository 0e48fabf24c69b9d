"""What steps take by what is in them, fitted as they pass."""

from __future__ import annotations

SURPRISE = 5.0
"""A step that took so many times as long as expected is a hiccup of the machine, no news of the
model."""

_MEMORY = 0.98
"""Of what a step counts, when another one has passed."""

_UNITS = (256.0, 2.0**20, 1.0)
"""In which tokens, those they attend to and weights are counted, so that the numbers are of one
size."""

_FOLLOWS = 1e-9
"""What is left of a square by rounding."""

_NEWS = 0.3
"""Of the newest step in how many times as long as expected steps take."""

_OTHER = 1.6
"""So many times as long, or as short, and the machine is another than it was: busy, hot. Steps of
before beside those of now would say that what differs between them is what they hold."""

_WIDE = 0.005
"""Points so far from one direction that noise hardly turns the line through them."""


class Line:
    """y = a + c x through points of which the latest count most, by least squares."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        expected = self.at(x)
        if expected is not None and self._n > 3:
            y = min(y, SURPRISE * expected)
        self._n = _MEMORY * self._n + 1
        self._x = _MEMORY * self._x + x
        self._y = _MEMORY * self._y + y
        self._xx = _MEMORY * self._xx + x * x
        self._xy = _MEMORY * self._xy + x * y

    @property
    def has_slope(self) -> bool:
        """Whether points of more than one x were seen."""
        return self._n * self._xx - self._x**2 > 1e-3 * self._n * self._xx

    def at(self, x: float) -> float | None:
        """None before the first point."""
        if not self._n:
            return None
        a, c = self.coefficients()
        return a + c * x

    def coefficients(self) -> tuple[float, float]:
        """a and c, neither below 0; c is 0 where it is not known."""
        if not self.has_slope:
            return self._y / self._n, 0.0
        c = (self._n * self._xy - self._x * self._y) / (self._n * self._xx - self._x**2)
        c = max(c, 0.0)
        return max((self._y - c * self._x) / self._n, 0.0), c


class PromptCosts:
    """What tokens of prompts take in a step: `c n + d k + a b` seconds, where n of them attend to k
    earlier ones in all, and ask for b of the weights. By least squares, of which the latest steps
    count most."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._n = 0.0
        self._xx = [[0.0] * 3 for _ in range(3)]
        self._xy = [0.0] * 3
        self._latest = [0.0] * 3
        self._ratio = 1.0
        self._found = [0.0] * 3
        self.tells = False
        """Whether steps were once so unlike that noise hardly moves what they say."""

    def add(self, n: int, k: float, b: float, seconds: float) -> None:
        x = [own / unit for own, unit in zip((n, k, b), _UNITS, strict=True)]
        if self._n > 3:
            expected = sum(own * part for own, part in zip(self._latest, x, strict=True))
            seconds = min(seconds, SURPRISE * expected)
            self._ratio += _NEWS * (seconds / max(expected, 1e-9) - self._ratio)
            if not 1 / _OTHER < self._ratio < _OTHER:
                self._forget()
        self._n = _MEMORY * self._n + 1
        for i in range(3):
            self._xy[i] = _MEMORY * self._xy[i] + seconds * x[i]
            for j in range(3):
                self._xx[i][j] = _MEMORY * self._xx[i][j] + x[i] * x[j]
        self._latest, spread = self._solved()
        if spread > _WIDE:
            self.tells, self._found = True, self._latest

    def seconds(self, n: int, k: float, b: float) -> tuple[float, float]:
        """Of the tokens, and of the weights, as steps said that were unlike enough."""
        c, d, a = (own / unit for own, unit in zip(self._found, _UNITS, strict=True))
        return c * n + d * k, a * b

    def _solved(self) -> tuple[list[float], float]:
        """None below 0: what comes out below is left out, and the rest solved again. And how much
        of b does not follow from n and k, as a share."""
        found, spread = self._eliminated([0, 1, 2])
        left = [0, 1, 2]
        while min(found) < 0:
            left.remove(found.index(min(found)))
            found, _ = self._eliminated(left)
        return found, spread

    def _eliminated(self, of: list[int]) -> tuple[list[float], float]:
        """By Gauss; what follows from those before it gets nothing. And what is left of the last
        one's square, as a share of it."""
        rows = [[*(self._xx[i][j] for j in of), self._xy[i]] for i in of]
        shares = []
        for i, row in enumerate(rows):
            whole = self._xx[of[i]][of[i]]
            shares.append(row[i] / whole if whole else 0.0)
            if shares[i] < _FOLLOWS:
                row[:] = [0.0] * len(row)
                continue
            for below in rows[i + 1 :]:
                factor = below[i] / row[i]
                below[:] = [one - factor * other for one, other in zip(below, row, strict=True)]
        found = [0.0] * 3
        for i in reversed(range(len(of))):
            known = sum(rows[i][j] * found[of[j]] for j in range(i + 1, len(of)))
            found[of[i]] = (rows[i][-1] - known) / rows[i][i] if rows[i][i] else 0.0
        return found, shares[-1] if shares else 0.0
