"""Which namespaces a test may make: in a container without rights, or as a user, often none."""

from __future__ import annotations

import functools
import shutil
import subprocess

AS_ANYBODY = ("--user", "--map-root-user")


@functools.cache
def can_unshare(*flags: str) -> bool:
    """Whether `unshare` works with these."""
    command = ["unshare", *flags, "true"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def can_make_networks() -> bool:
    """Whether scripts/lan.py works: its namespaces as anybody's, or else as root's."""
    kinds = ("--net", "--mount")
    return shutil.which("ip") is not None and (
        can_unshare(*AS_ANYBODY, *kinds) or can_unshare(*kinds)
    )
