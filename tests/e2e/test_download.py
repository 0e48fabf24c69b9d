"""`exo download`, `models`, `du` and `rm` as a user runs them, against a hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zoo
from cluster import ApiError, cluster, free_port
from hub_server import HubServer

REPO = "org/tiny"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    zoo.write_checkpoint("llama", tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    with HubServer() as running:
        running.put(REPO, {f.name: f.read_bytes() for f in (tmp_path / "tiny").iterdir()})
        yield running


def exo(folder: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "EXO_HOME": str(folder / "home"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "exo.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_download_shows_what_came_and_rm_takes_it_away(tmp_path: Path, server: HubServer) -> None:
    alone = ("--discovery-module", "none", "--interface", "lo")
    port = ("--chatgpt-api-port", str(free_port()))
    done = exo(tmp_path, server.url, "download", REPO, *alone, *port)
    assert done.returncode == 0, done.stderr
    assert f"{REPO} is here: 1 MB from hub" in done.stdout
    again = exo(tmp_path, server.url, "download", REPO, *alone, *port)
    assert again.stdout.strip() == f"{REPO} is here"
    assert REPO in exo(tmp_path, server.url, "models").stdout
    assert REPO in exo(tmp_path, server.url, "du").stdout
    gone = exo(tmp_path, server.url, "rm", REPO)
    assert gone.returncode == 0 and "is gone, 1 MB" in gone.stdout
    assert not list((tmp_path / "hub").glob("models--*"))
    twice = exo(tmp_path, server.url, "rm", REPO)
    assert twice.returncode == 1 and f"{REPO} is not on this machine" in twice.stderr


def test_download_says_in_one_line_why_not(tmp_path: Path, server: HubServer) -> None:
    server.repos[REPO].refuse = 403
    alone = ("--discovery-module", "none", "--interface", "lo")
    port = ("--chatgpt-api-port", str(free_port()))
    refused = exo(tmp_path, server.url, "download", REPO, *alone, *port)
    assert refused.returncode == 1
    assert refused.stderr.strip().splitlines()[-1].startswith(f"exo: {REPO} is gated")
    unknown = exo(tmp_path, server.url, "download", "smollm", *alone, *port)
    assert unknown.returncode == 1 and "did you mean" in unknown.stderr


async def test_all_nodes_of_a_cluster(tmp_path: Path, server: HubServer) -> None:
    async with cluster(tmp_path) as c:
        for name in ("a", "b"):
            c.add(
                name,
                engine="cpu",
                EXO_HOME=str(tmp_path / f"home-{name}"),
                HF_HUB_CACHE=str(tmp_path / f"cache-{name}"),
                HF_ENDPOINT=server.url,
                HF_HUB_OFFLINE="0",
            )
        await c.together()
        port = ("--chatgpt-api-port", str(c.nodes["a"].api_port))
        done = exo(tmp_path, server.url, "download", REPO, "--all-nodes", *port)
        assert done.returncode == 0, done.stderr
        assert {"a: ready", "b: ready"} <= set(done.stdout.splitlines())
        for name in ("a", "b"):
            assert list(
                (tmp_path / f"cache-{name}").glob("models--org--tiny/snapshots/*/config.json")
            )
        gone = await c.nodes["b"].delete(f"/v1/models/{REPO}")
        assert gone["deleted"] and gone["freed"] > 900_000
        with pytest.raises(ApiError) as refused:
            await c.nodes["b"].delete(f"/v1/models/{REPO}")
        assert refused.value.code == "model_not_found"
