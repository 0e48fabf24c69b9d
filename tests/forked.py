"""Processes of exo that begin where all of them are the same: after a second of imports.

Each pytest worker has one process that has imported what a node imports, and every node is forked
from it: a process of its own as any, which becomes the worker's child (Linux's
PR_SET_CHILD_SUBREAPER) when the one between them has ended. Run as a script this is the one that is
forked from.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.01

READ_AGAIN = ("HF_ENDPOINT", "HF_HUB_")
"""What huggingface_hub.constants reads, of which nothing else is imported by then."""


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a process with these additions to the environment would be no other one: what
    libraries read while they are imported is read by then."""
    if sys.platform != "linux" or "PYTEST_VERSION" not in os.environ:
        return False  # benchmarks have theirs as users do
    return all(name.startswith(("EXO_", "DEBUG", *READ_AGAIN)) for name in environment)


class Forked:
    """A process like subprocess.Popen's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        begun = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired(f"exo, pid {self.pid}", timeout)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Command(Forked):
    """One whose output is read when it has ended."""

    def __init__(self, pid: int, outputs: Sequence[Path]) -> None:
        super().__init__(pid)
        self._outputs = outputs

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text() for path in self._outputs)
        return out, err


def fork(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
    """Start `exo` with these arguments, its output at the end of `log`."""
    return Forked(_fork(arguments, environment, log, log))


def start_command(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    outputs: Path,
    cores: int | None = None,
    files: int | None = None,
) -> Command | subprocess.Popen[str]:
    """Start `exo` with these arguments and additions to the environment, on `cores` cores with
    `files` descriptors at most. Where it is forked, its output is in new files in the folder
    `outputs`."""
    whole = os.environ | environment
    if not can_fork(environment):

        def constrain() -> None:
            if cores and sys.platform == "linux":
                os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
            if files:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        return subprocess.Popen(
            [sys.executable, "-m", "exo.cli.main", *arguments],
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=constrain,
        )
    outputs.mkdir(exist_ok=True)
    number = len(list(outputs.iterdir()))
    out, err = outputs / f"{number}.out", outputs / f"{number}.err"
    return Command(_fork(arguments, whole, out, err, cores, files), (out, err))


def _fork(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: Path,
    err: Path,
    cores: int | None = None,
    files: int | None = None,
) -> int:
    """Its process id."""
    job = {"arguments": [*arguments], "environment": {**environment}}
    job |= {"out": str(out), "err": str(err), "files": files}
    job["affinity"] = sorted(os.sched_getaffinity(0))[:cores]
    out.touch()
    err.touch()
    starter = _starter()
    starter.send(json.dumps(job).encode())
    return int(starter.recv(100))


@functools.cache
def _starter() -> socket.socket:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.set_inheritable(True)
    command = [sys.executable, __file__, str(its.fileno())]
    os.posix_spawn(sys.executable, command, os.environ)
    its.close()
    return ours  # closed when this process ends, which ends that one


def _serve(jobs: socket.socket) -> None:
    """Fork one process for each job, and return in it."""
    while data := jobs.recv(1 << 20):
        told, tell = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)  # only then is the process another one's child
            jobs.send(os.read(told, 100))
            os.close(told)
            os.close(tell)
            continue
        if pid := os.fork():
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.close(told)
        os.close(tell)
        jobs.close()
        _become(json.loads(data))
        return
    os._exit(0)


def _become(job: dict[str, Any]) -> None:
    """Make this process the one that was asked for."""
    sys.argv[1:] = job["arguments"]
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(job["environment"])
    if any(os.environ.get(name) != before.get(name) for name in _read_again(before)):
        importlib.reload(sys.modules["huggingface_hub.constants"])
    os.sched_setaffinity(0, job["affinity"])
    if job["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (job["files"], job["files"]))
    for path, descriptor in ((os.devnull, 0), (job["out"], 1), (job["err"], 2)):
        flags = os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)


def _read_again(before: Mapping[str, str]) -> set[str]:
    return {name for name in (*before, *os.environ) if name.startswith(READ_AGAIN)}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as main() does, before anything may be lost
    import exo.cli.serve  # noqa: F401
    from exo.cli.main import main

    gc.freeze()  # collections in the processes would copy the pages of all that is imported
    _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(main())
