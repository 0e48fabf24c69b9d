"""Parts of a model: of weight files what is needed of them, or the header."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import zoo
from gguf_files import write_gguf
from hub_server import Fault, HubServer

from exo.download.hub import Hub
from exo.download.progress import Progress
from exo.download.supplier import Patience
from exo.errors import ModelUnsupported
from exo.models.card import ModelCard
from exo.models.file_parts import BLOCK, Parts
from exo.models.gguf.file import read_gguf
from exo.models.tensor_table import (
    absent_tensors,
    all_tensors,
    is_whole,
    parts_with,
    safetensors_header,
)

pytestmark = pytest.mark.usefixtures("cache")

REPO = "org/model"
CARD = ModelCard(REPO, REPO, repo=REPO)
QUICK = Patience(first_rest_s=0.01, longest_rest_s=0.1)
SIZE = 3 << 20
NAMES = [f"model-{i}-of-3.safetensors" for i in (1, 2, 3)]


def weights(seed: int, tensors: int) -> bytes:
    """A safetensors file of `tensors` equal tensors, SIZE bytes in all."""
    each = SIZE // tensors // 4
    header = {
        f"layers.{seed}.t{i}": {
            "dtype": "F32",
            "shape": [each],
            "data_offsets": [4 * each * i, 4 * each * (i + 1)],
        }
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    data = np.random.default_rng(seed).bytes(4 * each * tensors)
    return len(text).to_bytes(8, "little") + text + data


# The header of the second is longer than what is asked for at first.
FILES = {name: weights(i, 3000 if i == 1 else 3) for i, name in enumerate(NAMES)}
FILES |= {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        running.put(REPO, FILES)
        yield running


def fetch(server: HubServer, parts: Parts, card: ModelCard = CARD) -> Path:
    return Hub(server.url, QUICK).fetch_part(card, parts, lambda progress: None)


def all_of(*names: str) -> Parts:
    return {name: [(0, len(FILES[name]))] for name in names}


def disk_of(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.glob("model*"))


@pytest.mark.parametrize(
    "fault",
    [
        None,
        Fault("drop", NAMES[1], times=2, after=100),
        Fault("status", NAMES[1], times=2, status=503),
    ],
    ids=lambda fault: fault.kind if fault else "no fault",
)
def test_headers_are_enough_to_know_a_model_by(
    server: HubServer, fault: Fault | None, cache: Path
) -> None:
    server.faults = [fault] if fault else []
    assert Hub(server.url).find_part(CARD, {}) is None
    folder = fetch(server, {})
    assert absent_tensors(folder) == set(all_tensors(folder)) and not is_whole(folder)
    for name in NAMES:
        start, header = safetensors_header(folder / name)
        assert (folder / name).stat().st_size == len(FILES[name])
        assert json.loads(FILES[name][8:start]) == header
        assert (folder / name).stat().st_blocks * 512 < 300_000
    assert sum(server.sent.values()) < 700_000
    # Other tools see what is there and miss what is not.
    before = list(server.requests)
    with pytest.raises(huggingface_hub.errors.IncompleteSnapshotError, match=r"3 file\(s\)"):
        huggingface_hub.snapshot_download(REPO, local_files_only=True, cache_dir=cache)
    assert not huggingface_hub.scan_cache_dir(cache).warnings
    hub = Hub(server.url)
    assert hub.find_part(CARD, {}) == folder and hub.find(CARD) is None
    assert hub.find_part(CARD, all_of(NAMES[0])) is None
    assert server.requests == before


def test_a_file_that_is_needed_comes_whole_and_the_rest_later(server: HubServer) -> None:
    fetch(server, {})
    server.sent.clear()
    folder = fetch(server, all_of(NAMES[0]))
    assert server.sent == {NAMES[0]: len(FILES[NAMES[0]])}
    assert {name.split(".")[1] for name in absent_tensors(folder)} == {"1", "2"}
    assert (folder / NAMES[0]).read_bytes() == FILES[NAMES[0]]
    assert fetch(server, all_of(*NAMES)) == folder and is_whole(folder)
    whole = Hub(server.url).find(CARD)
    assert whole is not None and all((whole / n).read_bytes() == FILES[n] for n in FILES)
    assert Hub(server.url).find_part(CARD, {}) == whole


def test_of_a_file_only_the_blocks_of_its_tensors_come_and_the_rest_later(
    server: HubServer,
) -> None:
    folder = fetch(server, {})
    server.sent.clear()
    parts = parts_with(folder, ["layers.0.t1", "layers.2.t0"])
    assert Hub(server.url).find_part(CARD, parts) is None
    folder = fetch(server, parts)
    # The header is in the first block; t1 begins in the second one and ends in the third.
    assert server.sent == {NAMES[0]: 3 * BLOCK, NAMES[2]: 2 * BLOCK}
    absent = absent_tensors(folder)
    assert {"layers.0.t1", "layers.0.t0", "layers.2.t0"}.isdisjoint(absent)
    assert {"layers.0.t2", "layers.2.t1", "layers.2.t2"} <= absent
    assert 5 * BLOCK <= disk_of(folder) <= 5.5 * BLOCK  # and a header
    for name in ("layers.0.t1", "layers.2.t0"):
        entry = all_tensors(folder)[name]
        data = FILES[entry.file.name][entry.offset : entry.offset + entry.nbytes]
        assert entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes] == data
    # Who only wants to know of the model does not take it from who loads it.
    assert Hub(server.url).find_part(CARD, {}) == folder and absent_tensors(folder) == absent
    requests = list(server.requests)
    assert Hub(server.url).find_part(CARD, parts) == folder == fetch(server, parts)
    assert not any("/cdn/" in request for request in server.requests[len(requests) :])

    server.sent.clear()
    whole = Hub(server.url, QUICK).fetch(CARD, lambda progress: None)
    assert all((whole / name).read_bytes() == FILES[name] for name in FILES)
    assert server.sent[NAMES[0]] == len(FILES[NAMES[0]]) - 3 * BLOCK
    assert server.sent[NAMES[2]] == len(FILES[NAMES[2]]) - 2 * BLOCK
    assert Hub(server.url).find_part(CARD, parts) == whole
    assert all(file.is_symlink() for file in whole.parent.parent.rglob("*.exo-part"))


def test_who_reads_a_part_still_can_when_the_file_gets_its_name(server: HubServer) -> None:
    """A plan is loading while `exo download` brings the rest."""
    parts = parts_with(fetch(server, {}), ["layers.0.t0"])
    folder = fetch(server, parts)
    Hub(server.url, QUICK).fetch(CARD, lambda progress: None)
    assert (folder / NAMES[0]).read_bytes() == FILES[NAMES[0]]
    assert "layers.0.t0" not in absent_tensors(folder)


def test_without_hard_links_parts_are_used_all_the_same(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    folder = fetch(server, {})
    folder = fetch(server, parts_with(folder, ["layers.0.t0"]))
    assert "layers.0.t0" not in absent_tensors(folder) and not is_whole(folder)
    Hub(server.url, QUICK).fetch(CARD, lambda progress: None)
    assert (folder / NAMES[0]).read_bytes() == FILES[NAMES[0]]
    assert not any(name.startswith("layers.0") for name in absent_tensors(folder))


def test_what_a_power_cut_may_have_taken_is_fetched_again(server: HubServer, cache: Path) -> None:
    """A whole file would be told from its digest; of a part only what is saved counts."""
    parts = parts_with(fetch(server, {}), ["layers.0.t0"])
    fetch(server, parts)
    [kept] = (cache / "models--org--model" / "blobs").glob("*.exo-map")
    assert kept.read_bytes() == b"\2\2\0\0"
    kept.write_bytes(b"\2\1\0\0")  # as if the second block was written and not saved
    server.sent.clear()
    assert Hub(server.url).find_part(CARD, parts) is None
    fetch(server, parts)
    assert server.sent == {NAMES[0]: BLOCK}


def test_parts_of_one_model_are_of_one_commit(server: HubServer) -> None:
    """The hub has a newer one meanwhile, which only a download of the whole asks for."""
    fetch(server, all_of(NAMES[0]))
    newer = FILES | {name: weights(i + 7, 3) for i, name in enumerate(NAMES)}
    commit = server.put(REPO, newer)
    folder = fetch(server, all_of(NAMES[2]))
    assert (folder / NAMES[2]).read_bytes() == FILES[NAMES[2]]
    whole = Hub(server.url, QUICK).fetch(CARD, lambda progress: None)
    assert whole.name == commit
    assert all((whole / name).read_bytes() == newer[name] for name in NAMES)


def test_what_is_no_safetensors_file_is_named(server: HubServer) -> None:
    server.put(REPO, FILES | {NAMES[1]: b"\xff" * 100_000})
    with pytest.raises(ModelUnsupported, match=f"{NAMES[1]} is not a safetensors file"):
        fetch(server, {})


def test_progress_counts_the_bytes_of_the_part(server: HubServer) -> None:
    said: list[Progress] = []
    Hub(server.url, QUICK).fetch_part(CARD, all_of(NAMES[0]), said.append)
    small = len(FILES["config.json"]) + len(FILES["tokenizer.json"])
    assert said[-1].done == said[-1].total == small + len(FILES[NAMES[0]])


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A llama of 12 MB with RoPE factors, which are tensors."""
    folder = tmp_path_factory.mktemp("gguf")
    config = zoo.tiny_config("llama") | {"hidden_size": 256, "intermediate_size": 512}
    factors = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    factors |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    zoo.write_checkpoint("llama", folder / "source", config | {"rope_scaling": factors})
    write_gguf(folder / "source", folder / "m.gguf")
    return (folder / "m.gguf").read_bytes()


