"""Downloads from a server that speaks the hub's protocol: whole, verified, resumed, refused."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from hub_server import Fault, HubServer

from exo.download.hub import Hub
from exo.download.hub_cache import RepoCache
from exo.download.partial_file import BLOCK
from exo.download.progress import Progress
from exo.download.supplier import Patience
from exo.download.transfer import SPAN
from exo.errors import (
    AccessDenied,
    DiskFull,
    DownloadFailed,
    ExoError,
    ModelNotFound,
    ModelUnsupported,
    SourceUnreachable,
)
from exo.models.card import ModelCard

pytestmark = pytest.mark.usefixtures("cache")

REPO = "org/model"
CARD = ModelCard(REPO, REPO, repo=REPO)
QUICK = Patience(first_rest_s=0.01, longest_rest_s=0.1)


def model_files(seed: int = 0, size: int = 5 * SPAN // 2 + 12345) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": rng.bytes(300_000),
        "README.md": b"not for us",
        "pytorch_model.bin": b"never",
        "model-00001-of-00002.safetensors": rng.bytes(size),
        "model-00002-of-00002.safetensors": rng.bytes(BLOCK + 1),
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        ).encode(),
    }


FILES = model_files()
WANTED = sorted(set(FILES) - {"README.md", "pytorch_model.bin"})
LARGE = "model-00001-of-00002.safetensors"


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        running.put(REPO, FILES)
        yield running


def fetch(server: HubServer, card: ModelCard = CARD) -> Path:
    return Hub(server.url, QUICK).fetch(card, lambda progress: None)


def check(folder: Path, files: dict[str, bytes] = FILES) -> None:
    assert sorted(f.name for f in folder.iterdir()) == WANTED
    for name in WANTED:
        assert (folder / name).read_bytes() == files[name], name
    left = [f.name for f in (folder.parents[1] / "blobs").iterdir() if "exo" in f.name]
    assert left == []


def test_what_exo_reads_is_fetched_once_and_other_tools_read_it(
    server: HubServer, cache: Path
) -> None:
    said: list[Progress] = []
    hub = Hub(server.url, QUICK)
    assert hub.find(CARD) is None
    folder = hub.fetch(CARD, said.append)
    check(folder)
    assert hub.find(CARD) == folder
    assert server.sent == {name: len(FILES[name]) for name in WANTED}
    assert said[-1].done == said[-1].total == sum(len(FILES[name]) for name in WANTED)
    before = list(server.requests)
    assert huggingface_hub.snapshot_download(
        REPO, local_files_only=True, allow_patterns=WANTED, cache_dir=cache
    ) == str(folder)
    assert server.requests == before


def test_what_other_tools_fetched_is_used(server: HubServer, cache: Path) -> None:
    folder = huggingface_hub.snapshot_download(REPO, endpoint=server.url, cache_dir=cache)
    before = list(server.requests)
    assert Hub(server.url).find(CARD) == Path(folder)
    assert Hub(server.url).listed() == [CARD]
    assert server.requests == before


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", LARGE, times=5, after=3 * BLOCK + 7),
        Fault("drop", times=3),
        Fault("status", LARGE, times=3, status=500),
        Fault("status", times=2, status=429, headers={"Retry-After": "1"}),
        Fault("status", "api", times=1, status=503),
        Fault("wrong", LARGE, after=BLOCK),
        Fault("wrong", "config.json"),
        Fault("stall", LARGE, times=2, after=BLOCK + 100),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.path}-{fault.status}",
)
def test_each_fault_is_survived(
    fault: Fault, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    server.faults = [fault]
    check(fetch(server))
    assert fault.times == 0


def test_a_server_without_ranges_will_do(server: HubServer) -> None:
    server.ranges = False
    server.faults = [Fault("drop", LARGE, after=3 * BLOCK)]
    check(fetch(server))


def test_wrong_bytes_again_and_again_name_the_file_and_the_source(server: HubServer) -> None:
    server.faults = [Fault("wrong", LARGE, times=100)]
    with pytest.raises(DownloadFailed, match=f"{LARGE} from the hub has the digest"):
        fetch(server)
    assert Hub(server.url).find(CARD) is None
    server.faults = []
    check(fetch(server))


def test_an_outage_that_does_not_end_keeps_what_came(server: HubServer, cache: Path) -> None:
    server.faults = [Fault("drop", LARGE, times=10**6, after=2 * BLOCK)]
    server.faults.append(Fault("drop", LARGE, times=10**6))
    hub = Hub(server.url, Patience(0.001, 0.001, attempts=3))
    server.faults[0].times = 1
    with pytest.raises(DownloadFailed, match="the hub cannot be read"):
        hub.fetch(CARD, lambda progress: None)
    server.faults.clear()
    before = server.sent[LARGE]
    # Small files may have been on their way, too.
    maps = (cache / "models--org--model" / "blobs").glob("*.exo-map")
    kept = max(maps, key=lambda file: file.stat().st_size)
    blocks = len(kept.read_bytes()) - kept.read_bytes().count(0)
    check(fetch(server))
    assert server.sent[LARGE] - before == len(FILES[LARGE]) - blocks * BLOCK


@pytest.mark.parametrize(
    ("refuse", "error", "says"),
    [
        (401, AccessDenied, "who you are"),
        (403, AccessDenied, "gated.*ask for access"),
    ],
)
def test_a_repo_that_is_not_for_everyone_says_what_to_do(
    refuse: int,
    error: type[ExoError],
    says: str,
    server: HubServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.repos[REPO].refuse = refuse
    with pytest.raises(error, match=says):
        fetch(server)
    monkeypatch.setenv("HF_TOKEN", "let-me-in")
    check(fetch(server))


def test_what_is_not_there_is_named(server: HubServer, cache: Path) -> None:
    missing = ModelCard("org/no", "no", repo="org/no")
    with pytest.raises(AccessDenied, match=r"org/no.*no such repo"):
        fetch(server, missing)
    with pytest.raises(ModelNotFound, match="org/model has no revision 'v9'"):
        fetch(server, ModelCard(REPO, REPO, repo=f"{REPO}@v9"))
    server.put("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(ModelUnsupported, match=r"only \.bin; pickled weights are not read"):
        fetch(server, ModelCard("p", "p", repo="org/pickled"))
    huggingface_hub.snapshot_download("org/pickled", endpoint=server.url, cache_dir=cache)
    assert Hub().listed() == [] and Hub().find(ModelCard("p", "p", repo="org/pickled")) is None


def test_a_hub_that_is_not_there_is_said_within_seconds() -> None:
    with pytest.raises(SourceUnreachable, match=r"cannot be reached.*HTTPS_PROXY"):
        Hub("http://127.0.0.1:9", QUICK).fetch(CARD, lambda progress: None)


def test_a_newer_revision_fetches_only_what_changed(server: HubServer) -> None:
    old = fetch(server)
    changed = FILES | {"tokenizer.json": b"{}"}
    commit = server.put(REPO, changed)
    server.put(REPO, FILES, "v1")
    server.sent.clear()
    new = fetch(server)
    assert new.name == commit and new != old
    check(new, changed)
    assert server.sent == {"tokenizer.json": 2}
    check(old)
    server.sent.clear()
    pinned = ModelCard(REPO, REPO, repo=f"{REPO}@v1")
    assert fetch(server, pinned) == old == Hub().find(pinned)
    assert Hub().find(ModelCard(REPO, REPO, repo=f"{REPO}@{old.name}")) == old
    assert not server.sent


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    with pytest.raises(DiskFull, match=r"needs 0.0 GB more of disk.*HF_HOME"):
        fetch(server)
    assert not server.sent


def test_a_disk_that_fills_up_keeps_what_came(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room = os.pwrite, [20 * BLOCK]

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr("exo.download.partial_file.os.pwrite", pwrite)
    with pytest.raises(DiskFull, match="the disk is full"):
        fetch(server)
    monkeypatch.setattr("exo.download.partial_file.os.pwrite", write)
    server.sent.clear()
    check(fetch(server))
    assert server.sent[LARGE] < len(FILES[LARGE]) - 5 * BLOCK


def test_a_slow_link_and_little_disk_are_said(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**12, 10**12, 2 * 10**9))
    monkeypatch.setattr("exo.download.report._WINDOW_S", 0.3)
    server.rate = 100e3
    said: list[Progress] = []

    def watch(progress: Progress) -> None:
        said.append(progress)
        if "slow link" in progress.warning:
            server.rate = None

    check(Hub(server.url, QUICK).fetch(CARD, watch))
    warnings = list(dict.fromkeys(progress.warning for progress in said))
    assert warnings[:3] == ["", "low disk: 2.0 GB will be left", "slow link: less than 1 MB/s"]
    assert said[-1].phase == "ready" and not said[-1].warning


def test_without_a_network_what_is_here_works(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(server)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = list(server.requests)
    hub = Hub(server.url)
    assert hub.find(CARD) == folder and not hub.can_fetch(CARD)
    assert server.requests == before


CHILD = """
import sys
import huggingface_hub
from exo.download.hub import Hub
from exo.models.card import ModelCard

