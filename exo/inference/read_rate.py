"""How fast a machine reads weights, measured once for all the nodes on it.

Nodes of one machine that are asked at the same time would each measure with a share of the memory's
bandwidth: they would be too slow, and all would wait. So they take turns, and what one has found
lately holds for those like it.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from exo import json_text

logger = logging.getLogger(__name__)

FRESH_S = 60.0
"""What another process measured so long ago still holds. Longer would keep what was measured while
the machine did something else."""

TURN_S = 1.0
"""A measurement takes a third of it; whoever waits longer measures beside the other."""


def once_a_machine(file: Path, kind: str, measure: Callable[[], float]) -> float:
    """What `measure` gives, bytes a second, or what it lately gave another process that uses
    `file`, for the same `kind` of engine."""
    kind = f"{platform.node()} {kind}"  # home folders are shared by machines
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=TURN_S):
            known = _read(file)
            rate, at = known.get(kind, (0.0, 0.0))
            if not 0 <= time.time() - at < FRESH_S:
                rate = measure()
                file.write_text(json.dumps({**known, kind: (rate, time.time())}))
            return rate
    except (OSError, NotImplementedError, Timeout) as error:  # one is a file system without locks
        logger.debug("measured without turns: %s", error)
        return measure()


def _read(file: Path) -> dict[str, tuple[float, float]]:
    """By kind, (rate, when); empty where nothing can be read."""
    try:
        data = json_text.object_in(file)
        return {kind: (float(rate), float(at)) for kind, (rate, at) in data.items()}
    except (FileNotFoundError, ValueError, TypeError):
        return {}
