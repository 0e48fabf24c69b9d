"""How log lines look, and which request they are about."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is served here, "" outside of any."""

KEPT_LINES = 500
"""Of the log, in memory, for who looks at a node from another machine."""

TEXT = "%(asctime)s %(levelname).1s %(name)s %(message)s"


class JsonFormatter(logging.Formatter):
    """A line of JSON each: time (RFC 3339, UTC), level, logger, message, and where there are any
    the request's id and the exception."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := request_id.get():
            said["request_id"] = name
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


class _Kept(logging.Handler):
    """The last lines, from INFO on, whatever of it is shown."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter(TEXT))
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


_kept = _Kept()


def show_from(level: int) -> None:
    """Show exo's lines from this level on, and keep the last ones from INFO on."""
    logging.basicConfig(format=TEXT)
    for handler in logging.getLogger().handlers:
        handler.setLevel(level)
    ours = logging.getLogger("exo")
    ours.setLevel(min(level, logging.INFO))
    if _kept not in ours.handlers:
        ours.addHandler(_kept)


def recent_lines(count: int) -> list[str]:
    """The last lines of the log, oldest first; none where nobody called `show_from`."""
    return list(_kept.lines)[-count:] if count > 0 else []


def log_as(form: str) -> None:
    """`form` "text" or "json", for all handlers there are."""
    formatter = JsonFormatter() if form == "json" else logging.Formatter(TEXT)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
