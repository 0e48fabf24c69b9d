"""`exo bench`: tokens a second of an engine, of nodes on this machine, of a running cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn
from rich.table import Table

from exo.cli.client import node_at
from exo.cli.client import session as client_session
from exo.cli.settings import home
from exo.download.progress import unheard
from exo.download.store import ModelStore, default_sources
from exo.errors import EngineFailed, PeerUnavailable, error_from_code
from exo.inference.benchmark import (
    DECODED_TOKENS,
    EngineBenchmark,
    Measurement,
    Plan,
    read_bandwidth,
)
from exo.inference.choose import make_engine
from exo.inference.cpu.available import why_not
from exo.inference.cpu.cores import usable_cores
from exo.models.card import default_model
from exo.topology.capabilities import probe

_START_S = 60.0
_STOP_S = 5.0


def bench(args: argparse.Namespace) -> int:
    """Measure, show each number as it comes, and print the table or the JSON."""
    plan = Plan(args.prefill, args.decode, args.batch, args.repetitions)
    threads = args.threads or usable_cores()
    found = asyncio.run(_collect(args, plan, threads))
    if args.json:
        print(json.dumps(_as_json(_model(args), found)))  # noqa: T201
    else:
        _print_table(found)
    return 0


async def _collect(args: argparse.Namespace, plan: Plan, threads: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(f"loading {_model(args)}")
        if args.running:
            results = _measure_nodes([await _running(args)], _model(args), plan, 0)
        elif args.ring:
            results = _measure_rings(args, plan, threads)
        else:
            results = _measure_engine(args, plan, threads)
        async with contextlib.aclosing(results):
            async for result in results:
                found.append(result)
                bars.update(task, description=_describe(result))
    return found


# An engine in this process ---------------------------------------------------------------------


async def _measure_engine(
    args: argparse.Namespace, plan: Plan, threads: int
) -> AsyncGenerator[dict[str, Any], None]:
    path = await _files(_model(args))
    engine = make_engine(
        args.inference_engine, threads, precise=args.precise, kernels=home() / "kernels"
    )
    engine.kv_bits = args.kv_bits
    try:
        benchmark, loaded = await EngineBenchmark.load(engine, _model(args), path, threads)
        yield loaded
        decode_tok_s = 0.0
        async for measured in benchmark.run(plan):
            if measured.test == "decode" and measured.batch == 1:
                decode_tok_s = max(decode_tok_s, measured.tok_s)
            yield measured.to_json()
            if measured.test == "prefill" and measured.n_tokens == 512:
                # A prefill ends with a sampled token.
                seconds = measured.n_tokens / measured.tok_s
                yield {"test": "first_token", "n_tokens": 512, "seconds": seconds}
        if engine.name == "cpu" and not why_not():
            yield _bandwidth(decode_tok_s, path, threads)
    finally:
        await engine.close()


def _bandwidth(decode_tok_s: float, path: Path, threads: int) -> dict[str, Any]:
    """What decoding reads a second beside what these threads can read."""
    from exo.inference.cpu import _native as native
    from exo.inference.cpu.shard_model import CheckpointModel

    read = CheckpointModel(path).bytes_of_a_token()
    measured = read_bandwidth(native.read_all)
    return {
        "test": "bandwidth",
        "threads": threads,
        "read_gb_s": measured / 1e9,
        "decode_gb_s": decode_tok_s * read / 1e9,
        "share": decode_tok_s * read / measured,
    }


async def _files(model: str) -> Path:
    models_dir = home() / "models"
    store = ModelStore(models_dir, default_sources(models_dir))
    try:
        return await store.ensure(model, unheard)
    finally:
        store.close()


# Nodes -----------------------------------------------------------------------------------------


async def _running(args: argparse.Namespace) -> str:
    url = await node_at(args.chatgpt_api_port)
    if url is None:
        raise PeerUnavailable(f"no exo node answers on port {args.chatgpt_api_port}; start `exo`")
    return url


async def _measure_rings(
    args: argparse.Namespace, plan: Plan, threads: int
) -> AsyncGenerator[dict[str, Any], None]:
    await _files(_model(args))
    longest, step_s = max(args.ring), 0.0
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(_nodes(args, count, threads)) for count in args.ring
        ]
        async for result in _measure_nodes(urls, _model(args), plan, threads):
            is_step = result["test"] == "decode" and result["batch"] == 1
            if is_step and result["nodes"] == longest and not step_s:
                step_s = 1 / result["tok_s"]
            yield result
    if step_s and longest > 1:
        yield await _hop(args, plan, threads, longest, step_s)


async def _hop(
    args: argparse.Namespace, plan: Plan, threads: int, nodes: int, step_s: float
) -> dict[str, Any]:
    """What a step takes beyond one engine's arithmetic, for each link of the ring."""
    only = Plan((), plan.decode[:1], (1,), plan.repetitions)
    async with contextlib.aclosing(_measure_engine(args, only, threads)) as results:
        async for result in results:
            if result["test"] == "decode":
                alone_s = 1 / result["tok_s"]
                return {
                    "test": "hop",
                    "nodes": nodes,
                    "threads": threads,
                    "seconds": (step_s - alone_s) / nodes,
                }
    raise EngineFailed("nothing was measured")


