"""`exo download`, `models`, `du` and `rm` as a user runs them, against a hub on loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zoo
from cluster import ApiError, cluster, free_port
from forked import start_command
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
    own = {
        "EXO_HOME": str(folder / "home"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
    }
    process = start_command(arguments, own, folder / "outputs")
    out, err = process.communicate(timeout=60)
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def test_download_shows_what_came_and_rm_takes_it_away(tmp_path: Path, server: HubServer) -> None:
    alone = ("--discovery-module", "none", "--interface", "lo")
    port = ("--chatgpt-api-port", str(free_port()))
    done = exo(tmp_path, server.url, "download", REPO, *alone, *port)
    assert done.returncode == 0, done.stderr
    assert f"{REPO} is here: 1 MB from hub" in done.stdout
    again = exo(tmp_path, server.url, "download", REPO, *alone, *port)
    assert again.stdout.strip() == f"{REPO} is here"
    assert REPO in exo(tmp_path, server.url, "models", *port).stdout
    assert REPO in exo(tmp_path, server.url, "du").stdout
    gone = exo(tmp_path, server.url, "rm", REPO)
    assert gone.returncode == 0 and "is gone, 1 MB" in gone.stdout
    assert not list((tmp_path / "hub").glob("models--*"))
    twice = exo(tmp_path, server.url, "rm", REPO)
    assert twice.returncode == 1 and f"{REPO} is not on this machine" in twice.stderr


def test_a_shard_is_a_part_of_the_files(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "one")
    zoo.cut_into_files(tmp_path / "one", tmp_path / "tiny", 6)
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    port = ("--chatgpt-api-port", str(free_port()))
    alone = ("--discovery-module", "none", "--interface", "lo", *port)
    with HubServer() as server:
        server.put(REPO, {f.name: f.read_bytes() for f in (tmp_path / "tiny").iterdir()})
        done = exo(tmp_path, server.url, "download", REPO, "--shard", "1/3", *alone)
        assert done.returncode == 0, done.stderr
        assert f"shard 1/3 of {REPO} is here" in done.stdout
        wrong = exo(tmp_path, server.url, "download", REPO, "--shard", "4/3", *alone)
        assert wrong.returncode == 1 and "expected 1/n to n/n" in wrong.stderr
        odd = exo(tmp_path, server.url, "download", REPO, "--shard", "half", *alone)
        assert odd.returncode == 1 and 'shard is like "1/3"' in odd.stderr
    here = list((tmp_path / "hub").glob("models--*/snapshots/*/*.safetensors"))
    assert 0 < len(here) < 4
    assert "0 MB, in part" in exo(tmp_path, "", "models", *port).stdout
    assert "is gone" in exo(tmp_path, "", "rm", REPO).stdout


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
            c.add_with_cache(name, server.url)
        await c.together()
        port = ("--chatgpt-api-port", str(c.nodes["a"].api_port))
        done = exo(tmp_path, server.url, "download", REPO, "--all-nodes", *port)
        assert done.returncode == 0, done.stderr
        assert {"a: ready", "b: ready"} <= set(done.stdout.splitlines())
        for name in ("a", "b"):
            assert list(
                (tmp_path / f"cache-{name}").glob("models--org--tiny/snapshots/*/config.json")
            )
        listed = exo(tmp_path, server.url, "models", *port).stdout
        (row,) = [line for line in listed.splitlines() if REPO in line]
        assert "a, b" in row and "on other nodes" in row
        gone = await c.nodes["b"].delete(f"/v1/models/{REPO}")
        assert gone["deleted"] and gone["freed"] > 900_000
        with pytest.raises(ApiError) as refused:
            await c.nodes["b"].delete(f"/v1/models/{REPO}")
        assert refused.value.code == "model_not_found"
