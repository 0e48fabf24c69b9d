"""Whatever shape a repository has, naming it is enough: fetched, run, on one node and on three.

On one core, with few descriptors, killed at any moment, many at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zoo
from cluster import cluster, free_port, until
from forked import Command, start_command
from gguf_files import write_gguf
from hub_server import HubServer
from repositories import RUNNABLE, Shape, recorded, shaped

FEW_FILES = 256

ALL = os.environ.get("EXO_TEST_ALL") == "1"
KILLED = ["deepseek-ai/DeepSeek-V3", "someone/odd_Names.v1"]
"""Shapes that are killed in every run; all of them where EXO_TEST_ALL is 1: 20 s each."""

NEVER = (".bin", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".png", ".tflite", ".ot")


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        yield running


def shape(repo: str, server: HubServer, tmp_path: Path) -> Shape:
    made = shaped(repo, tmp_path / "made")
    server.put(repo, made.files)
    server.sent.clear()
    return made


def exo(
    folder: Path, server: HubServer, *arguments: str, cores: int = 1, files: int = FEW_FILES
) -> Command | subprocess.Popen[str]:
    """An exo of its own on few cores and with few descriptors."""
    own = {
        "EXO_HOME": str(folder / "home"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
    }
    if arguments[0] in ("run", "download"):
        arguments += ("--discovery-module", "none", "--interface", "lo")
        arguments += ("--chatgpt-api-port", str(free_port()))
    return start_command(arguments, own, folder / "outputs", cores, files)


def ended(process: Command | subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it did not end:\n{out}\n{err}") from None
    return process.returncode, out, err


def check_sent(made: Shape, server: HubServer, nodes: int = 1) -> None:
    """Each byte that is needed was sent once, and nothing that can never be used. To place a model
    each node reads the headers of the weight files, at most 64 KiB of each."""
    by_content = {made.files[path]: path for path in server.sent}
    for path, count in server.sent.items():
        again = nodes * 65536 if path in made.weights else 0
        assert 0 <= count - len(made.files[path]) <= again, path
        assert not path.endswith(NEVER) and "/" not in path, path
        assert not path.endswith(".safetensors") or path in made.weights, path
    for path in (*made.weights, "config.json", "tokenizer.json"):
        assert made.files[path] in by_content, path


GGUF = "bartowski/Qwen2.5-7B-Instruct-GGUF"
RUN = ("--prompt", "word1 word2", "--max-tokens", "3", "--temperature", "0")


@pytest.mark.parametrize("repo", RUNNABLE)
def test_naming_it_is_enough(repo: str, server: HubServer, tmp_path: Path) -> None:
    made = shape(repo, server, tmp_path)
    status, out, err = ended(exo(tmp_path, server, "run", repo, *RUN))
    assert status == 0, err
    assert len(out.split()) == 3
    check_sent(made, server)
    before = Counter(server.sent)
    status, out, err = ended(exo(tmp_path, server, "download", repo, "-v", cores=2))
    assert status == 0 and f"{repo} is here" in out, err
    told = [path for path in made.files if path in out]
    assert set(told) >= {path for path in made.files if path.endswith(NEVER)}
    assert all(server.sent[path] == count for path, count in before.items())


@contextlib.contextmanager
def pinned(cores: list[int]) -> Iterator[None]:
    """What is started meanwhile stays on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("repo", RUNNABLE)
async def test_three_nodes_fetch_each_byte_once_and_answer(
    repo: str, server: HubServer, tmp_path: Path
) -> None:
    made = shape(repo, server, tmp_path)
    on = sorted(os.sched_getaffinity(0))
    if RUNNABLE.index(repo) % 2:
        on = on[:1]  # all three on one core
    async with cluster(tmp_path) as c:
        with pinned(on):
            for name in ("a", "b", "c"):
                c.add_with_cache(name, server.url, "--memory", "1GB")
        await c.together()
        text = await c.nodes["b"].chat("word1 word2", repo, max_tokens=3)
        assert await c.nodes["c"].chat("word1 word2", repo, max_tokens=3) == text
        await c.nodes["a"].post(
            "/v1/download", {"model": repo, "all_nodes": True, "wait": True}, 60
        )
    check_sent(made, server, nodes=3)


def test_what_is_no_model_says_what_it_is(server: HubServer, tmp_path: Path) -> None:
    says = {
        GGUF: "25 quantizations: IQ2_M (",
        "someone/only-a-readme": "no config.json",
        "someone/upload-that-stopped": "model-00003-of-00004.safetensors is missing",
    }
    assert set(says) == set(recorded()) - set(RUNNABLE)
    for repo, text in says.items():
        shape(repo, server, tmp_path)
        status, _, err = ended(exo(tmp_path, server, "run", repo, *RUN))
        assert status == 1 and text in err and repo in err, err
        assert not server.sent


def put_gguf(server: HubServer, folder: Path) -> dict[str, bytes]:
    """The repo of GGUF files, its Q4_K_M one a model."""
    files = shape(GGUF, server, folder).files
    zoo.write_checkpoint("qwen2", folder / "source")
    write_gguf(folder / "source", folder / "m.gguf")
    [name] = [path for path in files if path.endswith("-Q4_K_M.gguf")]
    files = files | {name: (folder / "m.gguf").read_bytes()}
    server.put(GGUF, files)
    server.sent.clear()
    return {name: files[name]}


