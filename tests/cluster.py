"""Real exo processes on loopback, as tests start, watch, ask and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from forked import Forked, can_fork, fork

START_S = 30.0
"""How long a process may take to answer; the machine may be busy with other tests."""

LIBRARIES = re.compile(r" D (grpc|hpack|asyncio)")


def _ports() -> Iterator[int]:
    """Below those that the system gives to connections, and other ones for each pytest worker: so
    nobody takes a port between its choice and the start of the process it is for."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = random.randrange(1000)
    while True:
        for i in range(1000):
            yield 20_000 + worker % 12 * 1000 + (first + i) % 1000


_PORTS = _ports()


def free_port() -> int:
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


def two_free_ports() -> int:
    """The first of two that follow each other."""
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    return first


def slowed(file: Path, step_s: float = 0.015) -> dict[str, str]:
    """For a node of the dummy engine that takes twenty times as long for a step while the file is
    there. An answer must not be at its end before a test, on a busy machine, has done in its middle
    what the test is about: seconds that are enough here are too few somewhere."""
    return {"EXO_DUMMY_FAULTS": f"delay={step_s},slow_while={file}"}


async def until(condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
    """Wait until `condition` (a coroutine function or a function) is true; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for: {what}")
        await asyncio.sleep(0.02)


class ApiError(Exception):
    """An error the API answered with, before or in a stream."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status = status
        self.code = error["code"]
        self.message = error["message"]
        self.param = error["param"]


@dataclass
class ExoProcess:
    """One `exo` of a cluster. `log` is its stdout and stderr."""

    name: str
    home: Path
    cluster: str
    broadcast_port: int
    log: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | Forked | None = None
    node_port: int = field(default_factory=two_free_ports)
    api_port: int = field(default_factory=free_port)

    @property
    def ring_port(self) -> int:
        return self.node_port + 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    def start(self) -> None:
        command = ["--disable-tui", "--interface", "lo"]
        command += ["--node-id", self.name, "--cluster", self.cluster]
        command += ["--broadcast-port", str(self.broadcast_port)]
        command += ["--node-port", str(self.node_port)]
        command += ["--partition", "memory"]  # every node has layers, whatever it is worth
        command += ["--chatgpt-api-port", str(self.api_port), "--no-preload", *self.arguments]
        environment = os.environ | {"EXO_HOME": str(self.home), "DEBUG": "9"} | self.environment
        if can_fork(self.environment):
            self.process = fork(command, environment, self.log)
            return
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "exo.cli.main", *command]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Ctrl-C, twice: at once. SIGKILL if it does not help."""
        if not self.lives:
            return
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end on Ctrl-C:\n{self.tail()}") from None

    def tail(self, lines: int = 60) -> str:
        """The last lines of its log, without what the libraries below say at DEBUG=9."""
        said = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in said if not LIBRARIES.search(line)][-lines:])

    async def counted(self, what: str) -> float:
        """A counter of /metrics, of all models together."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as found:
            lines = (await found.text()).splitlines()
        own = (line for line in lines if line.startswith(f"exo_{what}_total{{"))
        return sum(float(line.rpartition(" ")[2]) for line in own)

    # What clients do --------------------------------------------------------------------------

    async def get(self, path: str, timeout_s: float = 5) -> Any:
        return await self._call("GET", path, timeout_s)

    async def post(self, path: str, body: Any, timeout_s: float = 5) -> Any:
        return await self._call("POST", path, timeout_s, json=body)

    async def delete(self, path: str) -> Any:
        return await self._call("DELETE", path, 5)

    async def _call(self, method: str, path: str, timeout_s: float, **extra: Any) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with session.request(method, self.url + path, **extra) as response:
                body = await response.json()
                if response.status >= 400:
                    raise ApiError(response.status, body["error"])
                return body

    async def first_event(self, path: str) -> Any:
        """The data of the first event of a stream."""
        async with aiohttp.ClientSession() as session:
            async with session.get(self.url + path) as response:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        return json.loads(line[6:])
        raise AssertionError(f"{path} ended without an event")

    async def answers(self) -> bool:
        if not self.lives:
            raise AssertionError(f"{self.name} died:\n{self.tail()}")
        try:
            return bool(await self.get("/healthcheck", 1))
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def live_nodes(self) -> set[str]:
        nodes = (await self.get("/v1/topology"))["nodes"]
        return {name for name, node in nodes.items() if node["state"] in ("self", "alive")}

    async def ring(self, model: str = "dummy") -> list[str]:
        """The members of the model's published plan, head first; empty without one."""
        plans = (await self.get("/v1/topology"))["plans"]
        return [m["node_id"] for p in plans if p["model_id"] == model for m in p["members"]]

    async def chat(self, prompt: str = "hello", model: str = "dummy", **body: Any) -> str:
        """The whole text of an answer that is not streamed."""
        choice = (await self.completion(prompt, model, **body))["choices"][0]
        return str(choice["message"]["content"])

    async def completion(self, prompt: str = "hello", model: str = "dummy", **body: Any) -> Any:
        body = _body(prompt, model, body)
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    raise ApiError(response.status, answer["error"])
                return answer

    async def stream(
        self, prompt: str = "hello", model: str = "dummy", **body: Any
    ) -> AsyncIterator[str]:
        """The pieces of a streamed answer."""
        body = _body(prompt, model, body) | {"stream": True}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise ApiError(response.status, (await response.json())["error"])
                async for line in response.content:
                    text = line.decode().strip()
                    if text == "data: [DONE]":
                        return
                    if text.startswith("data: "):
                        event = json.loads(text[6:])
                        if "error" in event:
                            raise ApiError(200, event["error"])
                        for choice in event["choices"]:
                            if choice["delta"].get("content"):
                                yield choice["delta"]["content"]


