"""A process ends well right after MLX computed something in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zoo

SCRIPT = """
import asyncio, sys
from pathlib import Path
import numpy as np
from exo.inference.batch import ForwardBatch, Slice
from exo.inference.mlx.engine import MLXEngine
from exo.inference.sampling import SamplingParams
from exo.shard import Shard

async def main():
    engine, shard = MLXEngine(precise=True), Shard("m", 0, 6, 6)
    await engine.load(shard, Path(sys.argv[1]), lambda done, total: None)
    tokens = np.arange(5, dtype=np.int32)
    await engine.forward(shard, ForwardBatch((Slice("s", 0, 5, SamplingParams()),), tokens), None)
    await engine.close()

asyncio.run(main())
"""


def test_no_thread_of_mlx_s_outlives_the_interpreter(tmp_path: Path) -> None:
    """Its thread asked for the interpreter's lock while it ended: where the interpreter was gone
    first, every other time here, the process was aborted."""
    zoo.write_checkpoint("llama", tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [(process.communicate(timeout=120)[1], process.returncode) for process in running]
    assert [code for _, code in ended] == [0] * 4, ended
