"""How many threads compute."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

import psutil


def usable_cores() -> int:
    """Physical cores this process may use: affinity and the cgroup's quota respected."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = {_core_of(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota(Path("/sys/fs/cgroup")) or len(cores)))


def _core_of(cpu: int) -> tuple[str, str]:
    """(package, core) of a logical processor; itself where the system does not say."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package = (topology / "physical_package_id").read_text("utf-8").strip()
        return package, (topology / "core_id").read_text("utf-8").strip()
    except OSError:
        return "", str(cpu)


def _quota(root: Path) -> int | None:
    """Processors' worth of time the cgroup grants; None without a limit.

    Format of cpu.max: https://docs.kernel.org/admin-guide/cgroup-v2.html, "$MAX $PERIOD"."""
    try:
        quota, period = (root / "cpu.max").read_text("utf-8").split()
        return None if quota == "max" else ceil(int(quota) / int(period))
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text("utf-8"))
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return ceil(quota_us / period_us) if quota_us > 0 else None
