"""Checkpoints that another tool quantized, in a ring of a cpu and an MLX node."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantized_files
import zoo
from cluster import ApiError, Cluster, cluster

PROMPT = "word1 word2 word3 word4"


def checkpoint(kind: str, folder: Path) -> Path:
    zoo.write_checkpoint("qwen3", folder / "float")
    quantized_files.write(kind, folder / "float", folder / "packed", folder / "plain")
    for made in ("packed", "plain"):
        zoo.write_tokenizer(folder / made)
    return folder / "packed"


async def two(c: Cluster) -> None:
    c.add("n0", "--memory", "40MB", engine="cpu")
    c.add("n1", "--memory", "30MB", engine="mlx")
    await c.together()


async def test_a_mixed_ring_answers_what_the_numbers_say(tmp_path: Path, exo_home: Path) -> None:
    packed = checkpoint("GPTQ", tmp_path)
    async with cluster(tmp_path, exo_home) as c:
        await two(c)
        node = c.nodes["n1"]
        answer = await node.chat(PROMPT, str(packed), max_tokens=12)
        assert len(await node.ring(str(packed))) == 2
        assert answer == await node.chat(PROMPT, str(tmp_path / "plain"), max_tokens=12)


async def test_what_nobody_reads_is_refused_with_what_to_take(
    tmp_path: Path, exo_home: Path
) -> None:
    packed = checkpoint("bitsandbytes", tmp_path)
    async with cluster(tmp_path, exo_home) as c:
        await two(c)
        with pytest.raises(ApiError, match="quantized by bitsandbytes") as refused:
            await c.nodes["n1"].chat(PROMPT, str(packed), max_tokens=4)
        assert refused.value.status == 400 and refused.value.code == "model_unsupported"
