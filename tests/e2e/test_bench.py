"""`exo bench` as people and programs run it: on an engine, on its own nodes, on a running one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import cluster

MODEL = "smollm2-135m"
SHORT = ("--prefill", "16", "--decode", "8", "--batch", "2", "--repetitions", "1")


def bench(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "exo.cli.main", "bench", *arguments]
    environment = os.environ | {"EXO_HOME": str(home), "DEBUG": "0"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=120
    )


def found(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["machine"]["usable_cores"] >= 1
    return printed


def speeds(printed: dict) -> list[tuple]:
    measured = printed["results"]
    assert all(0 < row["min"] <= row["tok_s"] <= row["max"] for row in measured)
    return [(r["test"], r["n_tokens"], r["context"], r["batch"], r["threads"]) for r in measured]


def test_an_engine_here(exo_home: Path) -> None:
    printed = found(bench(exo_home, MODEL, "--json", "--threads", "1", *SHORT))
    assert speeds(printed) == [
        ("prefill", 16, 0, 1, 1),
        ("decode", 48, 8, 1, 1),
        ("decode", 48, 8, 2, 1),
    ]
    assert printed["load"]["seconds"] > 0 and printed["bandwidth"]["decode_gb_s"] > 0


def test_a_table_for_people(exo_home: Path) -> None:
    done = bench(exo_home, *SHORT)
    assert done.returncode == 0, done.stderr
    for word in ("prefill", "decode", "tok/s", "loaded in", "GB/s"):
        assert word in done.stdout


def test_nodes_on_this_machine(exo_home: Path) -> None:
    printed = found(bench(exo_home, MODEL, "--json", "--ring", "1,2", "--threads", "1", *SHORT))
    measured = [(row["test"], row["batch"], row["nodes"]) for row in printed["results"]]
    assert measured == [
        (*of, n) for of in (("prefill", 1), ("decode", 1), ("decode", 2)) for n in (1, 2)
    ]
    assert printed["hop"]["nodes"] == 2


async def test_a_running_node(exo_home: Path, tmp_path: Path) -> None:
    async with cluster(tmp_path, exo_home) as c:
        node = c.add("n0", engine="auto", DEBUG="1")
        await c.together()
        port = ("--chatgpt-api-port", str(node.api_port))
        printed = found(bench(exo_home, MODEL, "--json", "--running", *port, *SHORT))
    assert len(speeds(printed)) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prefill", "12,x"), "not a list of numbers"),
        (("--threads", "0"), "not a positive number"),
        (("--running", "--chatgpt-api-port", "1"), "no exo node answers on port 1"),
        (("no-such-model",), "no-such-model"),
        (("--ring", "2", "--running"), "not allowed with"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    arguments: tuple[str, ...], says: str, exo_home: Path
) -> None:
    done = bench(exo_home, *arguments)
    assert done.returncode != 0
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
