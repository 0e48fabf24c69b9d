"""Nodes that bring a model themselves: from a hub on loopback, from each other, each byte once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from cluster import ApiError, Cluster, ExoProcess, cluster, until
from gguf_files import write_gguf
from hub_server import HubServer

REPO = "org/tiny"
FILLER = 200 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny llama that runs, and beside it a large file that nothing reads but the download."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    zoo.write_checkpoint("llama", folder)
    zoo.write_tokenizer(folder)
    found = {f.name: f.read_bytes() for f in folder.iterdir()}
    found["vocabulary.model"] = np.random.default_rng(0).bytes(FILLER)
    return found


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer() as running:
        running.put(REPO, files)
        yield running


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A llama of 100 MB in seven weight files that both engines read."""
    folder = tmp_path_factory.mktemp("weights")
    config = zoo.tiny_config("llama") | {"hidden_size": 512, "intermediate_size": 2048}
    zoo.write_checkpoint("llama", folder / "one", config)
    zoo.cut_into_files(folder / "one", folder / "model", 7)
    zoo.write_tokenizer(folder / "model")
    return {f.name: f.read_bytes() for f in (folder / "model").iterdir()}


def add(c: Cluster, name: str, url: str) -> ExoProcess:
    return c.add_with_cache(name, url, "--memory", "1GB")


def check(folder: Path, names: list[str], files: dict[str, bytes]) -> None:
    for name in names:
        snapshots = list((folder / f"cache-{name}").glob("models--org--tiny/snapshots/*"))
        assert len(snapshots) == 1
        for path, data in files.items():
            assert (snapshots[0] / path).read_bytes() == data, (name, path)


async def is_past(node: ExoProcess, count: int) -> bool:
    """The node has fetched more than `count` bytes."""
    found = (await node.get("/v1/download/progress"))["data"]
    return any(i["node_id"] == node.name and i["done"] > count for i in found)


async def ended(c: Cluster, via: str, names: list[str]) -> list[dict[str, Any]]:
    """What every node says once all have ended, as one of them sees it."""

    async def look() -> list[dict[str, Any]]:
        found = (await c.nodes[via].get("/v1/download/progress"))["data"]
        here = [item for item in found if item["phase"] in ("ready", "failed", "cancelled")]
        return here if {item["node_id"] for item in here} >= set(names) else []

    return await until(look, f"downloads of {names} end")


async def test_three_nodes_fetch_each_byte_of_the_hub_once(
    tmp_path: Path, server: HubServer, files: dict[str, bytes]
) -> None:
    server.rate = 30e6
    names = ["a", "b", "c"]
    async with cluster(tmp_path) as c:
        for name in names:
            add(c, name, server.url)
        await c.together()
        await c.nodes["a"].post("/v1/download", {"model": REPO, "all_nodes": True})
        items = await ended(c, "b", names)
        assert {item["phase"] for item in items} == {"ready"}, items
        check(tmp_path, names, files)
        total = sum(map(len, files.values()))
        assert total <= sum(server.sent.values()) <= 1.05 * total
        assert sum(item["by_source"]["peer"] for item in items) > 1.9 * total
        assert await c.nodes["c"].chat(model=REPO, max_tokens=3)


async def test_who_comes_later_asks_peers_only_and_needs_no_hub(
    tmp_path: Path, server: HubServer, files: dict[str, bytes]
) -> None:
    async with cluster(tmp_path) as c:
        add(c, "a", server.url)
        await c.together("a")
        await c.nodes["a"].post("/v1/download", {"model": REPO})
        await ended(c, "a", ["a"])
        sent = server.sent.total()
        add(c, "online", server.url)
        add(c, "offline", "")
        await c.together()
        for name in ("online", "offline"):
            await c.nodes[name].post("/v1/download", {"model": REPO})
            await ended(c, name, [name])
        check(tmp_path, ["online", "offline"], files)
        assert server.sent.total() == sent


