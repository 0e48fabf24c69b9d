"""How long a peer may take to answer before it counts as dead: less where it never takes long.

A cut cable and a frozen process say nothing, and answers stand still until somebody gives up
waiting. One limit for all has to bear the worst Wi-Fi and the busiest machine; a peer that always
answers in a few milliseconds is missed sooner (as in Hayashibara's accrual detectors, 2004, with a
multiple of the longest round trip where they have a distribution).
"""

from __future__ import annotations

LEAST_S = 0.5
"""Shorter silences come from nowhere: a radio that changes its channel, a process that was not
scheduled."""

TIMES_THE_LONGEST = 8.0
"""A peer is dead after so many times the longest of its late round trips."""

MEMORY = 0.95
"""Of the longest round trip, with each that is shorter: by a half in 14 beats."""

ACQUAINTED = 6
"""Answers before anything is known of a peer."""

BRIEF_S = 1.5
"""Who is back so soon was not dead."""

FORGIVEN_S = 600.0
"""How long a peer that was not dead is given the most."""


class Patience:
    """For one peer, over all of its connections. Times are the event loop's, in seconds."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._answers = 0
        self._longest_s = 0.0  # of its round trips, the older the less
        self._gave_up_at = -FORGIVEN_S
        self._generous_until = -FORGIVEN_S

    def answered(self, round_trip_s: float) -> None:
        self._answers += 1
        self._longest_s = max(round_trip_s, MEMORY * self._longest_s)

    def gave_up(self, now: float) -> None:
        """It was silent for too long."""
        self._gave_up_at = now

    def is_back(self, now: float) -> None:
        """The same process as before answers again."""
        if now - self._gave_up_at < BRIEF_S:
            self._generous_until = now + FORGIVEN_S

    def seconds(self, now: float) -> float:
        if self._answers < ACQUAINTED or now < self._generous_until:
            return self._most_s
        return min(max(TIMES_THE_LONGEST * self._longest_s, LEAST_S), self._most_s)
