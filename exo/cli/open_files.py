"""How many files and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 65_536
_MACOS_MOST = 10_240
"""OPEN_MAX of its limits.h: what it takes at most where no limit is set."""


def allow_many() -> int:
    """As many as the system lets a process have without asking anybody, up to ENOUGH; that number.
    Shells give 256 on macOS and 1,024 on Linux, out of regard for programs of long ago."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (ENOUGH, _MACOS_MOST):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(ValueError, OSError):  # macOS names less than it takes
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                return most
    return soft