def test_of_a_gguf_file_too(server: HubServer, gguf: bytes, cache: Path) -> None:
    name, noise = "m-Q8_0.gguf", np.random.default_rng(0).bytes(1000)
    server.put("org/gguf", {name: gguf, "m-Q4_0.gguf": noise, "README.md": b"."})
    card = ModelCard("m", "m", repo="org/gguf:Q8_0")
    assert Hub(server.url).find_part(card, {}) is None
    folder = fetch(server, {}, card)
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
    assert server.sent.total() < 1.2 * BLOCK and not is_whole(folder)
    tensors = {n for n in all_tensors(folder) if ".layers.1." in n}
    assert tensors and tensors <= absent_tensors(folder)
    server.sent.clear()
    parts = parts_with(folder, tensors)
    assert fetch(server, parts, card) == folder
    assert tensors.isdisjoint(absent_tensors(folder)) and absent_tensors(folder)
    assert server.sent[name] < 0.6 * len(gguf)
    hub = Hub(server.url)
    assert [one.model_id for one in hub.listed()] == ["org/gguf:Q8_0"]
    server.sent.clear()
    whole = Hub(server.url, QUICK).fetch(card, lambda progress: None)
    assert is_whole(whole) and server.sent[name] < 0.6 * len(gguf)
    assert (whole / "model.gguf").read_bytes() == gguf
    assert (whole / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert hub.remove(card) and not hub.listed()
    assert not list(cache.rglob("*.gguf")) and not list(cache.rglob("*.exo-*"))


def test_a_long_gguf_header_is_read_to_its_end(server: HubServer, tmp_path: Path) -> None:
    """Vocabularies take megabytes."""
    zoo.write_checkpoint("llama", tmp_path / "source")
    merges = [f"! {'x' * 100}{i}" for i in range(30_000)]
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **{"some.strings": merges})
    data = (tmp_path / "m.gguf").read_bytes()
    server.put("org/long", {"m-Q8_0.gguf": data})
    folder = fetch(server, {}, ModelCard("m", "m", repo="org/long"))
    expected = read_gguf(tmp_path / "m.gguf")
    assert expected.data_start > 3 * BLOCK
    assert read_gguf(folder / "model.gguf").metadata["some.strings"] == merges
    assert server.sent.total() <= 1.6 * expected.data_start


