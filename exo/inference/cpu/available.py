"""Whether this installation has the compiled kernels."""

from __future__ import annotations

from functools import cache

MISSING = (
    "exo's own CPU kernels are not built here, so models run 20 to 50 times slower through MLX. "
    "Install a C++ compiler and Python's headers (Debian: apt install g++ python3-dev, Fedora: "
    "dnf install gcc-c++ python3-devel) and start exo again with scripts/exo, or install it again "
    "with pip."
)


@cache
def why_not() -> str:
    """Empty where the cpu engine can run, else what keeps it from running and what to do."""
    try:
        from exo.inference.cpu import _native
    except ImportError as error:
        return f"{MISSING} ({error})"
    try:
        _native.isa()
    except RuntimeError as error:
        return str(error)
    return ""
