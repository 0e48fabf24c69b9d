"""Real weights, real processes: whatever was taken over, guessed, begun again for lack of pages or
left by its client, every answer has its solo tokens and the same bits in their logprobs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import zoo
from cluster import Cluster, ExoProcess, cluster, until

MODEL = "smollm2-135m"
TEXT = (Path(__file__).parent / "plain_english.txt").read_text().split()


def chats(rng: random.Random) -> list[list[dict[str, str]]]:
    """Chats whose beginnings are shared, and answers that repeat what was said."""
    system = {"role": "system", "content": " ".join(TEXT[:120])}
    found = []
    for number in range(6):
        start = rng.randrange(len(TEXT) - 200)
        said = " ".join(TEXT[start : start + rng.choice([5, 20, 60])])
        asked = f"Repeat this: {said}" if number % 2 else f"{said} What do you think?"
        user = {"role": "user", "content": asked}
        found.append([system, user] if number < 4 else [user])
    return found


async def asked(node: ExoProcess, chat: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": chat, "max_tokens": 24, "logprobs": True, **more}
    return dict(await node.post("/v1/chat/completions", body, 120))


def bits(answer: dict[str, Any]) -> list[tuple[str, float]]:
    found = answer["choices"][0]["logprobs"]["content"]
    return [(entry["token"], entry["logprob"]) for entry in found]


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def leave(node: ExoProcess, chat: list[dict[str, str]], after_s: float) -> None:
    """A client that asks and goes away."""
    task = asyncio.ensure_future(asked(node, chat, max_tokens=500))
    await asyncio.wait([task], timeout=after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def made_way(c: Cluster) -> int:
    """Sequences that gave their pages back, on whatever plans: on a busy machine there are others,
    without a node that has become slow."""
    logs = (node.log.read_text(errors="replace") for node in c.nodes.values())
    return sum(log.count(" makes way\n") for log in logs)


async def ring(c: Cluster, nodes: int, megabytes: int) -> None:
    for i in range(nodes):
        memory = f"{megabytes // nodes}MB"
        c.add(f"n{i}", "--memory", f"{2 * nodes - i}GB", "--kv-memory", memory, engine="cpu")
    await c.together()


@pytest.mark.parametrize("nodes", [1, 2])
async def test_every_answer_has_the_bits_that_it_has_alone(
    nodes: int, checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    rng = random.Random(nodes)
    async with cluster(tmp_path, exo_home) as c:
        # Room for two of these chats; and for any of them on one node, should the other be slow.
        await ring(c, nodes, 14)
        first = c.nodes["n0"]
        some = chats(rng)
        sampled = [{"temperature": i % 3 / 2, "seed": i} for i in range(len(some))]
        solo = [
            await asked(first, chat, cache_prompt=False, **how)
            for chat, how in zip(some, sampled, strict=True)
        ]
        cached: list[int] = []
        for turn in range(2):
            nodes_of = [c.nodes[f"n{i % nodes}"] for i in range(len(some))]
            leaving = [leave(first, rng.choice(some), rng.uniform(0.05, 1)) for _ in range(4)]
            together = [
                asked(node, chat, **how)
                for node, chat, how in zip(nodes_of, some, sampled, strict=True)
            ]
            answers = (await asyncio.gather(*together, *leaving))[: len(some)]
            assert list(map(bits, answers)) == list(map(bits, solo)), turn
            cached += map(cached_tokens, answers)
        more = [
            [*chat, answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            for chat, answer in zip(some, solo, strict=True)
        ]
        solo = [await asked(first, chat, cache_prompt=False) for chat in more]
        answers = await asyncio.gather(*(asked(first, chat) for chat in more))
        assert list(map(bits, answers)) == list(map(bits, solo))
        cached += map(cached_tokens, answers)
        # Of all rounds: with room for two chats, who finds what in one is a matter of time.
        assert sum(cached) > 250, cached
        assert await first.counted("accepted_tokens") > 10
        # Let in for their short prompts; no two of them can come to their ends together.
        said = ("Count to a hundred.", "Tell me.", "What is rain?")
        short = [{"role": "user", "content": text} for text in said]
        long = {"max_tokens": 200, "ignore_eos": True, "cache_prompt": False}
        solo = [await asked(first, [chat], **long) for chat in short]
        before = made_way(c)
        answers = await asyncio.gather(*(asked(first, [chat], **long) for chat in short))
        assert list(map(bits, answers)) == list(map(bits, solo))
        assert made_way(c) > before

        async def nobody() -> bool:
            view = await first.get("/v1/topology")
            plans = [p for node in view["serving"].values() for p in node["plans"]]
            return all(plan["running"] == plan["waiting"] == 0 for plan in plans)

        await until(nobody, "all that was left is released", 5)


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"word{rng.randrange(1, zoo.VOCABULARY)}" for _ in range(count))


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "nemotron_h"])
async def test_where_layers_remember_a_state_answers_have_the_bits_that_they_have_alone(
    family: str, tmp_path: Path, exo_home: Path
) -> None:
    """Random weights: what is compared is what was taken over, kept and begun again."""
    model, rng = tmp_path / family, random.Random(1)
    zoo.write_checkpoint(family, model, zoo.tiny_config(family))
    zoo.write_tokenizer(model)
    system = {"role": "system", "content": words(rng, 150)}
    some = [[system, {"role": "user", "content": words(rng, 30 + 40 * i)}] for i in range(6)]

    async def answer(node: ExoProcess, chat: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        return await asked(node, chat, model=str(model), max_tokens=40, **more)

    async with cluster(tmp_path, exo_home) as c:
        await ring(c, 2, 3)
        first = c.nodes["n0"]
        solo = [await answer(first, chat, cache_prompt=False) for chat in some]
        assert len(await first.ring(str(model))) == 2
        answers = await asyncio.gather(*(answer(c.nodes[f"n{i % 2}"], some[i]) for i in range(6)))
        assert list(map(bits, answers)) == list(map(bits, solo))
        question = {"role": "user", "content": words(rng, 9)}
        more = [
            [*chat, found["choices"][0]["message"], question]
            for chat, found in zip(some, solo, strict=True)
        ]
        solo = [await answer(first, chat, cache_prompt=False) for chat in more]
        answers = await asyncio.gather(*(answer(first, chat) for chat in more))
        assert list(map(bits, answers)) == list(map(bits, solo))
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert sum(cached) > 300, cached


async def test_an_answer_goes_on_with_the_same_bits_when_a_member_dies(
    checkpoint: Path, exo_home: Path, tmp_path: Path
) -> None:
    async with cluster(tmp_path, exo_home) as c:
        await ring(c, 2, 200)
        first = c.nodes["n0"]
        chat = chats(random.Random(0))[0]
        how = {"max_tokens": 100, "temperature": 0.8, "seed": 5, "frequency_penalty": 0.3}
        alone = await asked(first, chat, cache_prompt=False, **how)

        async def is_whole() -> bool:
            return len(await first.ring(MODEL)) == 2

        # A busy machine makes a node slow, and a slow one gets no layers for 30 s.
        await until(is_whole, "both have layers", 90)
        answer = asyncio.ensure_future(asked(first, chat, **how))

        async def under_way() -> bool:
            view = await first.get("/v1/topology")
            return any(p["running"] for n in view["serving"].values() for p in n["plans"])

        await until(under_way, "the answer is under way")
        c.nodes["n1"].kill()
        assert bits(await answer) == bits(alone)
        assert len(await first.ring(MODEL)) == 1
