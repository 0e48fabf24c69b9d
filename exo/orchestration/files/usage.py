"""Which models are used on this machine: how much lately, and when last."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from exo import json_text

logger = logging.getLogger(__name__)

HALF_LIFE_S = 7 * 86400.0
"""A request counts half as much after this time: longer holds on to what was once popular."""

_WRITE_EVERY_S = 10.0


@dataclass(frozen=True)
class _Use:
    score: float  # requests, each halved every HALF_LIFE_S until `last`
    last: float  # seconds since 1970

    def at(self, now: float) -> float:
        return self.score * math.exp2(-max(0.0, now - self.last) / HALF_LIFE_S)


class Usage:
    """Kept in a small file, which nodes of one machine share; what two of them write at the same
    moment may count once."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._unwritten: dict[str, list[float]] = {}  # when each was used
        self._written_at = 0.0

    def note(self, model_id: str) -> None:
        """A request for a model was answered."""
        self._unwritten.setdefault(model_id, []).append(time.time())
        if time.monotonic() - self._written_at > _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Save what was noted; failing to is told in the log alone, as nothing depends on it."""
        self._written_at = time.monotonic()
        if not self._unwritten:
            return
        saved = {model: vars(use) for model, use in self._uses().items()}
        fresh = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(saved, indent=1))
            fresh.replace(self._file)
        except OSError as error:
            logger.warning("what models are used is not remembered: %s", error)
        else:
            self._unwritten.clear()

    def most_used(self) -> list[str]:
        """Models by how much they were used lately, the most first."""
        now = time.time()
        return [model for model, _ in sorted(self._uses().items(), key=lambda one: -one[1].at(now))]

    def last_used(self) -> dict[str, float]:
        """When each model was used last, in seconds since 1970."""
        return {model: use.last for model, use in self._uses().items()}

    def _uses(self) -> dict[str, _Use]:
        uses = self._read()
        for model, times in self._unwritten.items():
            for now in times:
                before = uses.get(model, _Use(0.0, now))
                uses[model] = _Use(before.at(now) + 1.0, max(now, before.last))
        return uses

    def _read(self) -> dict[str, _Use]:
        try:
            saved = json_text.object_in(self._file)
            return {str(m): _Use(float(u["score"]), float(u["last"])) for m, u in saved.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be read and begins anew: %s", self._file, error)
            return {}
