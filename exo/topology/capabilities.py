"""What this machine is and how much memory a model may take on it, probed for real."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from exo.errors import InvalidRequest

logger = logging.getLogger(__name__)

GB = 10**9
_PROBE_TIMEOUT_S = 5


@dataclass(frozen=True)
class DeviceCapabilities:
    """One machine. Memory is in bytes, of the kind the model's weights would live in."""

    model: str
    chip: str
    accelerator: str  # "metal", "cuda" or "cpu"
    memory_total_bytes: int
    memory_available_bytes: int
    cores: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.model} ({self.chip}), {self.memory_available_bytes / GB:.1f} of "
            f"{self.memory_total_bytes / GB:.1f} GB free, {self.cores} cores, {self.accelerator}"
        )


def parse_memory(text: str) -> int:
    """Bytes in "12GB", "512 MiB", "1.5g" or a plain number of bytes.

    Raises:
        InvalidRequest: not a positive amount of memory.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    try:
        amount = float(match[1]) if match else 0.0
    except ValueError:
        amount = 0.0
    if match is None or amount <= 0:
        raise InvalidRequest(f"{text!r} is not an amount of memory; write it like 12GB")
    base = 1024 if match[3] else 1000
    return int(amount * base ** "kmgt".index(match[2].lower()) * base if match[2] else amount)


def probe(memory_override: int | None = None) -> DeviceCapabilities:
    """Ask the operating system and the accelerator's driver what this machine is."""
    found = _probe_mac() if platform.system() == "Darwin" else _probe_linux()
    if memory_override is None:
        return found
    return replace(
        found, memory_total_bytes=memory_override, memory_available_bytes=memory_override
    )


def refreshed(known: DeviceCapabilities, promised: int = 0) -> DeviceCapabilities:
    """The same machine with the memory that is free now, less what is promised to somebody who has
    not taken it yet; cheap enough for every heartbeat."""
    if known.accelerator == "cuda":
        found = _probe_nvidia(known) or known
    else:
        found = replace(known, memory_available_bytes=_memory()[1])
    return replace(found, memory_available_bytes=max(0, found.memory_available_bytes - promised))


def free_memory(accelerator: str) -> int:
    """Bytes that are free now, where that accelerator keeps its arrays."""
    if accelerator == "cuda" and (card := _probe_nvidia(_probe_linux())):
        return card.memory_available_bytes
    return _memory()[1]


def _probe_mac() -> DeviceCapabilities:
    total, available = _memory()
    profile = _system_profiler()
    chip = profile.get("chip_type") or _run("sysctl", "-n", "machdep.cpu.brand_string")
    return DeviceCapabilities(
        model=profile.get("machine_name") or _run("sysctl", "-n", "hw.model") or "Mac",
        chip=chip or platform.processor(),
        accelerator="metal" if platform.machine() == "arm64" else "cpu",
        memory_total_bytes=total,
        memory_available_bytes=available,
        cores=psutil.cpu_count(logical=False) or 1,
    )


def _system_profiler() -> dict[str, str]:
    text = _run("system_profiler", "SPHardwareDataType", "-json")
    try:
        return dict(json.loads(text)["SPHardwareDataType"][0]) if text else {}
    except (ValueError, KeyError, IndexError) as error:
        logger.debug("system_profiler said something unexpected: %r", error)
        return {}


def _probe_linux() -> DeviceCapabilities:
    total, available = _memory()
    cpu = DeviceCapabilities(
        model=_read("/sys/devices/virtual/dmi/id/product_name")
        or _read("/proc/device-tree/model")
        or platform.node(),
        chip=cpu_name(),
        accelerator="cpu",
        memory_total_bytes=total,
        memory_available_bytes=available,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    )
    return _probe_nvidia(cpu) or cpu


def _memory() -> tuple[int, int]:
    """Bytes in all and free, of the machine or of the control group this process is confined to."""
    memory = psutil.virtual_memory()
    limit, used = cgroup_memory()
    if not limit:
        return memory.total, memory.available
    return min(memory.total, limit), min(memory.available, limit - used)


def _probe_nvidia(machine: DeviceCapabilities) -> DeviceCapabilities | None:
    """The computing NVIDIA card's memory in place of the machine's, or None without a card."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        card = _card(pynvml)
        memory = pynvml.nvmlDeviceGetMemoryInfo(card)
        name = pynvml.nvmlDeviceGetName(card)
    except pynvml.NVMLError as error:
        logger.debug("no usable NVIDIA card: %s", error)
        return None
    return replace(
        machine,
        chip=name.decode() if isinstance(name, bytes) else str(name),
        accelerator="cuda",
        memory_total_bytes=int(memory.total),
        memory_available_bytes=int(memory.free),
    )


def _card(pynvml: Any) -> Any:
    """The one that CUDA would take: of those that CUDA_VISIBLE_DEVICES leaves, by number or by
    UUID, the first, else of all."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if first.startswith("GPU-"):
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    return pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> tuple[int, int]:
    """(limit, used) in bytes of the tightest control group around this process; (0, 0) if none.

    Reads cgroup v2 (`memory.max`) from the process's own group up to the root, and v1
    (`memory/memory.limit_in_bytes`).
    """
    relative = own if own is not None else _own_cgroup()
    group = root / relative.lstrip("/")
    tightest = (0, 0)
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(root):
            break
        for limit_file, used_file in (
            (folder / "memory.max", folder / "memory.current"),
            (
                folder / "memory" / "memory.limit_in_bytes",
                folder / "memory" / "memory.usage_in_bytes",
            ),
        ):
            limit = _read(limit_file)
            # v1 writes "no limit" as a number near 2**63.
            if (
                limit.isdigit()
                and int(limit) < 2**60
                and (not tightest[0] or int(limit) < tightest[0])
            ):
                tightest = (int(limit), min(int(_read(used_file) or 0), int(limit)))
    return tightest


def _own_cgroup() -> str:
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return line[3:]
    return ""


def cpu_name() -> str:
    """As people name it; the machine's architecture where the system does not say."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return without_marks(line.split(":", 1)[1])
    return platform.machine()


_MARKS = re.compile(
    r"\((?:R|TM)\)|\s+(?:@|with Radeon|w/ Radeon).*|\s+(?:\d+-Core|Processor)\b"
    r"|\s+CPU(?=\s*(?:@|$))",
    re.IGNORECASE,
)


def without_marks(name: str) -> str:
    """A processor's name, as people read it in rows: less what does not tell it from others."""
    return " ".join(_MARKS.sub("", name).split()) or name.strip()


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip("\x00\n ")
    except OSError:
        return ""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("%s: %s", command[0], error)
        return ""
    return done.stdout.strip()