@pytest.mark.parametrize("data", [b"GGUF" + b"\xff" * 300_000, b"ELF" + bytes(300_000)])
def test_what_is_no_gguf_file_is_named(server: HubServer, data: bytes) -> None:
    server.put("org/bad", {"m-Q8_0.gguf": data})
    with pytest.raises(ModelUnsupported, match=r"m-Q8_0.gguf is (not a )?GGUF"):
        fetch(server, {}, ModelCard("m", "m", repo="org/bad"))


CHILD = """
import sys
import exo.download.partial_file
from exo.download.hub import Hub
from exo.models.card import ModelCard
exo.download.partial_file._SAVE_S = 0.2
url, repo, size = sys.argv[1:]
card = ModelCard(repo, repo, repo=repo)
parts = {"model.safetensors": [(0, int(size))]}
Hub(url).fetch_part(card, {}, lambda progress: None)
Hub(url).fetch_part(card, parts, lambda progress: print(progress.done, flush=True))
"""


def test_killed_at_any_moment_a_part_goes_on_from_there(server: HubServer, cache: Path) -> None:
    """It loses what came since it was saved last."""
    data = weights(0, 3) + bytes(50 << 20)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header["rest"] = {"dtype": "U8", "shape": [50 << 20], "data_offsets": [SIZE, SIZE + (50 << 20)]}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[-(SIZE + (50 << 20)) :]
    server.put(REPO, {"model.safetensors": data, "config.json": b"{}", "tokenizer.json": b"{}"})
    wanted, server.rate = 40 << 20, 4e6
    for kill_after in (12 << 20, 24 << 20, None):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, server.url, REPO, str(wanted)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"},
        )
        assert child.stdout is not None
        for line in child.stdout:
            if kill_after is not None and line[0].isdigit() and int(line) > kill_after:
                child.kill()
        assert child.wait(60) == (0 if kill_after is None else -signal.SIGKILL)
        child.stdout.close()
    folder = Hub(server.url).find_part(CARD, {"model.safetensors": [(0, wanted)]})
    assert folder is not None
    with (folder / "model.safetensors").open("rb") as part:
        assert part.read(wanted) == data[:wanted]
    # A fifth of a second of four workers is 3 MiB; if nothing was saved it would be 36 and more.
    assert wanted <= server.sent["model.safetensors"] <= wanted + 20 * BLOCK
