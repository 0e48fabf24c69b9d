"""Stop strings that never leak into the output, also across token borders."""

from __future__ import annotations

from collections.abc import Sequence

from exo.models.markup.reader import begun


class StopStrings:
    """Holds back text that may be the beginning of a stop string until it is known not to be."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that can be given out, the stop string that was found if one was)."""
        pending = self._held + text
        found = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            self._held = ""
            at, stop = min(found)
            return pending[:at], stop
        keep = begun(pending, self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def finish(self) -> str:
        """What is still held back once no more text comes."""
        held, self._held = self._held, ""
        return held
