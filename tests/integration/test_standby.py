"""Layers kept next to a node's own: a loss finds them in memory, another model gets it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zoo
from cluster import Cluster, ExoProcess, cluster, until
from gguf_files import write_gguf

MODEL = "smollm2-135m"
SAY = "Tell me about the sea."


async def standing_by(node: ExoProcess) -> set[int]:
    """Layers of SmolLM2."""
    held = (await node.get("/v1/topology"))["status"]["standby"]
    return {int(one.split("[")[1].split(":")[0]) for one in held if one.startswith(MODEL)}


def three(c: Cluster, *flags: str) -> list[ExoProcess]:
    how = ("--threads", "1", *flags)
    return [
        c.add(f"n{i}", "--memory", f"{6 - i}GB", *how, engine="cpu", DEBUG="1") for i in range(3)
    ]


async def test_a_loss_finds_its_layers_in_memory(
    checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        head, lost, tail = three(c)
        await c.together()
        expected = await head.chat(SAY, MODEL, max_tokens=80)

        async def ready() -> bool:
            # What the two of them get once the middle one is gone; 12, 10 and 8 layers now.
            return set(range(12, 18)) <= await standing_by(head) and {18, 19, 20, 21} <= (
                await standing_by(tail)
            )

        await until(ready, "its neighbours keep the layers they would get", 60)
        answer = asyncio.create_task(head.chat(SAY, MODEL, max_tokens=80))
        await until(lambda: not answer.done(), "it is asked")
        lost.kill()
        assert await answer == expected
        assert await head.chat(SAY, MODEL, max_tokens=80) == expected
        log = head.log.read_text()
        assert f"{MODEL}[0:18]/30 is loaded, of which 0 bytes were read" in log, log


async def test_a_model_that_needs_the_memory_gets_it(
    checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    other = tmp_path / "other.gguf"
    write_gguf(tmp_path / "source", other)
    async with cluster(tmp_path, exo_home) as c:
        nodes = three(c)
        await c.together()
        await nodes[0].chat(SAY, MODEL, max_tokens=2)

        async def all_stand_by() -> bool:
            return all([await standing_by(node) for node in nodes])

        await until(all_stand_by, "layers are kept", 60)
        await nodes[0].chat("a", str(other), max_tokens=2)
        assert not any([await standing_by(node) for node in nodes])
        await nodes[0].delete(f"/v1/load/{MODEL}")
        shards = [(await node.get("/v1/topology"))["status"]["shards"] for node in nodes]
        assert not any(MODEL in one for held in shards for one in held)
