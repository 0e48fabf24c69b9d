"""Clients that leave at any event, read slowly, or send their body a byte at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cluster import ExoProcess, cluster, until

HELLO = [{"role": "user", "content": "hello"}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 400, "n": 2}),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 400}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 400}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 400}),
    "ollama": ("/api/chat", {"messages": HELLO, "options": {"num_predict": 400}}),
}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[ExoProcess]:
    async with cluster(tmp_path) as c:
        for name in ("n0", "n1"):
            c.add(name, "--memory", "1GB", EXO_DUMMY_FAULTS="delay=0.002")
        await c.together()
        await c.nodes["n0"].chat()
        yield c.nodes["n0"]


async def sequences(node: ExoProcess) -> int:
    return int((await node.get("/v1/topology"))["status"]["sequences"])


async def test_who_leaves_at_any_event_leaves_nothing_behind(node: ExoProcess) -> None:
    async with aiohttp.ClientSession() as session:
        for path, body in DIALECTS.values():
            asked = {"model": "dummy", "stream": True} | body
            for count in range(7):
                async with session.post(node.url + path, json=asked) as response:
                    assert response.status == 200
                    for _ in range(count):
                        await response.content.readline()
                    response.close()

    async def nobody() -> bool:
        return await sequences(node) == 0

    await until(nobody, "all of their sequences are cancelled", 10)
    assert "Traceback" not in node.log.read_text()
    assert len(await node.chat(max_tokens=20)) == 20


async def test_a_slow_reader_holds_up_nobody_else(node: ExoProcess) -> None:
    asked = {"model": "dummy", "messages": HELLO, "max_tokens": 2000, "stream": True}
    async with aiohttp.ClientSession(read_bufsize=16) as session:
        async with session.post(f"{node.url}/v1/chat/completions", json=asked) as slow:
            await slow.content.read(1)
            for _ in range(3):
                assert len(await node.chat(max_tokens=20)) == 20
                await slow.content.read(1)


async def test_a_body_that_comes_slowly_is_read(node: ExoProcess) -> None:
    body = json.dumps({"model": "dummy", "messages": HELLO, "max_tokens": 4}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", node.api_port)
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode())
    for byte in body:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.001)
    answer = await asyncio.wait_for(reader.read(), 20)
    assert b"200 OK" in answer and b'"finish_reason": "length"' in answer
    writer.close()


async def test_who_does_not_fit_the_queue_is_told_when_to_come_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.add("n0", "--max-requests", "20", EXO_DUMMY_FAULTS="delay=0.002")
        await c.together()
        alone = await node.chat("hello")
        body = {"model": "dummy", "messages": HELLO, "max_tokens": 12}

        async def one(session: aiohttp.ClientSession) -> int:
            url = f"{node.url}/v1/chat/completions"
            async with session.post(url, json=body) as response:
                answer = await response.json()
                if response.status == 200:
                    assert answer["choices"][0]["message"]["content"] == alone
                else:
                    assert int(response.headers["Retry-After"]) > 0
                    assert answer["error"]["code"] == "overloaded"
                    assert answer["error"]["type"] == "rate_limit_error"
                return response.status

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            found = await asyncio.gather(*(one(session) for _ in range(200)))
        assert set(found) == {200, 429} and found.count(200) >= 20
