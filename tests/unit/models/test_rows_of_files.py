"""Rows of a table that are read from where it lies."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from exo.models.checkpoint import Checkpoint


@pytest.mark.parametrize("told", ["that they will be", "which"])
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_rows_here_and_there_bring_no_more_of_a_file_than_themselves(
    told: str, tmp_path: Path
) -> None:
    """A system that reads megabytes around each would read all of a large table for a prompt."""
    rows, width = 1 << 20, 320
    header: dict[str, Any] = {
        "table.weight": {"dtype": "F16", "shape": [rows, width // 2], "data_offsets": [0, 0]}
    }
    header["table.weight"]["data_offsets"] = [0, rows * width]
    packed = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(packed)) + packed)
    os.truncate(file, 8 + len(packed) + rows * width)  # of holes: it takes no place
    wanted = np.random.default_rng(0).integers(0, rows, 200)
    maps: list[npt.NDArray[np.uint8]] = []
    with Checkpoint(tmp_path, lambda _, whole: maps.append(whole)) as checkpoint:
        if told == "which":
            checkpoint.read_rows_ahead("table.weight", wanted)
        else:
            checkpoint.expect_rows("table.weight")
        assert not checkpoint.tensor("table.weight").take(wanted).floats().any()
        found = np.zeros(-(-len(maps[0]) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        at, pages = maps[0].ctypes.data, found.ctypes.data
        assert libc.mincore(*map(ctypes.c_void_p, (at, len(maps[0]), pages))) == 0
        assert int((found & 1).sum()) < 10 * len(wanted)
        maps.clear()
