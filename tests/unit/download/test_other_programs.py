"""GGUF files that LM Studio and Ollama keep are found where they are, used, and left alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import zoo
from gguf_files import write_gguf

from exo.cli.main import main
from exo.download.gguf_repo import quantizations
from exo.download.other_programs import found_gguf, ollama_folders
from exo.download.store import ModelStore, default_sources
from exo.errors import InvalidRequest, ModelNotFound


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with LM Studio's and Ollama's folders as these programs lay them out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    zoo.write_checkpoint("llama", tmp_path / "source")
    studio = tmp_path / ".lmstudio/models/lmstudio-community/Tiny-GGUF"
    studio.mkdir(parents=True)
    write_gguf(tmp_path / "source", studio / "Tiny-Q4_K_M.gguf")
    (studio / "mmproj-Tiny-f16.gguf").write_bytes(b"GGUF")
    ollama = tmp_path / ".ollama/models"
    (ollama / "blobs").mkdir(parents=True)
    digest = "sha256-" + "ab" * 32
    write_gguf(tmp_path / "source", ollama / "blobs" / digest)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "ab" * 32},
    ]
    manifests = {
        "registry.ollama.ai/library/llama3.2/3b": json.dumps({"layers": layers}),
        "hf.co/bartowski/Tiny-GGUF/Q4_K_M": json.dumps({"layers": layers}),
        "registry.ollama.ai/somebody/own/latest": json.dumps({"layers": layers}),
        "registry.ollama.ai/library/half/written": '{"layers": [',
    }
    for name, text in manifests.items():
        file = ollama / "manifests" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return tmp_path


def test_they_are_found_used_and_left_alone(machine: Path) -> None:
    models = machine / "exo"
    store = ModelStore(models, default_sources(models))
    wanted = ["lmstudio-community/Tiny-GGUF:Q4_K_M", "ollama/llama3.2:3b"]
    wanted += ["bartowski/Tiny-GGUF:Q4_K_M", "ollama/somebody/own:latest"]
    listed = {card.model_id: card for card in store.available()}
    assert set(wanted) <= set(listed) and len([n for n in listed if ":" in n]) == 4
    for name in wanted:
        folder = asyncio.run(store.ensure(name, lambda progress: None))
        assert (folder / "model.gguf").resolve() == listed[name].path
        assert store.find(name) == folder
        with pytest.raises(InvalidRequest, match=r"belongs to (LM Studio|Ollama); delete it there"):
            store.remove(name)
        assert (folder_file := listed[name].path) is not None and folder_file.is_file()


@pytest.mark.parametrize("said", ["", "{home}/.ollama/models"])
def test_where_ollama_keeps_models_is_as_it_takes_it(
    said: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is set to nothing says nothing."""
    monkeypatch.setenv("OLLAMA_MODELS", said.format(home=machine))
    assert ollama_folders()[0] == machine / ".ollama/models"