def say(progress):
    print(progress.phase, progress.done, flush=True)

huggingface_hub.constants.HF_HUB_OFFLINE = False
Hub(sys.argv[1]).fetch(ModelCard("m", "m", repo=sys.argv[2]), say)
print("whole 0", flush=True)
"""


def child(server: HubServer, cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-c", CHILD, server.url, REPO]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_at_any_moment_it_goes_on_from_there(server: HubServer, cache: Path) -> None:
    """Twenty kills: a start finds what the one before had said, but for less than a span."""
    files = model_files(1, 12 * SPAN)
    server.put(REPO, files)
    server.rate = 10e6
    rng = random.Random(2)
    reached = kills = 0
    while True:
        process = child(server, cache)
        assert process.stdout is not None
        first, stop_after = None, reached + rng.randrange(len(files[LARGE]) // 40)
        for line in process.stdout:
            phase, done = line.split()
            if phase == "downloading" and first is None:
                first = int(done)
                assert first > reached - SPAN
            if phase == "downloading":
                reached = max(reached, int(done))
            if kills < 20 and reached >= stop_after:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
        process.stdout.close()
        if process.wait() == 0:
            break
    assert kills == 20
    folder = Hub(server.url).find(CARD)
    assert folder is not None
    check(folder, files)


def test_two_processes_share_one_store(server: HubServer, cache: Path) -> None:
    """It takes long until one has said that it waits, however late it began."""
    server.rate = 3e6
    processes = [child(server, cache) for _ in range(2)]
    waits = threading.Event()

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("waiting"):
                waits.set()

    readers = [threading.Thread(target=read, args=(process,)) for process in processes]
    for reader in readers:
        reader.start()
    assert waits.wait(60)
    server.rate = None
    for process, reader in zip(processes, readers, strict=True):
        assert process.wait(60) == 0
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
    assert server.sent == {name: len(FILES[name]) for name in WANTED}
    check(RepoCache(REPO).snapshot(str(RepoCache(REPO).commit("main"))))


def test_a_download_can_be_cancelled_and_goes_on_later(server: HubServer) -> None:
    server.rate = 5e6
    hub, going = Hub(server.url, QUICK), threading.Event()

    def watch(progress: Progress) -> None:
        if progress.done > 4 * BLOCK:
            going.set()

    failure: list[BaseException] = []

    def run() -> None:
        try:
            hub.fetch(CARD, watch)
        except DownloadFailed as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert going.wait(30)
    hub.close()
    thread.join(10)
    assert not thread.is_alive() and re.search("was cancelled", str(failure[0]))
    server.rate = None
    before = server.sent[LARGE]
    check(fetch(server))
    assert server.sent[LARGE] - before < len(FILES[LARGE]) - BLOCK
