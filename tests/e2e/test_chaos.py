"""`scripts/chaos`, for as long as the suite can afford: every answer is exact whatever dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import can_make_networks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not can_make_networks(), reason="needs network namespaces")
@pytest.mark.parametrize(("seed", "at_once"), [(1, 1), (2, 2)])
def test_every_answer_is_exact(seed: int, at_once: int, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/chaos", "--answers", "32", "--every", "1.5"]
    command += ["--seed", str(seed), "--at-once", str(at_once), "--keep", tmp_path]
    command += ["--svg", tmp_path / "chaos.svg"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 of 32 answers exact" in done.stdout
    assert (tmp_path / "chaos.svg").read_text().startswith("<svg")


@pytest.mark.skipif(not can_make_networks(), reason="needs network namespaces")
def test_nodes_two_hundred_milliseconds_apart_share_a_ring(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/chaos", "--answers", "4", "--every", "1000"]
    command += ["--delay", "0.05", "--tokens", "20", "--nodes", "2", "--keep", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 answers exact" in done.stdout