def test_a_quantization_of_a_gguf_repo_runs(server: HubServer, tmp_path: Path) -> None:
    [(name, data)] = put_gguf(server, tmp_path).items()
    status, out, err = ended(exo(tmp_path, server, "run", f"{GGUF}:q4_k_m", *RUN))
    assert status == 0 and out.strip(), err
    assert list(server.sent) == [name]
    assert len(data) <= server.sent[name] <= len(data) + 65536  # to look at its header
    status, out, err = ended(exo(tmp_path, server, "models"))
    assert f"{GGUF}:Q4_K_M" in out.replace("\n", ""), out
    assert f" {len(data) / 1e6:.0f} MB" in out, out
    status, _, err = ended(exo(tmp_path, server, "run", f"{GGUF}:Q9_X", *RUN))
    assert status == 1 and "has no quantization 'Q9_X', but IQ2_M (" in err, err
    status, _, err = ended(exo(tmp_path, server, "rm", f"{GGUF}:Q4_K_M"))
    assert status == 0, err
    assert not list((tmp_path / "hub").rglob("*.gguf"))


async def test_three_nodes_bring_a_gguf_file_once(server: HubServer, tmp_path: Path) -> None:
    [(name, data)] = put_gguf(server, tmp_path).items()
    async with cluster(tmp_path) as c:
        for node in ("a", "b", "c"):
            c.add_with_cache(node, server.url, "--memory", "1GB")
        await c.together()
        model = f"{GGUF}:Q4_K_M"
        text = await c.nodes["b"].chat("ab", model, max_tokens=3)
        assert await c.nodes["c"].chat("ab", model, max_tokens=3) == text
    assert list(server.sent) == [name]
    assert len(data) <= server.sent[name] <= len(data) + 3 * 65536


def test_an_index_that_names_a_missing_file_ends_it_early(
    server: HubServer, tmp_path: Path
) -> None:
    made = shape("mlx-community/Qwen3-0.6B-4bit", server, tmp_path)
    index = b'{"weight_map": {"a": "model.safetensors", "b": "model-extra.safetensors"}}'
    server.put("someone/index", made.files | {"model.safetensors.index.json": index})
    status, _, err = ended(exo(tmp_path, server, "download", "someone/index"))
    assert status == 1
    assert "its index names model-extra.safetensors, which is not there" in err


@pytest.mark.parametrize("repo", RUNNABLE if ALL else KILLED)
def test_killed_at_ten_moments_it_arrives(repo: str, server: HubServer, tmp_path: Path) -> None:
    made = shape(repo, server, tmp_path)
    server.rate = 1e6
    rng = random.Random(repo)
    try:
        for _ in range(10):
            sent = sum(server.sent.values())
            process = exo(tmp_path, server, "download", repo, cores=2)
            enough = sent + rng.randrange(1, 100_000)
            deadline = time.monotonic() + 30
            while sum(server.sent.values()) < enough and process.poll() is None:
                assert time.monotonic() < deadline, "nothing comes"
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.communicate()
    finally:
        server.rate = None
    status, _, err = ended(exo(tmp_path, server, "download", repo, cores=2))
    assert status == 0, err
    (snapshot,) = (tmp_path / "hub").glob("models--*/snapshots/*")
    for path in (*made.weights, "config.json", "tokenizer.json"):
        assert (snapshot / path).read_bytes() == made.files[path]
    assert not [f for f in (snapshot.parents[1] / "blobs").iterdir() if "exo" in f.name]


@pytest.mark.parametrize("repo", RUNNABLE if ALL else KILLED[1:])
async def test_three_nodes_killed_at_ten_moments_have_it_in_the_end(
    repo: str, server: HubServer, tmp_path: Path
) -> None:
    made = shape(repo, server, tmp_path)
    server.rate = 1e6
    rng = random.Random(repo)
    everywhere = {"model": repo, "all_nodes": True}
    try:
        async with cluster(tmp_path) as c:
            for name in ("a", "b", "c"):
                c.add_with_cache(name, server.url)
            await c.together()
            for _ in range(10):
                via, victim = rng.sample(["a", "b", "c"], 2)
                await c.nodes[via].post("/v1/download", everywhere)
                enough = sum(server.sent.values()) + rng.randrange(1, 100_000)
                with contextlib.suppress(AssertionError):  # it may be whole by now
                    await until(lambda n=enough: sum(server.sent.values()) >= n, "more", 1)
                c.nodes[victim].kill()
                c.nodes[victim].start()
                await c.together()
            server.rate = None
            end = await c.nodes["a"].post("/v1/download", everywhere | {"wait": True}, 60)
            assert end["nodes"] == {"a": "ready", "b": "ready", "c": "ready"}
    finally:
        server.rate = None
    for name in ("a", "b", "c"):
        (snapshot,) = (tmp_path / f"cache-{name}").glob("models--*/snapshots/*")
        for path in (*made.weights, "config.json", "tokenizer.json"):
            assert (snapshot / path).read_bytes() == made.files[path]


async def test_ten_models_at_once_arrive_on_one_node(server: HubServer, tmp_path: Path) -> None:
    made = shape("mlx-community/Qwen3-0.6B-4bit", server, tmp_path)
    repos = [f"org/model{i}" for i in range(10)]
    for i, repo in enumerate(repos):
        server.put(repo, made.files | {"vocab.json": bytes([i]) * 400_000})
    async with cluster(tmp_path) as c:
        node = c.add_with_cache("a", server.url)
        await c.together()
        body = {"wait": True}
        ends = await asyncio.gather(
            *(node.post("/v1/download", body | {"model": repo}, 60) for repo in repos)
        )
        assert all(end["nodes"] == {"a": "ready"} for end in ends)
