"""What every node is doing for every model right now: downloading, loading, ready, failed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exo.download.progress import ENDS, Progress

WINDOW_S = 3.0
"""The current speed is that of the last few seconds."""

SHOWN_S = 30.0
"""How long others hear of what has ended."""


@dataclass
class _Track:
    """One model on this node."""

    progress: Progress
    at: float
    began: float
    had: int  # bytes that were here when it began
    recent: deque[tuple[float, int]] = field(default_factory=deque)


class Activity:
    """This node's own events, noted from any thread, and what peers say of theirs."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._own: dict[str, _Track] = {}
        self._others: dict[str, tuple[Progress, ...]] = {}
        self._mutex = threading.Lock()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def note(self, model_id: str, progress: Progress) -> None:
        """Something happened here for a model."""
        now = time.monotonic()
        with self._mutex:
            track = self._own.get(model_id)
            if track is None or track.progress.phase in ENDS:
                track = self._own[model_id] = _Track(progress, now, now, progress.done)
            if progress.phase != track.progress.phase:
                # Each phase counts its own bytes.
                track.began, track.had = now, progress.done
                track.recent.clear()
            track.recent.append((now, progress.done))
            while track.recent[0][0] < now - WINDOW_S and len(track.recent) > 2:
                track.recent.popleft()
            track.at = now
            track.progress = self._rated(model_id, track, progress, now)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def _rated(self, model_id: str, track: _Track, progress: Progress, now: float) -> Progress:
        then, had = track.recent[0]
        speed = (progress.done - had) / (now - then) if now - then > 0.2 else 0.0
        average = (progress.done - track.had) / max(now - track.began, 0.2)
        return replace(
            progress,
            node_id=self._node_id,
            model_id=model_id,
            speed=max(0.0, speed),
            average_speed=max(0.0, average),
        )

    def of(self, model_id: str) -> Progress:
        """This node's last event for a model it has noted."""
        with self._mutex:
            return self._own[model_id].progress

    def own(self) -> tuple[Progress, ...]:
        """What this node tells its peers: what goes on, and what ended lately."""
        since = time.monotonic() - SHOWN_S
        with self._mutex:
            tracks = self._own.values()
            return tuple(_now(t) for t in tracks if t.progress.phase not in ENDS or t.at > since)

    def heard(self, node_id: str, progress: Sequence[Progress]) -> None:
        """A peer's own account."""
        said = tuple(replace(one, node_id=node_id) for one in progress)
        if self._others.get(node_id, ()) != said:
            self._others[node_id] = said
            self._tell()

    def lost(self, node_id: str) -> None:
        if self._others.pop(node_id, None):
            self._tell()

    def everyone(self) -> list[Progress]:
        """All that is known, this node's first."""
        with self._mutex:
            own = [_now(track) for track in self._own.values()]
        return own + [one for said in self._others.values() for one in said]

    def next_change(self) -> asyncio.Event:
        """Set at the next change. Taken before looking, so that nothing is missed."""
        self._loop = asyncio.get_running_loop()
        return self._changed

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _now(track: _Track) -> Progress:
    """Where nothing moves any more, the last speed is none."""
    if time.monotonic() - track.at > WINDOW_S and track.progress.phase not in ENDS:
        return replace(track.progress, speed=0.0)
    return track.progress


def as_json(progress: Progress) -> dict[str, Any]:
    """One node's work for one model, for API clients. Bytes, bytes a second, seconds."""
    eta = progress.eta_s
    return {
        "model": progress.model_id,
        "node_id": progress.node_id,
        "phase": progress.phase,
        "detail": progress.detail,
        "file": progress.file or None,
        "file_done": progress.file_done,
        "file_total": progress.file_total,
        "done": progress.done,
        "total": progress.total,
        "by_source": dict(progress.by_source),
        "speed": round(progress.speed),
        "average_speed": round(progress.average_speed),
        "eta_s": round(eta, 1) if eta is not None else None,
        "warning": progress.warning or None,
    }
