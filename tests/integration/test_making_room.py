"""Models that do not fit together: the one used longest ago goes, never one that answers; after a
restart what was used most comes back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import zoo
from cluster import ApiError, Cluster, cluster, slowed, until

ROOM = ("--memory", "9MB")
"""Two of these hold one dummy model of 10 MB, 90 % of their memory being used."""


def model(folder: Path, name: str) -> str:
    """Another model for the dummy engine: any directory with a configuration."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text('{"model_type": "dummy"}')
    return str(folder / name)


async def loaded(c: Cluster) -> dict[str, set[str]]:
    """By node the models it has shards of."""
    found = {}
    for name, node in c.nodes.items():
        shards = (await node.get("/v1/topology"))["status"]["shards"]
        found[name] = {shard.partition("[")[0] for shard in shards}
    return found


async def test_the_model_used_longest_ago_makes_room_but_not_while_it_answers(
    tmp_path: Path,
) -> None:
    other, third = model(tmp_path, "other"), model(tmp_path, "third")
    async with cluster(tmp_path) as c:
        slow = tmp_path / "slow"
        for name in ("a", "b"):
            c.add(name, *ROOM, **slowed(slow, 0.01))
        await c.together()
        a, b = c.nodes["a"], c.nodes["b"]
        said = await a.chat()
        assert await loaded(c) == {"a": {"dummy"}, "b": {"dummy"}}
        assert await b.chat(model=other) == said
        assert await loaded(c) == {"a": {other}, "b": {other}}

        slow.touch()
        answer = a.stream(model=other, max_tokens=300)
        pieces = [await anext(answer)]
        for node in (a, b):
            with pytest.raises(ApiError) as refused:
                await node.chat(model=third)
            assert refused.value.code == "model_too_large"
        slow.unlink()
        pieces += [piece async for piece in answer]
        assert len("".join(pieces)) == 300
        assert await a.chat(model=third) == said

        assert await loaded(c) == {"a": {third}, "b": {third}}
        # Nobody plans what was unloaded anew when members change.
        c.nodes["b"].kill()
        c.add("c", *ROOM)
        await c.together("a", "c")
        await until(lambda: a.ring(third), f"{third} is served again")
        assert await a.ring("dummy") == []


async def test_many_requests_for_more_models_than_fit_are_all_answered_or_refused(
    tmp_path: Path,
) -> None:
    names = ["dummy", model(tmp_path, "other"), model(tmp_path, "third")]
    async with cluster(tmp_path) as c:
        for name in ("a", "b"):
            c.add(name, *ROOM)
        await c.together()
        expected = await c.nodes["a"].chat()

        async def ask(number: int) -> str:
            node = c.nodes["ab"[number % 2]]
            try:
                return await node.chat(model=names[number % 3])
            except ApiError as error:
                return error.code

        answers = await asyncio.gather(*map(ask, range(24)))
        assert expected in answers
        assert set(answers) <= {expected, "model_too_large", "plan_mismatch"}, answers
        assert await c.nodes["b"].chat(model=names[2]) == expected


async def test_what_was_used_most_comes_back_after_a_restart(tmp_path: Path) -> None:
    other = model(tmp_path, "other")
    homes = {name: str(tmp_path / f"home-{name}") for name in "ab"}
    async with cluster(tmp_path) as c:
        for name in "ab":
            c.add(name, *ROOM, EXO_HOME=homes[name])
        await c.together()
        for used in (other, "dummy", "dummy"):
            assert await c.nodes["a"].chat(model=used)
    # Stopped at once, by Ctrl-C twice.
    noted = json.loads((Path(homes["a"]) / "usage.json").read_text())
    assert noted["dummy"]["score"] > noted[other]["score"] > 0.9
    async with cluster(tmp_path) as c:
        a = c.add("a", *ROOM, "--preload", EXO_HOME=homes["a"])
        await c.together("a")
        # Alone it is too small.
        c.add("b", *ROOM, "--preload", EXO_HOME=homes["b"])
        await c.together()
        await until(lambda: a.ring("dummy"), "the model used most is loaded")
        assert await a.ring(other) == []
        assert await a.chat()


async def test_real_models_take_turns_in_a_memory_that_holds_one(tmp_path: Path) -> None:
    names = []
    for seed in (1, 2):
        folder = tmp_path / f"llama-{seed}"
        config = zoo.tiny_config("llama") | {"hidden_size": 256, "intermediate_size": 256 * seed}
        zoo.write_checkpoint("llama", folder, config)
        zoo.write_tokenizer(folder)
        names.append(str(folder))
    async with cluster(tmp_path) as c:
        node = c.add("a", "--memory", "22MB", engine="cpu")
        await c.together("a")
        said = []
        for name in names * 2:
            said.append(await node.chat(model=name, max_tokens=6))
            assert (await loaded(c))["a"] == {name}
        assert said[:2] == said[2:] and said[0] != said[1]


async def test_what_is_left_of_a_ring_that_broke_makes_room(tmp_path: Path) -> None:
    """The large model needs both nodes, the small one all of one."""
    names = {}
    for name, layers in (("large", 8), ("small", 4)):
        config = zoo.tiny_config("llama") | {"hidden_size": 256, "intermediate_size": 1024}
        zoo.write_checkpoint("llama", tmp_path / name, config | {"num_hidden_layers": layers})
        zoo.write_tokenizer(tmp_path / name)
        names[name] = str(tmp_path / name)
    async with cluster(tmp_path) as c:
        for node in ("a", "b"):
            c.add(node, "--memory", "18MB", "--rejoin-wait", "0", engine="cpu")
        await c.together()
        a = c.nodes["a"]
        assert await a.chat(model=names["large"], max_tokens=2)
        assert await loaded(c) == {"a": {names["large"]}, "b": {names["large"]}}
        c.nodes.pop("b").kill()
        await c.together("a")
        with pytest.raises(ApiError) as refused:
            await a.chat(model=names["large"], max_tokens=2)
        assert refused.value.code == "model_too_large"
        assert await a.chat(model=names["small"], max_tokens=2)
        assert await loaded(c) == {"a": {names["small"]}}
