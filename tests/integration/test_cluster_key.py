"""Nodes with a cluster key: what they do for each other is as without, and no others take part."""

from __future__ import annotations

import re
from pathlib import Path

import zoo
from cluster import Cluster, cluster, until
from hub_server import HubServer

KEY, OTHER = "7d0f3a52c4e94b0c9f0f", "another-key-of-ours"


async def sealed_ring(c: Cluster, names: tuple[str, ...] = ("a", "b", "c")) -> None:
    for number, name in enumerate(names):
        c.add(name, "--memory", f"{len(names) - number}GB", EXO_CLUSTER_KEY=KEY)
    await c.together(*names)


async def test_answers_are_the_same_with_a_key_and_go_on_without_a_node(tmp_path: Path) -> None:
    answers = []
    for folder, sealed in ((tmp_path / "open", False), (tmp_path / "sealed", True)):
        folder.mkdir()
        async with cluster(folder) as c:
            if sealed:
                await sealed_ring(c)
            else:
                c.add("a", "--memory", "3GB")
                await c.together()
            answers.append(await c.nodes["a"].chat(max_tokens=100))
            if sealed:
                assert await c.nodes["a"].ring() == ["a", "b", "c"]
                answers.append(await c.nodes["c"].chat(max_tokens=100))
                c.nodes["b"].kill()
                answers.append(await c.nodes["c"].chat(max_tokens=100))
    assert len(set(answers)) == 1


async def test_who_has_another_key_or_none_is_named_and_takes_no_part(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await sealed_ring(c, ("a", "b"))
        c.add("other", "--memory", "9GB", EXO_CLUSTER_KEY=OTHER)
        c.add("open", "--memory", "9GB")
        for name, alone in (("other", {"other"}), ("open", {"open"}), ("a", {"a", "b"})):
            await until(c.nodes[name].answers, f"{name} answers")
            assert await c.nodes[name].live_nodes() == alone

        async def problems(name: str) -> str:
            nodes = (await c.nodes[name].get("/v1/topology"))["nodes"].values()
            return "\n".join(node["problem"] for node in nodes)

        for name, words in (
            ("a", ["other at .* has another cluster key", "open at .* has no cluster key"]),
            ("open", ["a at .* has a cluster key", "other at .* this node has none"]),
            ("other", ["a at .* has another cluster key", "start all nodes of a cluster with"]),
        ):

            async def says(name: str = name, words: list[str] = words) -> bool:
                found = await problems(name)
                return all(re.search(word, found) for word in words)

            await until(says, f"{name} says {words}")
        assert await c.nodes["a"].chat() == await c.nodes["open"].chat()
        assert await c.nodes["a"].ring() == ["a", "b"]


async def test_peers_by_address_are_told_from_each_other_too(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await sealed_ring(c, ("a",))
        peers = ("--peers", f"127.0.0.1:{c.nodes['a'].node_port}")
        c.add("b", "--memory", "1GB", *peers, EXO_CLUSTER_KEY=KEY)
        c.add("other", "--memory", "1GB", *peers, EXO_CLUSTER_KEY=OTHER)
        await c.together("a", "b")
        await until(c.nodes["other"].answers, "it answers")

        async def says() -> bool:
            nodes = (await c.nodes["other"].get("/v1/topology"))["nodes"].values()
            return any("has another cluster key than this node" in n["problem"] for n in nodes)

        await until(says, "the other one says why")


async def test_files_come_from_peers_with_the_key(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "model")
    zoo.write_tokenizer(tmp_path / "model")
    repo = "org/tiny"
    with HubServer() as hub:
        hub.put(repo, {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()})
        async with cluster(tmp_path) as c:
            for name, url in (("a", hub.url), ("offline", "")):
                key = tmp_path / f"key-{name}"
                key.write_text(f"{KEY}\n")
                key.chmod(0o600)
                c.add_with_cache(name, url, "--memory", "1GB", "--cluster-key-file", str(key))
            await c.together()
            answer = await c.nodes["a"].chat(model=repo, max_tokens=3)
            assert await c.nodes["offline"].chat(model=repo, max_tokens=3) == answer
            await c.nodes["offline"].post("/v1/download", {"model": repo})
            progress = (await c.nodes["offline"].get("/v1/download/progress"))["data"]
            assert {item["node_id"] for item in progress} == {"a", "offline"}
