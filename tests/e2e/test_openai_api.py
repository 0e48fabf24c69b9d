"""The HTTP API, through OpenAI's own client and through raw requests."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import vendors
from cluster import ExoProcess, cluster


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[ExoProcess]:
    async with cluster(tmp_path) as c:
        c.add("n0", "--memory", "2GB")
        c.add("n1", "--memory", "1GB")
        await c.together()
        yield c.nodes["n1"]


def client(node: ExoProcess) -> vendors.openai.AsyncOpenAI:
    return vendors.openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0)


MESSAGES = [{"role": "user", "content": "hello"}]
DEEP = b'{"model": "dummy", "messages": [], "guided_json": {"a": %s1%s}}' % (b"[" * 600, b"]" * 600)


async def test_openais_client_streams_and_waits(node: ExoProcess) -> None:
    async with client(node) as ai:
        whole = await ai.chat.completions.create(
            model="dummy", messages=MESSAGES, max_tokens=8, temperature=0
        )
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None and whole.usage.completion_tokens == 8
        stream = await ai.chat.completions.create(
            model="dummy",
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        logprobs = [t for c in chunks if c.choices for t in c.choices[0].logprobs.content]
        assert "".join(t.token for t in logprobs) == text
        assert all(len(t.top_logprobs) == 2 for t in logprobs)
        assert "dummy" in [m.id async for m in ai.models.list()]
        assert (await ai.models.retrieve("dummy")).id == "dummy"


async def test_a_seed_repeats_an_answer_on_any_node(node: ExoProcess) -> None:
    bias = {str(97 + i): 5 for i in range(26)}
    texts = {
        await node.chat(temperature=1.5, seed=11, logit_bias=bias, max_tokens=20) for _ in range(3)
    }
    assert len(texts) == 1
    other = await node.chat(temperature=1.5, seed=12, logit_bias=bias, max_tokens=20)
    assert other not in texts


async def test_stop_strings_end_the_answer_and_never_show(node: ExoProcess) -> None:
    text = await node.chat(max_tokens=30)
    stop = text[10:13]
    cut = text[: text.index(stop)]
    answer = await node.completion(max_tokens=30, stop=[stop, "zzzz"])
    assert answer["choices"][0]["message"]["content"] == cut
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "".join([p async for p in node.stream(max_tokens=30, stop=stop)]) == cut


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_request", None),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400, "invalid_request", None),
        ("POST", "/v1/chat/completions", DEEP, 400, "invalid_request", None),
        ("POST", "/v1/chat/completions", b"[]", 400, "invalid_request", None),
        ("POST", "/v1/chat/completions", {"messages": MESSAGES}, 400, "invalid_request", "model"),
        ("POST", "/v1/chat/completions", {"model": "no"}, 400, "invalid_request", "messages"),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "no", "messages": MESSAGES},
            404,
            "model_not_found",
            "model",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "llama-3.2-1b", "messages": MESSAGES},
            404,
            "model_not_found",
            "model",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "dummy", "messages": MESSAGES, "top_p": 7},
            400,
            "invalid_request",
            "top_p",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "dummy", "messages": [{"role": "user", "content": "x" * 5000}]},
            400,
            "context_length_exceeded",
            "messages",
        ),
        ("POST", "/v1/chat/completions", b" " * (9 * 2**20), 413, "invalid_request", None),
        ("GET", "/v1/chat/completions", None, 405, "invalid_request", None),
        ("GET", "/v1/nothing", None, 404, "invalid_request", None),
        ("GET", "/v1/models/no", None, 404, "model_not_found", "model"),
    ],
)
async def test_errors_are_openai_shaped(
    node: ExoProcess,
    method: str,
    path: str,
    body: object,
    status: int,
    code: str,
    param: str | None,
) -> None:
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    data = None if raw is None else io.BytesIO(raw)
    async with aiohttp.ClientSession() as session:
        async with session.request(method, node.url + path, data=data) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (status, code, param)
            assert error["message"]
            assert error["type"] == "invalid_request_error"


async def test_errors_of_a_stream_have_a_real_status(node: ExoProcess) -> None:
    async with client(node) as ai:
        with pytest.raises(vendors.openai.NotFoundError):
            await ai.chat.completions.create(model="no", messages=MESSAGES, stream=True)
        with pytest.raises(vendors.openai.BadRequestError):
            await ai.chat.completions.create(
                model="dummy", messages=[{"role": "user", "content": "x" * 5000}], stream=True
            )


async def test_pages_of_other_sites_are_refused(node: ExoProcess) -> None:
    body = {"model": "dummy", "messages": MESSAGES}
    async with aiohttp.ClientSession() as session:
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            url = f"{node.url}/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                assert response.status == 403
                assert "Access-Control-Allow-Origin" not in response.headers
        async with session.get(f"{node.url}/healthcheck", headers={"Origin": node.url}) as own:
            assert own.status == 200


async def test_a_first_request_waits_and_says_what_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.add("n0", EXO_DUMMY_FAULTS="load_delay=4")
        await c.together()
        body = {"model": "dummy", "messages": MESSAGES, "max_tokens": 3, "stream": True}
        lines = []
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{node.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
                lines = [line.decode().strip() async for line in response.content]
        waiting = [line for line in lines if line.startswith(":")]
        assert any("loading dummy[0:8]/8" in line and "%" in line for line in waiting), lines
        assert lines[-2] == "data: [DONE]" or "data: [DONE]" in lines
        health = await node.get("/healthcheck")
        assert health["ready"] == ["dummy"]


async def test_characters_of_many_bytes_arrive_whole(node: ExoProcess) -> None:
    """The dummy's tokens are bytes: forced to the bytes of 日, each piece must be valid text."""
    data = "日".encode()
    pieces = [
        piece
        async for piece in node.stream(
            max_tokens=9, temperature=2, seed=1, logit_bias={str(b): 100 for b in data}
        )
    ]
    assert "".join(pieces)
    for piece in pieces:
        piece.encode("utf-8")
    await asyncio.sleep(0)
