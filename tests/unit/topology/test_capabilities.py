import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from exo.errors import InvalidRequest
from exo.topology.capabilities import (
    GB,
    _probe_nvidia,
    cgroup_memory,
    parse_memory,
    probe,
    refreshed,
    without_marks,
)


def test_the_probe_describes_this_machine() -> None:
    found = probe()
    assert 0 < found.memory_available_bytes <= found.memory_total_bytes
    assert found.memory_total_bytes <= psutil.virtual_memory().total or found.accelerator == "cuda"
    assert found.cores >= 1
    assert found.chip
    assert refreshed(found).chip == found.chip
    assert refreshed(found, promised=1 << 60).memory_available_bytes == 0


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("Intel(R) Xeon(R) Processor", "Intel Xeon"),
        ("Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz", "Intel Core i5-8250U"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "Intel Xeon Platinum 8481C"),
        ("13th Gen Intel(R) Core(TM) i7-13700K", "13th Gen Intel Core i7-13700K"),
        ("AMD Ryzen 7 7700X 8-Core Processor", "AMD Ryzen 7 7700X"),
        ("AMD Ryzen 5 5600G with Radeon Graphics", "AMD Ryzen 5 5600G"),
        ("AMD Ryzen AI 9 HX 370 w/ Radeon 890M", "AMD Ryzen AI 9 HX 370"),
        ("AMD EPYC", "AMD EPYC"),
        ("QEMU Virtual CPU version 2.5+", "QEMU Virtual CPU version 2.5+"),
        ("Raspberry Pi 5 Model B Rev 1.0", "Raspberry Pi 5 Model B Rev 1.0"),
        (" Processor", "Processor"),
    ],
)
def test_a_processor_is_named_as_people_name_it(name: str, read: str) -> None:
    assert without_marks(name) == read


def test_memory_can_be_overridden() -> None:
    found = probe(parse_memory("3GB"))
    assert found.memory_total_bytes == found.memory_available_bytes == 3 * 10**9


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12GB", 12 * 10**9), ("512 MiB", 512 * 2**20), ("1.5g", 15 * 10**8), ("77", 77)],
)
def test_memory_is_read_as_people_write_it(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-3GB", "0", "1.2.3GB", "12XB"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write it like 12GB"):
        parse_memory(text)


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    inner = tmp_path / "system.slice" / "exo.service"
    inner.mkdir(parents=True)
    (tmp_path / "system.slice" / "memory.max").write_text("4000\n")
    (tmp_path / "system.slice" / "memory.current").write_text("1500\n")
    (inner / "memory.max").write_text("max\n")
    assert cgroup_memory(tmp_path, "/system.slice/exo.service") == (4000, 1500)
    (inner / "memory.max").write_text("3000\n")
    (inner / "memory.current").write_text("100\n")
    assert cgroup_memory(tmp_path, "/system.slice/exo.service") == (3000, 100)


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    v1 = tmp_path / "memory"
    v1.mkdir()
    (v1 / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert cgroup_memory(tmp_path, "/") == (0, 0)


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [(None, "0"), ("", "0"), ("1", "1"), ("1,0", "1"), ("GPU-5f3a,GPU-77aa", "GPU-5f3a")],
)
def test_the_card_is_the_one_that_cuda_takes(
    visible: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML knows all cards, whichever a process may use. A fake of it, as no card is here."""
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=str,
        nvmlDeviceGetHandleByUUID=str,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(total=24 * GB, free=23 * GB),
        nvmlDeviceGetName=lambda card: f"card {card}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = probe(parse_memory("1GB"))
    found = _probe_nvidia(machine)
    assert found is not None
    assert found.chip == f"card {chosen}"
    assert (found.accelerator, found.memory_available_bytes) == ("cuda", 23 * GB)
