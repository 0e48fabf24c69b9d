"""Keys, other sites' pages, further names, the API's own description, what it measures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, ExoProcess, cluster, until

SITE = "http://localhost:3000"
BODY = {
    "model": "claude-x",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "hello"}],
}


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as c:
        keys = tmp_path / "keys"
        keys.write_text("# ours\nfrom-a-file\n")
        flags = ["--api-key", "sekret", "--api-key-file", str(keys), "--cors-origin", SITE]
        flags += ["--alias", "claude-x=dummy"]
        both = ["--log-format", "json", "--memory", "1GB"]
        c.add("n0", *flags, *both)
        c.add("n1", *both)
        yield c


def names_in(log: Path) -> Iterator[str]:
    """Of the requests that lines are about."""
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            yield json.loads(line).get("request_id", "")


async def ask(node: ExoProcess, path: str, body: Any = None, **headers: str) -> tuple[Any, str]:
    """Response and text; headers with - for _."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession(headers=named) as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, node.url + path, json=body) as response:
            return response, await response.text()


async def test_keys_sites_names_and_measurements(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.nodes["n0"]
    await until(node.answers, "it answers without a key")
    for path, body in (("/v1/chat/completions", BODY), ("/v1/models", None), ("/metrics", None)):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x_api_key": "sekre"}):
            response, text = await ask(node, path, body, **headers)
            assert response.status == 401, path
            assert json.loads(text)["error"]["code"] == "invalid_api_key"
    response, text = await ask(node, "/v1/messages", BODY)
    assert json.loads(text)["error"]["type"] == "authentication_error"
    for path in (
        "/",
        "/tinychat/main.js",
        "/healthcheck",
        "/docs",
        "/docs/guide",
        "/tinychat/guide/start.md",
    ):
        assert (await ask(node, path))[0].status == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", node.api_port)
    wrong = b"Host: localhost\r\nAuthorization: Bearer se\xffkret\r\nConnection: close\r\n\r\n"
    writer.write(b"GET /v1/models HTTP/1.1\r\n" + wrong)
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()
    async with aiohttp.ClientSession() as session, session.head(f"{node.url}/healthcheck") as head:
        assert head.status == 200

    async def sees_both() -> bool:
        _, text = await ask(node, "/v1/topology", x_api_key="sekret")
        found = json.loads(text)["nodes"].values()
        return [one["state"] for one in found].count("alive") == 1

    await until(sees_both, "n0 sees n1")
    names = []
    for key in ({"Authorization": "bearer sekret"}, {"x_api_key": "from-a-file"}):
        response, text = await ask(node, "/v1/chat/completions", BODY, Origin=SITE, **key)
        assert response.status == 200 and json.loads(text)["model"] == "claude-x"
        assert response.headers["Access-Control-Allow-Origin"] == SITE
        names.append(response.headers["X-Request-Id"])
    request_id = response.headers["X-Request-Id"]
    assert json.loads(text)["id"].endswith(request_id)
    response, _ = await ask(node, "/v1/models", Origin="http://evil.example", x_api_key="sekret")
    assert response.status == 403

    async with aiohttp.ClientSession() as session:
        wanted = {"Origin": SITE, "Access-Control-Request-Method": "POST"}
        async with session.options(f"{node.url}/v1/chat/completions", headers=wanted) as response:
            assert response.status == 204
            assert "POST" in response.headers["Access-Control-Allow-Methods"]

    # The request's name is in the log of both nodes, and no key in any.
    for each in nodes.nodes.values():
        await until(lambda each=each: request_id in each.log.read_text(), "the name in the log")
        assert "sekret" not in each.log.read_text()
        # The first had the model loaded, for which the nodes called each other.
        assert names[0] in set(names_in(each.log))

    _, text = await ask(node, "/metrics", x_api_key="sekret")
    series = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))
    assert float(series['exo_generated_tokens_total{model="dummy"}']) == 8
    assert float(series['exo_time_to_first_token_seconds_count{model="dummy"}']) == 2
    assert float(series["exo_nodes"]) == 2
    assert float(series['exo_errors_total{code="invalid_api_key"}']) >= 9
    # Every query of the dashboard asks for what is there.
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    names = set(re.findall(r"\bexo_\w+", dashboard))
    known = {re.match(r"\w+", name)[0] for name in series}  # type: ignore[index]
    assert names and names - known <= {"exo_download_bytes", "exo_ring_sent_bytes_total"}


async def test_the_description_is_whole(nodes: Cluster) -> None:
    node = nodes.nodes["n0"]
    await until(node.answers, "it answers")
    assert (await ask(node, "/openapi.json"))[0].status == 401
    _, text = await ask(node, "/openapi.json", x_api_key="sekret")
    described = json.loads(text)
    assert described["openapi"] == "3.1.0"
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses", "/metrics"):
        assert path in described["paths"]
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert refs and refs <= set(described["components"]["schemas"])
    chat = described["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["model", "messages"]
    assert chat["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
