"""Several processes on loopback are one cluster: same tokens from every node and placement."""

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest
from cluster import ApiError, Cluster, cluster, slowed, until


async def ring_of(c: Cluster, n: int) -> None:
    for i in range(n):
        c.add(f"n{i}", "--memory", f"{n - i}GB")
    await c.together()


async def test_every_node_of_every_cluster_gives_the_same_answer(tmp_path: Path) -> None:
    answers = set()
    for n in (1, 2, 3):
        folder = tmp_path / str(n)
        folder.mkdir()
        async with cluster(folder) as c:
            await ring_of(c, n)
            for node in c.nodes.values():
                answers.add(await node.chat("the same question"))
                assert "".join([p async for p in node.stream("the same question")]) in answers
            assert await c.nodes["n0"].ring() == [f"n{i}" for i in range(n)]
    assert len(answers) == 1


async def test_requests_at_once_give_each_exactly_its_solo_tokens(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await ring_of(c, 2)
        prompts = [f"question {i} " * (1 + 40 * i) for i in range(8)]
        nodes = [c.nodes[f"n{i % 2}"] for i in range(8)]
        solo = [await node.chat(p) for node, p in zip(nodes, prompts, strict=True)]
        asked = (node.chat(p) for node, p in zip(nodes, prompts, strict=True))
        assert await asyncio.gather(*asked) == solo


async def test_a_join_is_used_and_does_not_disturb_a_running_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        slow = tmp_path / "slow"
        c.add("n0", "--memory", "2GB", "--no-speculation", **slowed(slow, 0.005))
        await c.together()
        expected = await c.nodes["n0"].chat(max_tokens=400)
        slow.touch()
        running = asyncio.create_task(c.nodes["n0"].chat(max_tokens=400))
        c.add("n1", "--memory", "1GB")
        await c.together()

        async def both_serve() -> bool:
            return await c.nodes["n0"].ring() == ["n0", "n1"]

        await until(both_serve, "a plan with the node that joined")
        assert not running.done()
        slow.unlink()
        assert await running == expected
        assert await c.nodes["n1"].chat(max_tokens=400) == expected

        async def old_plan_is_gone() -> bool:
            status = (await c.nodes["n0"].get("/v1/topology"))["status"]
            return len(status["places"]) == 1 and len(status["shards"]) == 1

        await until(old_plan_is_gone, "the drained plan is dropped and its shard given back")


async def test_a_node_too_small_for_a_layer_is_left_out_and_still_serves_clients(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as c:
        c.add("big", "--memory", "1GB")
        c.add("tiny", "--memory", "500KB")
        await c.together()
        assert await c.nodes["tiny"].chat() == await c.nodes["big"].chat()
        (plan,) = (await c.nodes["tiny"].get("/v1/topology"))["plans"]
        assert [m["node_id"] for m in plan["members"]] == ["big"]
        assert plan["left_out"][0][0] == "tiny"
        assert "too little free memory" in plan["left_out"][0][1]


async def test_a_model_no_cluster_holds_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.add("n0", "--memory", "4MB")
        c.add("n1", "--memory", "2MB")
        await c.together()
        with pytest.raises(ApiError) as refused:
            await c.nodes["n1"].chat()
        assert refused.value.status == 503
        assert refused.value.code == "model_too_large"
        assert "n0 can take" in refused.value.message


async def test_a_clean_exit_says_goodbye(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await ring_of(c, 3)
        assert await c.nodes["n2"].chat()
        await asyncio.to_thread(c.nodes["n1"].stop)
        await c.together("n0", "n2")
        assert await c.nodes["n2"].chat()
        assert await c.nodes["n0"].ring() == ["n0", "n2"]


async def test_a_client_that_goes_away_frees_its_sequence_on_every_node(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for i in range(3):
            c.add(f"n{i}", "--memory", f"{3 - i}GB", EXO_DUMMY_FAULTS="delay=0.02")
        await c.together()
        for streaming in (True, False):
            if streaming:
                async for _ in c.nodes["n2"].stream(max_tokens=2000):
                    break
            else:
                asked = asyncio.create_task(c.nodes["n2"].chat(max_tokens=2000))
                await until(lambda: _sequences(c, "n0", 1), "the request runs at the head")
                asked.cancel()
            await until(lambda: _sequences(c, "n0", 0), "the head dropped the sequence")


async def _sequences(c: Cluster, name: str, count: int) -> bool:
    return bool((await c.nodes[name].get("/v1/topology"))["status"]["sequences"] == count)


async def test_two_nodes_with_one_id_are_told_so(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        c.add("twin")
        await c.together()
        second = Cluster(tmp_path, tmp_path / "other")
        second._cluster, second._broadcast_port = c._cluster, c._broadcast_port
        other = second.add("twin")
        try:
            await until(other.answers, "the second one answers")

            async def knows() -> str:
                nodes = (await other.get("/v1/topology"))["nodes"]
                return str(nodes["twin"]["problem"])

            assert "--node-id" in await until(knows, "the duplicate is named")
        finally:
            await asyncio.to_thread(second.stop)


async def test_manual_peers_and_a_peer_that_is_not_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        first = c.add("n0", "--discovery-module", "none")
        c.add("n1", "--peers", f"127.0.0.1:{first.node_port},127.0.0.1:9")
        await c.together()
        assert await c.nodes["n1"].chat() == await first.chat()

        async def problem() -> str:
            nodes = (await c.nodes["n1"].get("/v1/topology"))["nodes"]
            return str(nodes.get("127.0.0.1:9", {}).get("problem", ""))

        assert "firewall" in await until(problem, "the peer that is not there is shown as such")


async def test_a_long_prompt_says_how_much_of_it_is_read(tmp_path: Path) -> None:
    """Asked at a node that is not the head: what the head tells comes over gRPC."""
    async with cluster(tmp_path) as c:
        for i in range(2):
            c.add(f"n{i}", "--memory", f"{2 - i}GB", EXO_DUMMY_FAULTS="delay=0.3")
        await c.together()
        body = {
            "model": "dummy",
            "messages": [{"role": "user", "content": "x" * 640}],
            "max_tokens": 2,
            "stream": True,
        }
        async with aiohttp.ClientSession() as session:
            url = f"{c.nodes['n1'].url}/v1/chat/completions"
            async with session.post(url, json=body) as response:
                text = await response.text()
            # In llama.cpp's form, where asked for.
            body["messages"] = [{"role": "user", "content": "y" * 640}]
            async with session.post(url, json=body | {"return_progress": True}) as response:
                events = [json.loads(line[6:]) async for line in response.content if b": {" in line]
        read = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert len(read) > 1 and {event["id"] for event in events} == {events[0]["id"]}
        assert 0 < read[0]["processed"] < read[-1]["processed"] < read[0]["total"]
        assert read[0]["cache"] == 0 and 0 < read[0]["time_ms"] < read[-1]["time_ms"]
        shares = [int(share) for share in re.findall(r"^: reading the prompt (\d+)%", text, re.M)]
        assert len(shares) > 1 and shares == sorted(shares) and 0 < shares[0] < 100, text
        assert text.endswith("data: [DONE]\n\n")
