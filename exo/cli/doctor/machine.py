"""This machine: what computes, its memory, disk, limits and network interfaces."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from exo.cli.doctor.finding import Finding
from exo.cli.open_files import ENOUGH, allow_many
from exo.cli.settings import existing_part
from exo.download.hub_cache import cache_folder
from exo.inference.choose import make_engine
from exo.inference.cpu.available import why_not
from exo.networking.discovery.interfaces import all_interfaces, lan_interfaces
from exo.topology.capabilities import GB, DeviceCapabilities, probe

LITTLE_DISK = 5 * GB
SLOW_DISK = 100e6  # bytes a second
LITTLE_MEMORY_SHARE = 0.2
FEW_FILES = 1024
_PROBE_BYTES = 64 * 2**20


def machine(home: Path, engine: str, interfaces: tuple[str, ...]) -> Iterator[Finding]:
    """Each check in turn; some take a second."""
    found = probe()
    yield from _computing(engine, found)
    if found.accelerator == "cuda":
        yield _card_memory(found)
    yield _memory()
    yield from _folders(home)
    yield _files()
    yield _network(interfaces)


def _computing(name: str, found: DeviceCapabilities) -> Iterator[Finding]:
    if platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64") and (reason := why_not()):
        rebuild = "install a C++ compiler and run scripts/setup again, or pip install exo anew"
        yield Finding("kernels", "wrong", reason, rebuild)
    engine = make_engine(name)
    rate = engine.measure_read_rate()
    kernels = f" with {_instructions()} kernels" if engine.name == "cpu" else ""
    yield Finding(
        "engine",
        "ok",
        f"{engine.name}{kernels} on {found.chip} ({found.accelerator}), reads weights at "
        f"{_short(rate / 1e9)} GB/s: about {_short(rate / 4.6e9)} tokens a second of an 8B model "
        "in 4 bit",
    )


def _instructions() -> str:
    from exo.inference.cpu import _native

    return _native.isa()


def _card_memory(card: DeviceCapabilities) -> Finding:
    """Where an NVIDIA card computes, models take its memory."""
    free, total = card.memory_available_bytes, card.memory_total_bytes
    text = f"{free / GB:.1f} of {total / GB:.1f} GB free for models on {card.chip}"
    if free < LITTLE_MEMORY_SHARE * total:
        return Finding("GPU memory", "note", f"only {text}", "nvidia-smi shows who takes it")
    return Finding("GPU memory", "ok", text)


def _memory() -> Finding:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    free = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GB free"
    if memory.available < LITTLE_MEMORY_SHARE * memory.total:
        largest = max(psutil.process_iter(["name", "memory_info"]), key=_resident)
        who = f"{largest.info['name']} takes {_resident(largest) / GB:.1f} GB"
        return Finding("memory", "note", f"only {free}; {who}", "end what you do not need")
    if swap.used > memory.total / 4:
        text = f"{free}, but {swap.used / GB:.1f} GB are swapped out"
        return Finding("memory", "note", text, "end what you do not need; --memory limits exo")
    return Finding("memory", "ok", free)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}"


def _resident(process: psutil.Process) -> int:
    memory = process.info["memory_info"]
    return memory.rss if memory is not None else 0


def _folders(home: Path) -> Iterator[Finding]:
    for name, folder, setting in (
        ("data folder", home, "EXO_HOME"),
        ("model cache", cache_folder(), "HF_HOME"),
    ):
        there = existing_part(folder)
        if not os.access(there, os.W_OK):
            mend = f"set {setting} to a folder of your own"
            yield Finding(name, "wrong", f"{folder} cannot be written", mend)
            continue
        yield _disk(name, folder, there, setting)


def _disk(name: str, folder: Path, there: Path, setting: str) -> Finding:
    free = shutil.disk_usage(there).free
    if free < LITTLE_DISK:
        text = f"{folder} is on a disk with {free / GB:.1f} GB free"
        return Finding(name, "wrong", text, f"`exo du` and `exo rm MODEL`, or set {setting}")
    try:
        rate = _write_rate(there)
    except OSError as error:
        return Finding(name, "wrong", f"{folder}: {error.strerror}", f"set {setting}")
    text = f"{folder}, {free / GB:.0f} GB free, written at {rate / 1e6:,.0f} MB/s"
    if rate < SLOW_DISK:
        return Finding(name, "note", text, f"models load slowly: a faster disk by {setting}")
    return Finding(name, "ok", text)


def _write_rate(folder: Path) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        block = os.urandom(2**20)
        began = time.monotonic()
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _PROBE_BYTES / (time.monotonic() - began)


def _files() -> Finding:
    most = allow_many()
    if most < FEW_FILES:
        text = f"at most {most} files may be open; many clients need more"
        return Finding("open files", "note", text, f"ulimit -n {ENOUGH} as root, before exo")
    return Finding("open files", "ok", f"{most} may be open")


def _network(chosen: tuple[str, ...]) -> Finding:
    known = {i.name: i for i in all_interfaces()}
    suited = [i for i in lan_interfaces() if i.kind != "loopback"]
    others = sorted(set(known) - {i.name for i in suited} - {"lo", "lo0"})
    best = f"--interface {suited[0].name}" if suited else "connect this machine to the network"
    for name in chosen:
        if name not in {i.name for i in suited} and name not in ("lo", "lo0"):
            text = f"{name} is a bridge, a tunnel or public: other machines are not on it"
            return Finding("interfaces", "wrong", text, best)
    beside = f"; not used: {', '.join(others)}" if others else ""
    if not suited:
        text = f"no interface leads to a private LAN{beside}"
        return Finding("interfaces", "note", text, best)
    used = ", ".join(f"{i.name} {i.address} ({i.kind})" for i in suited)
    return Finding("interfaces", "ok", used + beside)
