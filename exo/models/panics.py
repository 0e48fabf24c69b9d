"""Panics of libraries written in Rust."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """They come as a BaseException, which nothing that handles errors would see: as ValueError."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library that reads it gave up: {error}") from error