async def _measure_nodes(
    urls: list[str], model: str, plan: Plan, threads: int
) -> AsyncGenerator[dict[str, Any], None]:
    """Each test on the clusters in turns, a repetition each."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with client_session(timeout) as session:

        async def ask(url: str, context: int, tokens: int, batch: int) -> dict[str, Any]:
            body = {"model": model, "context": context, "tokens": tokens, "batch": batch}
            async with session.post(f"{url}/v1/bench", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    error = answer["error"]
                    raise error_from_code(error["code"], error["message"])
                return dict(answer)

        async def ask_for_all(url: str, context: int, tokens: int, batch: int) -> dict[str, Any]:
            """With as many tokens as it takes until all sequences decode together."""
            for times in (1, 2, 4):
                answer = await ask(url, context, times * tokens, batch)
                if tokens == 1 or answer["decode_tok_s"] is not None:
                    return answer
            raise EngineFailed(
                f"of {batch} sequences the first had {4 * tokens} tokens before the last began; "
                "name fewer with --batch"
            )

        async def in_turns(context: int, tokens: int, batch: int) -> list[list[dict[str, Any]]]:
            turns = [
                [await ask_for_all(url, context, tokens, batch) for url in urls]
                for _ in range(plan.repetitions)
            ]
            return [list(of_one) for of_one in zip(*turns, strict=True)]

        sizes = [(await ask(url, 16, 2, 1))["nodes"] for url in urls]
        for n in plan.prefill:
            for nodes, answers in zip(sizes, await in_turns(n, 1, 1), strict=True):
                seconds = [answer["first_token_s"] for answer in answers]
                measured = Measurement.of("prefill", n, seconds, threads=threads, nodes=nodes)
                yield measured.to_json()
        for context, batch in plan.decode_cases:
            # Sequences begin one after the other: enough tokens that all decode together.
            tokens = DECODED_TOKENS + 2 * batch
            for nodes, answers in zip(sizes, await in_turns(context, tokens, batch), strict=True):
                seconds = [DECODED_TOKENS * batch / answer["decode_tok_s"] for answer in answers]
                yield Measurement.of(
                    "decode",
                    DECODED_TOKENS,
                    seconds,
                    context=context,
                    batch=batch,
                    threads=threads,
                    nodes=nodes,
                ).to_json()


@contextlib.asynccontextmanager
async def _nodes(args: argparse.Namespace, count: int, threads: int) -> AsyncIterator[str]:
    """`count` exo processes on loopback that share the model evenly; the URL of one of them."""
    broadcast, cluster = _free_port(socket.SOCK_DGRAM), f"bench-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"node{i}.log" for i in range(count)]
        ports = [_free_port(socket.SOCK_STREAM) for _ in range(count)]
        with contextlib.ExitStack() as stack:
            for i in range(count):
                command = [sys.executable, "-m", "exo.cli.main", "--disable-tui"]
                command += ["--interface", "lo0" if platform.system() == "Darwin" else "lo"]
                command += ["--cluster", cluster, "--broadcast-port", str(broadcast)]
                command += [
                    "--no-preload",
                    "--partition",
                    "memory",
                    "--node-id",
                    f"bench{i}",
                    "--memory",
                    f"{_share(count)}",
                ]
                command += ["--chatgpt-api-port", str(ports[i]), "--threads", str(threads)]
                command += ["--inference-engine", args.inference_engine]
                command += ["--precise"] if args.precise else []
                command += ["--kv-bits", str(args.kv_bits)]
                stack.enter_context(_process(command, logs[i], _cores_of(i, count, threads)))
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            try:
                for url in urls:
                    await _together(url, count)
            except TimeoutError:
                last = logs[0].read_text("utf-8").splitlines()[-5:]
                raise PeerUnavailable(
                    f"{count} nodes on this machine did not come together in {_START_S:.0f} s: "
                    + " / ".join(last)
                ) from None
            yield urls[0]


def _share(count: int) -> int:
    """Memory each node says it has: the same for all, so that layers are shared evenly."""
    return probe().memory_available_bytes * 8 // 10 // count


def _cores_of(node: int, count: int, threads: int) -> set[int]:
    """Cores of its own for each node, as a machine of its own would have; empty: not enough."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[node * threads : (node + 1) * threads]
    return set(mine) if len(cores) >= count * threads else set()


