"""Parts of a model: some weight files whole, of the others the header."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from hub_server import Fault, HubServer

from exo.download.hub import Hub
from exo.download.progress import Progress
from exo.download.supplier import Patience
from exo.errors import ModelUnsupported
from exo.models.card import ModelCard
from exo.models.tensor_table import absent_weights, safetensors_header

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


def fetch(server: HubServer, *names: str) -> Path:
    return Hub(server.url, QUICK).fetch_part(CARD, names, lambda progress: None)


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
    assert Hub(server.url).find_part(CARD, ()) is None
    folder = fetch(server)
    assert absent_weights(folder) == set(NAMES)
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
    assert hub.find_part(CARD, ()) == folder and hub.find(CARD) is None
    assert hub.find_part(CARD, NAMES[:1]) is None
    assert server.requests == before


def test_the_named_weights_come_whole_and_the_rest_later(server: HubServer) -> None:
    fetch(server)
    server.sent.clear()
    folder = fetch(server, NAMES[0])
    assert server.sent == {NAMES[0]: len(FILES[NAMES[0]])}
    assert absent_weights(folder) == set(NAMES[1:])
    assert (folder / NAMES[0]).read_bytes() == FILES[NAMES[0]]
    assert fetch(server, *NAMES) == folder and not absent_weights(folder)
    whole = Hub(server.url).find(CARD)
    assert whole is not None and all((whole / n).read_bytes() == FILES[n] for n in FILES)
    assert Hub(server.url).find_part(CARD, ()) == whole


def test_parts_of_one_model_are_of_one_commit(server: HubServer) -> None:
    """The hub has a newer one meanwhile, which only a download of the whole asks for."""
    fetch(server, NAMES[0])
    newer = FILES | {name: weights(i + 7, 3) for i, name in enumerate(NAMES)}
    commit = server.put(REPO, newer)
    folder = fetch(server, NAMES[2])
    assert (folder / NAMES[2]).read_bytes() == FILES[NAMES[2]]
    whole = Hub(server.url, QUICK).fetch(CARD, lambda progress: None)
    assert whole.name == commit
    assert all((whole / name).read_bytes() == newer[name] for name in NAMES)


def test_what_is_no_safetensors_file_is_named(server: HubServer) -> None:
    server.put(REPO, FILES | {NAMES[1]: b"\xff" * 100_000})
    with pytest.raises(ModelUnsupported, match=f"{NAMES[1]} is not a safetensors file"):
        fetch(server)


def test_progress_counts_the_bytes_of_the_part(server: HubServer) -> None:
    said: list[Progress] = []
    Hub(server.url, QUICK).fetch_part(CARD, NAMES[:1], said.append)
    small = len(FILES["config.json"]) + len(FILES["tokenizer.json"])
    assert said[-1].done == said[-1].total == small + len(FILES[NAMES[0]])
