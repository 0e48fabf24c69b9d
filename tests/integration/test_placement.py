"""Which nodes of a real cluster serve a small model, and what they say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, ExoProcess, cluster

MODEL = "smollm2-135m"


async def plan(node: ExoProcess) -> dict[str, Any]:
    [found] = (await node.get("/v1/topology"))["plans"]
    return dict(found)


async def three(c: Cluster, rule: str) -> list[ExoProcess]:
    nodes = [c.add(name, "--partition", rule, engine="cpu") for name in ("a", "b", "c")]
    await c.together()
    return nodes


async def test_a_small_model_is_served_by_one_node_and_after_it_by_another(
    checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        nodes = await three(c, "speed")  # for `auto` two may be as good
        text = await nodes[0].chat("Name a colour", MODEL, max_tokens=16)
        first = await plan(nodes[0])
        [member] = first["members"]
        assert first["predicted_step_s"] > 0
        assert len(first["left_out"]) == 2
        for node_id, why in first["left_out"]:
            assert node_id != member["node_id"] and "answers are faster without it" in why
        c.nodes[member["node_id"]].kill()
        left = next(node for node in nodes if node.name != member["node_id"])
        assert await left.chat("Name a colour", MODEL, max_tokens=16) == text
        [follower] = (await plan(left))["members"]
        assert follower["node_id"] != member["node_id"]


@pytest.mark.parametrize(("rule", "count"), [("memory", 3), ("speed", 1)])
async def test_rules(
    rule: str, count: int, checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        nodes = await three(c, rule)
        await nodes[0].chat("Name a colour", MODEL, max_tokens=4)
        assert len((await plan(nodes[0]))["members"]) == count
