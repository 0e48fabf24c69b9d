"""What a download tells of itself: how far it is, from where, how fast, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence

from exo.download.hub_cache import RepoFile
from exo.download.partial_file import Wanted
from exo.download.progress import OnProgress, Progress
from exo.download.transfer import Arrived

SLOW = 1e6
"""Bytes a second below which a download warns."""

PROGRESS_S = 0.1  # between two events
_WINDOW_S = 5.0  # of which the speed is looked at, and how long a failure is shown


class Report:
    """Turns what arrives into progress, a few times a second."""

    def __init__(
        self, repo: str, brought: Sequence[Wanted], on_progress: OnProgress, low_disk: str
    ) -> None:
        self._repo = repo
        self._low_disk = low_disk
        self._trouble, self._trouble_at = "", 0.0
        self._is_slow = False
        self._window: tuple[float, int] | None = None  # when it began, bytes that had come
        self._sizes = {wanted.file.path: wanted.size for wanted in brought}
        self._total = sum(self._sizes.values())
        self._done = dict.fromkeys(self._sizes, 0)
        self._by_source = {"hub": 0, "peer": 0, "disk": 0}
        self._on_progress = on_progress
        self._sent = 0.0

    def arrived(self, event: Arrived) -> None:
        file = event.file
        self._done[file.path] += event.count
        self._by_source[event.kind] += event.count
        now = time.monotonic()
        if event.kind == "disk" and not event.trouble and (event.count or now - self._sent < 1.0):
            # All files say so before the first one moves; that one is hashed is told where nothing
            # else moves.
            return
        whole = self._done[file.path] == self._sizes[file.path]
        if event.trouble:
            self._trouble, self._trouble_at = event.trouble, now
        if event.trouble or whole or now - self._sent > PROGRESS_S:
            self._sent = now
            self._look_at_speed(now)
            is_all = sum(self._done.values()) == self._total
            self.send("verifying" if is_all else "downloading", file)

    def waiting(self, file: RepoFile) -> None:
        """Another process fetches this file; said where nothing else goes on."""
        now = time.monotonic()
        if now - self._sent > 5 * PROGRESS_S:
            self._sent = now
            self._on_progress(Progress("waiting", f"for another process to fetch {file.path}"))

    def _look_at_speed(self, now: float) -> None:
        came = self._by_source["hub"] + self._by_source["peer"]
        began, had = self._window or (now, came)
        if now - began >= _WINDOW_S:
            self._is_slow = came - had < SLOW * (now - began)
            began, had = now, came
        self._window = began, had

    def _warning(self) -> str:
        if self._trouble and time.monotonic() - self._trouble_at < _WINDOW_S:
            return self._trouble
        if self._is_slow:
            return f"slow link: less than {SLOW / 1e6:.0f} MB/s"
        return self._low_disk

    def send(self, phase: str, file: RepoFile | None = None) -> None:
        done = sum(self._done.values())
        self._on_progress(
            Progress(
                phase,
                self._repo,
                done,
                self._total,
                file=file.path if file else "",
                file_done=self._done[file.path] if file else 0,
                file_total=self._sizes[file.path] if file else 0,
                warning=self._warning() if phase == "downloading" else "",
                by_source=tuple(self._by_source.items()),
            )
        )
