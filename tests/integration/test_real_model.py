"""The default model, real weights: one node, and two and three on loopback, give exactly the tokens
of mlx-lm's own generate on the same converted files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import mlx.core as mx
import pytest
from cluster import Cluster, cluster
from gguf_files import plain_model
from mlx_lm.generate import generate_step

from exo.models.tokenizer import HFTokenizer

MODEL = "smollm2-135m"
GOLDEN = Path(__file__).parent / "smollm2_golden.json"
LIVE = 2  # so many of the prompts run through plain mlx-lm in the test itself: it is slow


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Ten prompts of 5 to 500 tokens and the texts and tokens plain mlx-lm gives (greedy), written
    by scripts/make_golden."""
    return json.loads(GOLDEN.read_text())


def test_the_golden_answers_are_those_of_mlx_lm(checkpoint: Path, golden: list[dict]) -> None:
    model = plain_model(checkpoint)
    tokenizer = HFTokenizer(checkpoint)
    for case in golden[:LIVE]:
        prompt = tokenizer.encode_chat([{"role": "user", "content": case["prompt"]}])
        assert len(prompt) == case["prompt_tokens"]
        steps = generate_step(mx.array(prompt), model, max_tokens=len(case["tokens"]))
        assert [int(token) for token, _ in steps] == case["tokens"]


@pytest.mark.parametrize("nodes", [1, 2, 3])
async def test_a_ring_gives_exactly_those_tokens(
    nodes: int, checkpoint: Path, exo_home: Path, golden: list[dict], tmp_path: Path
) -> None:
    # A short one and one of several chunks, others for each count: it is the cuts that could go
    # wrong. Longer ones take MLX on a CPU a minute each.
    cases = [golden[nodes], golden[4 + nodes % 3]]
    async with cluster(tmp_path, exo_home) as c:
        await ring(c, nodes)
        for index, case in enumerate(cases):
            node = c.nodes[f"n{index % nodes}"]
            answer = await node.completion(case["prompt"], MODEL, max_tokens=len(case["tokens"]))
            assert answer["usage"]["prompt_tokens"] == case["prompt_tokens"]
            assert answer["choices"][0]["message"]["content"] == case["text"], case["prompt"]
        assert len(await c.nodes["n0"].ring(MODEL)) == nodes


async def test_four_requests_at_once_through_two_nodes_give_their_solo_tokens(
    checkpoint: Path, exo_home: Path, golden: list[dict], tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        await ring(c, 2)
        asked = [
            c.nodes[f"n{i % 2}"].chat(case["prompt"], MODEL, max_tokens=len(case["tokens"]))
            for i, case in enumerate(golden[:4])
        ]
        assert await asyncio.gather(*asked) == [case["text"] for case in golden[:4]]


async def ring(c: Cluster, nodes: int) -> None:
    for i in range(nodes):
        # Uneven, so that the cuts are too.
        c.add(f"n{i}", "--memory", f"{2 * (nodes - i)}GB", engine="mlx", DEBUG="1")
    await c.together()


async def test_a_nodes_memory_is_its_share(
    checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    """Resident memory that loading adds, three nodes against one."""
    import psutil

    def resident(c: Cluster) -> dict[str, int]:
        return {n: psutil.Process(p.process.pid).memory_info().rss for n, p in c.nodes.items()}  # type: ignore[union-attr]

    added = {}
    for nodes in (1, 3):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        async with cluster(folder, exo_home) as c:
            for i in range(nodes):
                c.add(f"n{i}", "--memory", "2GB", "--no-standby", engine="mlx", DEBUG="1")
            await c.together()
            before = resident(c)
            await c.nodes["n0"].chat("Hi", MODEL, max_tokens=1)
            after = resident(c)
            added[nodes] = [after[n] - before[n] for n in c.nodes]
    whole = added[1][0]
    # The tokenizer and the first node's libraries are in the numbers too, the same in each.
    assert sorted(added[3])[1] < 0.6 * whole, added
