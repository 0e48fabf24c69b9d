"""A mixture larger than the memory there is: real processes, a random model on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zoo
from cluster import ExoProcess, cluster

MIXTURE = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 8}
"""Float32, 12.6 MB of experts in each of its six layers."""


async def answer(node: ExoProcess, model: Path) -> list[tuple[str, float]]:
    said: dict[str, Any] = {"role": "user", "content": "word1 word2 word3 word5 word8 word13"}
    body = {"model": str(model), "messages": [said], "max_tokens": 40, "logprobs": True}
    found = await node.post("/v1/chat/completions", body | {"temperature": 0}, 60)
    return [(one["token"], one["logprob"]) for one in found["choices"][0]["logprobs"]["content"]]


async def test_experts_on_disk_change_no_bit_of_an_answer(tmp_path: Path, exo_home: Path) -> None:
    model = tmp_path / "mixture"
    zoo.write_checkpoint("qwen3_moe", model, zoo.tiny_config("qwen3_moe") | MIXTURE)
    zoo.write_tokenizer(model)
    found = []
    for memory in (["1GB"], ["60MB"], ["35MB", "34MB"]):
        (folder := tmp_path / memory[0]).mkdir()
        async with cluster(folder, exo_home) as c:
            for i, size in enumerate(memory):
                c.add(f"n{i}", "--memory", size, "--kv-memory", "8MB", engine="cpu")
            await c.together()
            first = c.nodes["n0"]
            found.append(await answer(first, model))
            placed = await first.get(f"/v1/placement/{model}")
            assert len(placed["members"]) == len(memory)
            [plan] = (await first.get("/v1/topology"))["plans"]
            shares = {member["shard"]["expert_share"] for member in plan["members"]}
            assert shares == {1} if memory == ["1GB"] else max(shares) < 1
            log = first.log.read_text()
            assert ("of its experts fit into memory, others are read from disk" in log) == (
                memory != ["1GB"]
            )
    assert found[0] == found[1] == found[2]
