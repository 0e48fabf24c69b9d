"""A small model that guesses for a larger one: the same answers, in fewer steps around the ring."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import zoo
from cluster import cluster

MODEL = "smollm2-135m"
STORY = {"max_tokens": 60, "temperature": 0.8, "seed": 3, "logprobs": True}


def twin(checkpoint: Path, folder: Path) -> str:
    """The same model under another name: it guesses right."""
    shutil.copytree(checkpoint, folder / "twin")
    return str(folder / "twin")


async def stories(
    folder: Path, home: Path, nodes: int, *flags: str
) -> tuple[list[Any], dict[str, float]]:
    """Three at once, and what their head counts."""
    folder.mkdir()
    async with cluster(folder, home) as c:
        for i in range(nodes):
            how = ("--memory", f"{9 - i}GB", "--threads", "1", *flags)
            c.add(f"n{i}", *how, engine="cpu", DEBUG="1")
        await c.together()
        head = c.nodes["n0"]
        await head.chat("Hi", MODEL, max_tokens=2)
        asked = (
            head.completion("Tell me about the sea.", MODEL, **{**STORY, "seed": seed})
            for seed in range(3)
        )
        answers = await asyncio.gather(*asked)
        counts = {
            what: sum([await node.counted(what) for node in c.nodes.values()])
            for what in ("drafted_tokens", "accepted_tokens", "steps")
        }
        return [answer["choices"] for answer in answers], counts


@pytest.mark.parametrize("nodes", [1, 2])
async def test_answers_are_the_same(
    nodes: int, checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    own, _ = await stories(tmp_path / "without", exo_home, nodes)
    small = twin(checkpoint, tmp_path)
    drafted, counts = await stories(tmp_path / "with", exo_home, nodes, "--draft-model", small)
    assert drafted == own
    # What it guesses is right, but as it is no smaller it is soon asked no more.
    assert counts["drafted_tokens"] >= counts["accepted_tokens"] > 0


async def test_around_a_slow_ring_several_tokens_go_at_once(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text('{"model_type": "dummy"}')
    texts, steps = [], []
    for number, flags in enumerate(((), ("--draft-model", str(tmp_path / "small")))):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with cluster(folder) as c:
            head = c.add("head", "--memory", "9GB", *flags)
            c.add("tail", "--memory", "8GB", EXO_DUMMY_FAULTS="delay=0.05")
            await c.together()
            texts.append(await head.chat("a question", max_tokens=60))
            assert await head.ring() == ["head", "tail"]
            steps.append(await head.counted("steps"))
    assert texts[0] == texts[1] and len(texts[0]) == 60
    assert steps[1] < 0.7 * steps[0], steps


async def test_another_vocabulary_guesses_nothing(exo_home: Path, tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "other")
    zoo.write_tokenizer(tmp_path / "other")
    async with cluster(tmp_path, exo_home) as c:
        a = c.add("a", "--draft-model", str(tmp_path / "other"), engine="cpu", DEBUG="1")
        await c.together()
        assert await a.chat("Hi", MODEL, max_tokens=2)
        assert "does not guess for smollm2-135m: it has another vocabulary" in a.log.read_text()
        assert await a.counted("drafted_tokens") == 0