async def test_a_node_without_a_hub_follows_one_that_is_still_fetching(
    tmp_path: Path, server: HubServer, files: dict[str, bytes]
) -> None:
    server.rate = 5e6
    async with cluster(tmp_path) as c:
        add(c, "a", server.url)
        add(c, "offline", "")
        await c.together()
        await c.nodes["a"].post("/v1/download", {"model": REPO})
        await until(lambda: is_past(c.nodes["a"], FILLER // 20), "bytes came from the hub")
        await c.nodes["offline"].post("/v1/download", {"model": REPO})
        items = await ended(c, "offline", ["a", "offline"])
        assert {item["phase"] for item in items} == {"ready"}, items
        check(tmp_path, ["a", "offline"], files)
        assert server.sent.total() == sum(map(len, files.values()))


@pytest.mark.parametrize("how", ["dies", "stalls", "lies"])
async def test_a_peer_that_fails_costs_a_retry_elsewhere(
    how: str, tmp_path: Path, server: HubServer, files: dict[str, bytes]
) -> None:
    async with cluster(tmp_path) as c:
        bad = add(c, "bad", server.url)
        await c.together("bad")
        await bad.post("/v1/download", {"model": REPO})
        await ended(c, "bad", ["bad"])
        if how == "lies":
            snapshot = next((tmp_path / "cache-bad").glob("models--org--tiny/snapshots/*"))
            with (snapshot / "vocabulary.model").open("r+b") as damaged:
                damaged.seek(5 << 20)
                damaged.write(b"not what it was")
        add(c, "good", server.url)
        await c.together()
        good = c.nodes["good"]
        await good.post("/v1/download", {"model": REPO})
        if how != "lies":
            await until(lambda: is_past(good, FILLER // 10), "bytes came from the peer")
            bad.send(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        items = await ended(c, "good", ["good"])
        assert [i["phase"] for i in items if i["node_id"] == "good"] == ["ready"], items
        check(tmp_path, ["good"], files)


async def test_a_download_is_cancelled_and_goes_on(
    tmp_path: Path, server: HubServer, files: dict[str, bytes]
) -> None:
    server.rate = 5e6
    async with cluster(tmp_path) as c:
        node = add(c, "a", server.url)
        await c.together("a")
        await node.post("/v1/download", {"model": REPO})
        await until(lambda: is_past(node, FILLER // 20), "bytes came")
        await node.delete(f"/v1/download/{REPO}")
        assert [i["phase"] for i in await ended(c, "a", ["a"])] == ["cancelled"]
        server.rate = None
        with pytest.raises(ApiError) as refused:
            await node.delete(f"/v1/download/{REPO}")
        assert refused.value.code == "model_not_found"
        assert await node.chat(model=REPO, max_tokens=3)
        check(tmp_path, ["a"], files)


async def test_a_hub_that_refuses_is_told_to_the_client(tmp_path: Path, server: HubServer) -> None:
    server.repos[REPO].refuse = 403
    async with cluster(tmp_path) as c:
        node = add(c, "a", server.url)
        await c.together("a")
        with pytest.raises(ApiError) as refused:
            await node.chat(model=REPO)
        assert refused.value.code == "access_denied" and "hf auth login" in refused.value.message
        (item,) = await ended(c, "a", ["a"])
        assert item["phase"] == "failed" and "gated" in item["warning"]
        assert (await node.first_event("/v1/events"))["phase"] == "failed"


def held(folder: Path, name: str) -> set[str]:
    """The whole weight files in a node's cache."""
    snapshots = (folder / f"cache-{name}").glob("models--org--tiny/snapshots/*/*.safetensors")
    return {file.name for file in snapshots}


async def test_a_node_fetches_the_weights_its_shard_needs_and_more_when_one_dies(
    tmp_path: Path, weights: dict[str, bytes]
) -> None:
    files = {name for name in weights if name.endswith(".safetensors")}
    names = ["a", "b", "c"]
    with HubServer() as server:
        server.put(REPO, weights)
        async with cluster(tmp_path) as c:
            for name in names:
                add(c, name, server.url)
            await c.together()
            said = await c.nodes["b"].chat(model=REPO, max_tokens=8)
            shares = {name: held(tmp_path, name) for name in names}
            assert set.union(*shares.values()) == files
            assert all(len(share) <= 4 for share in shares.values()), shares
            size = sum(map(len, weights.values()))
            assert sum(server.sent.values()) <= 1.05 * size
            (model,) = [
                model
                for model in (await c.nodes["a"].get("/v1/cluster/models"))["data"]
                if model["id"] == REPO
            ]
            assert {node["node_id"] for node in model["nodes"]} == set(names)
            assert all(not n["whole"] and n["size"] < 0.6 * size for n in model["nodes"])
            ring = await c.nodes["a"].ring(REPO)
            c.nodes[ring[-1]].kill()
            left = [name for name in names if name != ring[-1]]
            await c.together(*left)
            assert await c.nodes[left[0]].chat(model=REPO, max_tokens=8) == said
            assert held(tmp_path, left[0]) | held(tmp_path, left[1]) == files


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def one_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The same in one file, as most repositories have a small model."""
    folder = tmp_path_factory.mktemp("one-file") / "one"
    config = zoo.tiny_config("llama") | {"hidden_size": 512, "intermediate_size": 2048}
    zoo.write_checkpoint("llama", folder, config)
    zoo.write_tokenizer(folder)
    if request.param == "safetensors":
        return {f.name: f.read_bytes() for f in folder.iterdir()}
    write_gguf(folder, folder / "m.gguf")
    return {"m-F32.gguf": (folder / "m.gguf").read_bytes()}


def disk_of(folder: Path, name: str) -> int:
    """Bytes of weights on a node's disk."""
    files = (folder / f"cache-{name}").glob("models--org--tiny/blobs/*")
    return sum(512 * file.stat().st_blocks for file in files)


async def test_of_one_file_each_node_fetches_its_part_and_more_when_one_dies(
    tmp_path: Path, one_file: dict[str, bytes]
) -> None:
    names, size = ["a", "b", "c"], sum(map(len, one_file.values()))
    with HubServer() as server:
        server.put(REPO, one_file)
        async with cluster(tmp_path) as c:
            for name in names:
                add(c, name, server.url)
            await c.together()
            said = await c.nodes["b"].chat("ab", REPO, max_tokens=8)
            parts = {name: disk_of(tmp_path, name) for name in names}
            assert all(part < 0.6 * size for part in parts.values()), (parts, size)
            assert size <= server.sent.total() <= 1.05 * size
            ring = await c.nodes["a"].ring(REPO)
            c.nodes[ring[-1]].kill()
            left = [name for name in names if name != ring[-1]]
            await c.together(*left)
            assert await c.nodes[left[0]].chat("ab", REPO, max_tokens=8) == said
            assert sum(disk_of(tmp_path, name) for name in left) < 1.4 * size
            # What is partial is completed, from each other as far as they have it.
            sent = server.sent.total()
            body = {"model": REPO, "all_nodes": True, "wait": True}
            done = await c.nodes[left[0]].post("/v1/download", body, 60)
            assert done["nodes"] == dict.fromkeys(left, "ready")
            assert server.sent.total() - sent <= 0.05 * size
            for name in left:
                [weights] = [path for path in one_file if path.endswith(("safetensors", "gguf"))]
                found = (tmp_path / f"cache-{name}").glob(f"models--*/snapshots/*/{weights}")
                assert [file.read_bytes() == one_file[weights] for file in found] == [True]
            assert await c.nodes[left[1]].chat("ab", REPO, max_tokens=8) == said


async def test_what_a_shard_needs_is_enough_without_a_hub(
    tmp_path: Path, weights: dict[str, bytes]
) -> None:
    """`exo download --shard` on each node, then all of them start offline."""
    names = ["a", "b"]
    with HubServer() as server:
        server.put(REPO, weights)
        async with cluster(tmp_path) as c:
            for number, name in enumerate(names, 1):
                node = add(c, name, server.url)
                await c.together(name)
                body = {"model": REPO, "shard": f"{number}/2", "wait": True}
                assert (await node.post("/v1/download", body, 60))["nodes"] == {name: "ready"}
                with pytest.raises(ApiError) as refused:
                    await node.post("/v1/download", body | {"shard": "3/2"})
                assert "expected 1/n" in refused.value.message
                node.stop()
        assert sum(server.sent.values()) <= 1.5 * sum(map(len, weights.values()))
    async with cluster(tmp_path) as c:
        for name in names:
            add(c, name, "")
        await c.together()
        assert await c.nodes["b"].chat(model=REPO, max_tokens=3)
        assert all(len(held(tmp_path, name)) <= 5 for name in names)


async def test_one_node_with_a_hub_is_enough(tmp_path: Path, weights: dict[str, bytes]) -> None:
    """The other has no route to it, and needs files that the first does not."""
    files = {name for name in weights if name.endswith(".safetensors")}
    with HubServer() as server:
        server.put(REPO, weights)
        async with cluster(tmp_path) as c:
            add(c, "inside", "http://127.0.0.1:9")
            add(c, "outside", server.url)
            await c.together()
            assert await c.nodes["inside"].chat(model=REPO, max_tokens=3)
            assert len(await c.nodes["inside"].ring(REPO)) == 2
            shares = {name: held(tmp_path, name) for name in ("inside", "outside")}
            assert shares["inside"] | shares["outside"] == files
            assert all(len(share) < len(files) for share in shares.values()), shares
            assert sum(server.sent.values()) <= 1.1 * sum(map(len, weights.values()))