def _body(prompt: str, model: str, extra: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12} | extra


class Cluster:
    """Processes that share a cluster name of their own, so tests never meet."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        self._folder = folder
        self._home = home or folder / "home"
        self._cluster = uuid.uuid4().hex[:8]
        self._broadcast_port = free_port()
        self.nodes: dict[str, ExoProcess] = {}

    def add(
        self, name: str, *arguments: str, engine: str = "dummy", **environment: str
    ) -> ExoProcess:
        """Start a node."""
        node = ExoProcess(
            name,
            self._home,
            self._cluster,
            self._broadcast_port,
            self._folder / f"{name}.log",
            ("--inference-engine", engine, *arguments),
            environment,
        )
        self.nodes[name] = node
        node.start()
        return node

    def add_with_cache(self, name: str, hub_url: str, *arguments: str) -> ExoProcess:
        """Start a node with the cpu engine and a home and a Hugging Face cache of its own,
        `home-NAME` and `cache-NAME` in the folder; without a hub if `hub_url` is empty."""
        return self.add(
            name,
            *arguments,
            engine="cpu",
            EXO_HOME=str(self._folder / f"home-{name}"),
            HF_HUB_CACHE=str(self._folder / f"cache-{name}"),
            HF_ENDPOINT=hub_url,
            HF_HUB_OFFLINE="0" if hub_url else "1",
        )

    async def together(self, *names: str) -> None:
        """Wait until the named nodes (default: all) answer and see each other, and nobody else."""
        wanted = set(names or self.nodes)
        for name in wanted:
            await until(self.nodes[name].answers, f"{name} answers")
        for name in wanted:
            node = self.nodes[name]

            async def sees_all(node: ExoProcess = node) -> bool:
                return await node.live_nodes() == wanted

            try:
                await until(sees_all, f"{name} sees {sorted(wanted)}")
            except AssertionError as error:
                nodes = (await node.get("/v1/topology"))["nodes"]
                raise AssertionError(f"{error}\n{nodes}\n{node.tail()}") from error

    def stop(self) -> None:
        for node in self.nodes.values():
            if node.lives:
                node.send(signal.SIGCONT)
                node.send(signal.SIGINT)
        for node in self.nodes.values():
            node.stop()


@contextlib.asynccontextmanager
async def cluster(folder: Path, home: Path | None = None) -> AsyncIterator[Cluster]:
    """A cluster that is stopped at the end whatever happens; a failure shows its nodes' logs."""
    made = Cluster(folder, home)
    try:
        yield made
    except BaseException:
        for node in made.nodes.values():
            state = "lives" if node.lives else "has ended"
            sys.stdout.write(f"---- {node.name}, which {state}:\n{node.tail()}\n")
        raise
    finally:
        await asyncio.to_thread(made.stop)
