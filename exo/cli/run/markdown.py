"""An answer as Markdown in a terminal, drawn as it comes."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from exo.cli.run.answer import Answer
from exo.cli.run.display import Plain, say
from exo.errors import ExoError

_FRAME_S = 0.05
"""A terminal is drawn at most so often: a frame of long Markdown takes milliseconds."""

_MARGIN = 2
"""Lines of the terminal that are left free under what is still being written."""


class Rendered(Plain):
    """Markdown. Blocks that are finished are printed; only the last one is drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(highlight=False)
        self._open = ""  # the block that is being written
        self._blocks = 0
        self._live: Live | None = None
        self._drawn = 0.0
        self._thinks = False

    def thought(self, piece: str) -> None:
        self._thinks = True
        super().thought(piece)

    def text(self, piece: str) -> None:
        self.line.clear()
        if self._live is None:
            if self._thinks:
                say("\n\n")
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._open += piece
        if (now := time.monotonic()) - self._drawn < _FRAME_S:
            return
        self._drawn = now
        finished, self._open = split_finished(self._open)
        self._print(finished)
        self._live.update(self._end_of(self._open), refresh=True)

    def done(self, answer: Answer) -> None:
        self._close()
        self.line.clear()
        say(answer.numbers())

    def failed(self, error: ExoError) -> None:
        self._close()
        super().failed(error)

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(self._open)
        self._open, self._blocks, self._thinks = "", 0, False

    def _print(self, text: str) -> None:
        if text.strip():
            if self._blocks:
                self._console.print()
            self._console.print(Markdown(text))
            self._blocks += 1

    def _end_of(self, text: str) -> Segments:
        """As many of its lines as the terminal can draw over again."""
        lines = self._console.render_lines(Markdown(text), pad=False)
        if self._blocks:
            lines = [[], *lines]
        shown = lines[-max(1, self._console.height - _MARGIN) :]
        return Segments(segment for line in shown for segment in [*line, Segment.line()])


def split_finished(text: str) -> tuple[str, str]:
    """The blocks of Markdown that no further text can change, and the rest: the last block, which
    may go on, as a list does after an empty line."""
    # The parser of rich's own Markdown.
    blocks = [
        token.map[0]
        for token in Markdown(text).parsed
        if token.level == 0 and token.map and token.nesting >= 0
    ]
    if len(blocks) < 2:
        return "", text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: blocks[-1]]), "".join(lines[blocks[-1] :])
