"""`exo download`: brings a model's files here, with a bar for each file and one for all."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from exo.cli.settings import home
from exo.download.progress import Progress
from exo.download.store import ModelStore, default_sources
from exo.models.card import default_model

_LINE_S = 5.0
"""Between two lines where there is no terminal to draw bars on."""

_SMALL = 1 << 20
"""Bytes below which a file gets no bar of its own: it would be gone before it is read."""


def download(args: argparse.Namespace) -> int:
    """Fetch the model, or what a newer revision changed of it."""
    model = args.model or default_model()
    models_dir = home() / "models"
    store = ModelStore(models_dir, default_sources(models_dir))
    shown = DownloadView()
    try:
        path = asyncio.run(_fetch(store, model, shown))
    finally:
        shown.close()
    print(f"{model} is here: {path}{shown.summary()}")  # noqa: T201
    return 0


async def _fetch(store: ModelStore, model: str, shown: DownloadView) -> Path:
    """Ctrl-C stops cleanly: what came is kept."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, store.close)
    return await store.ensure(model, shown, renew=True)


class DownloadView:
    """Progress events as bars, or as a line now and then where stderr is no terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._bars: dict[str, tqdm[Any]] = {}
        self._total: tqdm[Any] | None = None
        self._began: tuple[float, int] | None = None
        self._done = 0
        self._line_at = 0.0
        self._said = ""

    def __call__(self, progress: Progress) -> None:
        if progress.warning:
            self._say(progress.warning)
        if not progress.total:
            text = f"{progress.phase} {progress.detail}"
            if text != self._said:
                self._said = text
                self._say(text)
            return
        if self._began is None:
            # What a first event finds was here before.
            self._began = (time.monotonic(), progress.done)
        self._done = progress.done
        if self._is_terminal:
            self._draw(progress)
        elif time.monotonic() - self._line_at > _LINE_S:
            self._line_at = time.monotonic()
            share = 100 * progress.done // progress.total
            self._say(
                f"{progress.phase} {progress.detail} {share}% of {progress.total / 1e6:.0f} MB, "
                f"{self._rate() / 1e6:.0f} MB/s"
            )

    def summary(self) -> str:
        """What came, and how fast; empty where nothing had to."""
        if self._began is None or self._done <= self._began[1]:
            return ""
        came = self._done - self._began[1]
        return f" ({came / 1e6:.0f} MB, {self._rate() / 1e6:.0f} MB/s)"

    def close(self) -> None:
        for bar in [*self._bars.values(), *([self._total] if self._total is not None else [])]:
            bar.close()
        self._bars.clear()

    def _rate(self) -> float:
        assert self._began is not None
        began, had = self._began
        return (self._done - had) / max(time.monotonic() - began, 1e-3)

    def _draw(self, progress: Progress) -> None:
        if self._total is None:
            self._total = _bar(progress.detail, progress.total, progress.done)
        _move(self._total, progress.done)
        if progress.file_total < _SMALL:
            return
        bar = self._bars.get(progress.file)
        if bar is None:
            bar = _bar(progress.file, progress.file_total, progress.file_done)
            self._bars[progress.file] = bar
        _move(bar, progress.file_done)

    def _say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)


def _bar(name: str, total: int, done: int) -> tqdm[Any]:
    return tqdm(
        total=total,
        initial=done,
        desc=name,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        leave=False,
        file=sys.stderr,
    )


def _move(bar: tqdm[Any], done: int) -> None:
    bar.update(done - bar.n)