@contextlib.contextmanager
def _process(command: list[str], log: Path, cores: set[int]) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _together(url: str, count: int) -> None:
    deadline = time.monotonic() + _START_S
    async with client_session() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/v1/topology") as response:
                    nodes = (await response.json())["nodes"].values()
                    if sum(node["state"] in ("self", "alive") for node in nodes) == count:
                        return
            if time.monotonic() > deadline:
                raise TimeoutError
            await asyncio.sleep(0.05)


def _free_port(kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_INET, kind) as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])


# What is shown ---------------------------------------------------------------------------------


def _model(args: argparse.Namespace) -> str:
    return str(args.model or default_model())


def _machine() -> dict[str, Any]:
    found = probe().to_json()
    found["system"] = f"{platform.system()} {platform.machine()}"
    found["usable_cores"] = usable_cores()
    if not why_not():
        from exo.inference.cpu import _native as native

        found["kernels"] = native.isa()
    return found


def _as_json(model: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Speeds under "results"; load, first_token, bandwidth and hop by their names."""
    others = {r["test"]: {k: v for k, v in r.items() if k != "test"} for r in found}
    speeds = [r for r in found if "tok_s" in r]
    for r in speeds:
        others.pop(r["test"], None)
    return {"machine": _machine(), "model": model, "results": speeds, **others}


def _describe(result: dict[str, Any]) -> str:
    if "tok_s" in result:
        where = f"{result['n_tokens']}" if result["test"] == "prefill" else f"@{result['context']}"
        batch = f" x {result['batch']}" if result["batch"] > 1 else ""
        return f"{result['test']} {where}{batch}: {result['tok_s']:.1f} tok/s"
    return str(result["test"])


def _print_table(results: list[dict[str, Any]]) -> None:
    machine = _machine()
    console = Console(soft_wrap=True)
    kernels = f", {machine['kernels']} kernels" if "kernels" in machine else ""
    console.print(f"{machine['chip']}, {machine['usable_cores']} cores{kernels}", style="dim")
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    for column in ("test", "tokens", "context", "batch", "threads", "nodes", "tok/s", "range"):
        table.add_column(column, justify="left" if column == "test" else "right")
    for r in results:
        if "tok_s" in r:
            table.add_row(
                r["test"],
                str(r["n_tokens"]),
                str(r["context"]),
                str(r["batch"]),
                str(r["threads"] or ""),
                str(r["nodes"]),
                f"{r['tok_s']:.1f}",
                f"{r['min']:.1f} … {r['max']:.1f}",
            )
    console.print(table)
    for r in results:
        console.print(line) if (line := _line(r)) else None


def _line(r: dict[str, Any]) -> str:
    """What is no speed in tokens, as a sentence."""
    if r["test"] == "load":
        ratio = r["memory_bytes"] / r["checkpoint_bytes"]
        return (
            f"loaded in {r['seconds']:.2f} s, {r['memory_bytes'] / 1e6:.0f} MB of memory "
            f"({ratio:.2f} x the checkpoint)"
        )
    if r["test"] == "first_token":
        return f"first token of {r['n_tokens']} after {r['seconds'] * 1000:.0f} ms"
    if r["test"] == "bandwidth":
        return (
            f"decoding reads {r['decode_gb_s']:.1f} GB/s of the {r['read_gb_s']:.1f} GB/s that "
            f"{r['threads']} threads can read ({r['share']:.0%})"
        )
    if r["test"] == "hop":
        return f"a hop costs {r['seconds'] * 1000:.2f} ms of each step"
    return ""