def test_ollama_s_service_has_a_home_of_its_own(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = machine / "service"
    (machine / ".ollama/models").rename(service)
    monkeypatch.setattr("exo.download.other_programs._OF_SERVICE", service)
    found = [one.model_id for one in found_gguf() if one.program == "Ollama"]
    assert found[:2] == ["bartowski/Tiny-GGUF:Q4_K_M", "ollama/llama3.2:3b"]
    # It may be closed to others; tests may run as a user to whom nothing is.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != service)
    assert not [one for one in found_gguf() if one.program == "Ollama"]


@pytest.mark.parametrize("name", ["gone:latest", "somebody/gone:latest"])
def test_what_ollama_does_not_have_is_brought_by_ollama(name: str, machine: Path) -> None:
    models = machine / "exo"
    store = ModelStore(models, default_sources(models))
    with pytest.raises(ModelNotFound, match=f"bring it with `ollama pull {name}`"):
        asyncio.run(store.ensure(f"ollama/{name}", lambda progress: None))


def test_models_for_mlx_of_lm_studio_are_found(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = machine / ".lmstudio/models/mlx-community"
    place.mkdir()
    (machine / "source").rename(place / "Tiny-4bit")
    half = place / "Half-4bit"
    shutil.copytree(place / "Tiny-4bit", half)
    half.joinpath("model.safetensors").rename(half / "model-00001-of-00002.safetensors")
    models = machine / "exo"
    store = ModelStore(models, default_sources(models))
    listed = [card.model_id for card in store.available() if card.name == "of LM Studio"]
    assert "mlx-community/Tiny-4bit" in listed and "mlx-community/Half-4bit" not in listed
    assert store.find("mlx-community/Half-4bit") is None
    found = asyncio.run(store.ensure("mlx-community/Tiny-4bit", lambda progress: None))
    assert found == place / "Tiny-4bit"
    monkeypatch.setenv("EXO_HOME", str(models))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "Tiny-4bit" in line]
    assert "of LM Studio" in line and " 1 MB" in line
    with pytest.raises(InvalidRequest, match="belongs to LM Studio; delete it there"):
        store.remove("mlx-community/Tiny-4bit")
    assert (found / "model.safetensors").is_file()


def test_what_nothing_ran_yet_is_described(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXO_HOME", str(machine / "exo"))
    file = machine / ".lmstudio/models/lmstudio-community/Tiny-GGUF/Tiny-Q4_K_M.gguf"
    for name in (str(file), "ollama/llama3.2:3b"):
        assert main(["models", name]) == 0
        said = capsys.readouterr()
        assert "architecture   llama\n" in said.out
        assert "tools          by convention" in said.out
        assert said.err == ""


def test_models_of_one_quantization_are_told_apart() -> None:
    """Files that guess a model's tokens lie beside it, under its quantization's name (as in the
    repos of DeepSeek V4 Flash, GLM 5.3 Flash and Qwen3.8 Flash Next of unsloth and ggml-org); a
    repo may hold several models."""
    parts = [f"Q8_0/DeepSeek-V4-Flash-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    beside = [
        "mtp-DeepSeek-V4-Flash-Q8_0.gguf",
        "DeepSeek-V4-Flash-DSpark-Q8_0.gguf",
        "dspark-DeepSeek-V4-Flash-0731-Q8_0.gguf",
        "MTP/mtp-Qwen3.8-Flash-Next-shared-Q8_0.gguf",
        "MTP/GLM-5.3-Flash-MTP-Q8_0.gguf",
        "M-eagle3-Q4_0.gguf",
        "dflash2-M-Q4_0.gguf",
    ]
    assert quantizations([*parts, *beside]) == {"Q8_0": parts}
    both = ["Qwen3.6-27B-MTP-Q8_0.gguf"]  # a model, and what guesses its tokens
    assert quantizations(both) == {"Q8_0": both}
    several = ["tiny-Q4_0.gguf", "small-Q4_0.gguf", "old/small-Q4_0.gguf", "small-Q8_0.gguf"]
    assert quantizations(several) == {
        "tiny-Q4_0": ["tiny-Q4_0.gguf"],
        "small-Q4_0": ["small-Q4_0.gguf"],
        "old/small-Q4_0": ["old/small-Q4_0.gguf"],
        "Q8_0": ["small-Q8_0.gguf"],
    }


def test_names_tell_quantizations() -> None:
    assert quantizations(
        [
            "M-Q4_K_M.gguf",
            "m.q8_0.gguf",
            "UD-Q2_K_XL/M-UD-Q2_K_XL-00001-of-00002.gguf",
            "UD-Q2_K_XL/M-UD-Q2_K_XL-00002-of-00002.gguf",
            "M-IQ4_XS.gguf",
            "M-BF16.gguf",
            "gpt-oss-20b-MXFP4.gguf",
            "Ternary-Bonsai-2-27B-PQ2_0.gguf",
            "Ternary-Bonsai-2-27B-PTQ1_0.gguf",
            "Ternary-Bonsai-27B-Q2_g64.gguf",
            "mmproj-F16.gguf",
            "Ternary-Bonsai-27B-mmproj-Q8_0.gguf",
            "imatrix.gguf",
            "M-imatrix.gguf",
            "special.gguf",
            "README.md",
        ]
    ) == {
        "Q4_K_M": ["M-Q4_K_M.gguf"],
        "Q8_0": ["m.q8_0.gguf"],
        "UD-Q2_K_XL": [
            "UD-Q2_K_XL/M-UD-Q2_K_XL-00001-of-00002.gguf",
            "UD-Q2_K_XL/M-UD-Q2_K_XL-00002-of-00002.gguf",
        ],
        "IQ4_XS": ["M-IQ4_XS.gguf"],
        "BF16": ["M-BF16.gguf"],
        "MXFP4": ["gpt-oss-20b-MXFP4.gguf"],
        "PQ2_0": ["Ternary-Bonsai-2-27B-PQ2_0.gguf"],
        "PTQ1_0": ["Ternary-Bonsai-2-27B-PTQ1_0.gguf"],
        "Q2_G64": ["Ternary-Bonsai-27B-Q2_g64.gguf"],
        "special": ["special.gguf"],
    }
