"""How log lines look, and which request they are about."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is served here, "" outside of any."""

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


def log_as(form: str) -> None:
    """`form` "text" or "json", for all handlers there are."""
    formatter = JsonFormatter() if form == "json" else logging.Formatter(TEXT)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
