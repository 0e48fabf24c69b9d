"""A node that computes many times slower than it did: known, told, planned around."""

import asyncio
import time
from pathlib import Path

from cluster import Cluster, cluster, slowed, until

MEMORY = {"head": "3GB", "middle": "2GB", "tail": "1GB"}
STEP_S = 0.01


def _add(c: Cluster, name: str, folder: Path, memory: str, *arguments: str) -> None:
    faults = slowed(folder / name, STEP_S)
    c.add(name, "--memory", memory, "--no-speculation", *arguments, **faults)


async def test_an_answer_goes_on_without_a_node_that_has_become_slow(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for name, memory in MEMORY.items():
            _add(c, name, tmp_path, memory)
        await c.together()
        expected = await c.nodes["head"].chat(max_tokens=300)
        asked = asyncio.create_task(c.nodes["head"].chat(max_tokens=300))

        async def is_told() -> bool:
            view = await c.nodes["tail"].get("/v1/topology")
            return bool(view["serving"]["middle"]["slowdown"] > 8)

        async def without_middle() -> bool:
            return await c.nodes["tail"].ring() == ["head", "tail"]

        (tmp_path / "middle").touch()
        began = time.monotonic()
        await until(is_told, "the others know", 10)
        await until(without_middle, "the ring is planned without the slow node", 10)
        # Three seconds of steps, a beat or two, and a plan: not the 60 s that the answer would take
        assert time.monotonic() - began < 10
        assert await asyncio.wait_for(asked, 20) == expected
        view = await c.nodes["head"].get("/v1/topology")
        left_out = dict(view["plans"][0]["left_out"])
        assert "times slower than it did; it gets layers in" in left_out["middle"]


async def test_a_slow_node_stays_where_nothing_fits_without_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for name in ("head", "tail"):
            _add(c, name, tmp_path, "6MB")
        await c.together()
        expected = await c.nodes["head"].chat(max_tokens=20)
        (tmp_path / "tail").touch()
        assert await c.nodes["head"].chat(max_tokens=20) == expected
        assert sorted(await c.nodes["head"].ring()) == ["head", "tail"]
