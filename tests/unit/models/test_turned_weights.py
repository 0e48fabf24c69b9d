"""Files whose weights are stored turned by a Hadamard matrix, as PrismML's Bonsai 2 is: GGUF, and
for MLX."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import zoo
from gguf_checks import cpu_logits
from gguf_files import write_gguf

from exo.errors import ModelUnsupported
from exo.inference.cpu.shard_model import CheckpointModel
from exo.inference.mlx.cut_model import CutModel
from exo.models.gguf.file import read_gguf
from exo.models.gguf.folder import write_folder

BLOCK = 32
Floats = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo.inference.mlx.engine.works", lambda model, start, end: False)


@cache
def hadamard(size: int) -> npt.NDArray[np.float64]:
    """By its definition: -1 where row and column have an odd number of ones in common."""
    bits = np.array([[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)])
    return (1.0 - 2.0 * bits) / size**0.5


def signs_of(width: int) -> list[int]:
    return np.random.default_rng(width).choice([-1, 1], width).tolist()


def folded(numbers: Floats, block: int = BLOCK) -> Floats:
    """W R^-1, of R x = H (signs * x)."""
    signed = numbers.astype(np.float64) * signs_of(numbers.shape[1])
    turned = signed.reshape(len(numbers), -1, block) @ hadamard(block)
    return turned.reshape(numbers.shape).astype(np.float32)


def turned_back(numbers: Floats, block: int) -> Floats:
    blocks = numbers.astype(np.float64).reshape(len(numbers), -1, block) @ hadamard(block)
    return (blocks.reshape(numbers.shape) * signs_of(numbers.shape[1])).astype(np.float32)


def is_folded(name: str, numbers: Floats) -> bool:
    kept = ("ssm_alpha", "ssm_beta", "conv1d", "norm")
    return numbers.ndim == 2 and not any(part in name for part in kept)


def description(names: list[str], widths: set[int], said: dict[str, Any]) -> dict[str, Any]:
    """What is said of turned weights of these names and widths, and `said` besides or instead."""
    tables = [name for name in names if "embd" in name or "embed_tokens" in name]
    turned = {
        "version": 1,
        "block_size": BLOCK,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "sign_widths": sorted(widths),
        "sign_values": [sign for width in sorted(widths) for sign in signs_of(width)],
        "weight_names": [name for name in names if name not in tables],
        "inverse_weight_names": tables,
        "gdn_v_grouped": True,
        **said,
    }
    return {f"prism.hadamard.{key}": value for key, value in turned.items()}


def write_turned(
    model_type: str,
    folder: Path,
    keep: Callable[[str], bool] = lambda name: False,
    kind: str = "F32",
    experts: int = 0,
    **said: Any,
) -> None:
    """A file of a random checkpoint, turned, which says so and `said` besides; what `keep` chooses
    is not turned."""
    config = zoo.tiny_config(model_type) | {"tie_word_embeddings": False}
    if "text_config" in config:
        config["text_config"] |= {"num_experts": experts}
    zoo.write_checkpoint(model_type, folder / "source", config)
    names: list[str] = []
    widths: set[int] = set()

    def turn(name: str, numbers: Floats) -> str:
        if not is_folded(name, numbers) or keep(name):
            return "F32"
        if "ssm_out" in name:  # in the order of the checkpoint, not as the converter has it
            heads = numbers.reshape(len(numbers), 2, 2, -1).swapaxes(1, 2)
            numbers[...] = heads.reshape(numbers.shape)
        numbers[...] = folded(numbers)
        names.append(name)
        widths.add(numbers.shape[1])
        return kind

    write_gguf(folder / "source", folder / "first.gguf", turn)  # for the names
    extra = description(names, widths, said)
    write_gguf(folder / "source", folder / "turned.gguf", turn, **extra)
    (folder / "first.gguf").unlink()


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3", "llama"])
def test_it_computes_what_the_checkpoint_does(model_type: str, tmp_path: Path) -> None:
    write_turned(model_type, tmp_path)
    write_folder([tmp_path / "turned.gguf"], tmp_path / "folder")
    expected = zoo.unsplit_logits(tmp_path / "source")[0][0]
    assert zoo.worst_error([cpu_logits(tmp_path / "folder", [])[-1]], [expected]) < 1e-4
    assert zoo.worst_error([cpu_logits(tmp_path / "folder", [2])[-1]], [expected]) < 1e-4
    [through_mlx, *_] = asyncio.run(zoo.split_logits(tmp_path / "folder", [2], zoo.LAYERS))
    assert zoo.worst_error([through_mlx[0]], [expected]) < 1e-4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"version": 2}, "version is 2; exo reads 1"),
        ({"transform": "dct"}, "transform is 'dct'"),
        ({"axis": "output"}, "axis is 'output'"),
        ({"sign_mode": "random"}, "sign_mode is 'random'"),
        ({"sign_values": [1, -1]}, "do not fit the widths"),
        ({"block_size": 24}, "Hadamard matrix of 24"),
        ({"gdn_v_grouped": False}, "gdn_v_grouped"),
        ({"weight_names": ["output.weight"]}, "is not turned and others are"),
        ({"experts": 4}, "exps.weight is not turned and others are"),
    ],
)
def test_what_exo_would_compute_otherwise_is_refused(
    said: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_turned("qwen3_5", tmp_path, **said)
    with pytest.raises(ModelUnsupported, match=message):
        write_folder([tmp_path / "turned.gguf"], tmp_path / "folder")


def test_an_embedding_may_stand_as_it_is(tmp_path: Path) -> None:
    write_turned("qwen3", tmp_path, lambda name: "token_embd" in name, inverse_weight_names=[])
    assert "token_embd.weight" in read_gguf(tmp_path / "turned.gguf").tensors
    write_folder([tmp_path / "turned.gguf"], tmp_path / "folder")
    expected = zoo.unsplit_logits(tmp_path / "source")[0][0]
    assert zoo.worst_error([cpu_logits(tmp_path / "folder", [])[-1]], [expected]) < 1e-4
    [through_mlx, *_] = asyncio.run(zoo.split_logits(tmp_path / "folder", [2], zoo.LAYERS))
    assert zoo.worst_error([through_mlx[0]], [expected]) < 1e-4


def test_bytes_are_turned_as_numbers_are(tmp_path: Path) -> None:
    """Where weights are quantized activations are, too, once they are turned."""
    write_turned("qwen3", tmp_path, kind="Q8_0")
    write_folder([tmp_path / "turned.gguf"], tmp_path / "folder")
    expected = zoo.unsplit_logits(tmp_path / "source")[0][0]
    found = cpu_logits(tmp_path / "folder", [], precise=False)[-1]
    assert zoo.worst_error([found], [expected]) < 0.1
    [through_mlx, *_] = asyncio.run(zoo.split_logits(tmp_path / "folder", [2], zoo.LAYERS))
    assert zoo.worst_error([through_mlx[0]], [expected]) < 0.1


PACK_BLOCK = 512  # the smallest that mlx-lm takes


def write_pack(folder: Path, **said: Any) -> None:
    """Weights for MLX of a random checkpoint, turned and quantized, in `pack`; and in `source` what
    these are, turned back."""
    config = zoo.tiny_config("qwen3_5")
    wide = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
    wide |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config["text_config"] |= {"num_experts": 0, "tie_word_embeddings": False, **wide}
    zoo.write_checkpoint("qwen3_5", folder / "source", config)
    stored: dict[str, mx.array] = mx.load(str(folder / "source/model.safetensors"))  # type: ignore[assignment]
    packed: dict[str, mx.array] = {}
    names: list[str] = []
    modules: list[dict[str, Any]] = []
    for name, array in list(stored.items()):
        if array.ndim != 2 or "in_proj_a" in name or "in_proj_b" in name or "norm" in name:
            packed[name] = array
            continue
        module, width = name.removesuffix(".weight"), array.shape[1]
        turned = mx.array(folded(np.array(array), PACK_BLOCK)).astype(mx.float16)
        parts = mx.quantize(turned, group_size=128, bits=2)
        exact = (part.astype(mx.float32) for part in parts[1:])
        numbers = mx.dequantize(parts[0], *exact, group_size=128, bits=2)
        stored[name] = mx.array(turned_back(np.array(numbers), PACK_BLOCK))
        for part, made in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{module}.{part}"] = made
        packed[f"{module}.signs"] = mx.array(signs_of(width)).astype(mx.float32)
        names.append(name)
        path, is_table = module.removeprefix("language_model."), "embed_tokens" in module
        modules.append(
            {"path": path, "block": PACK_BLOCK, "embedding": is_table, "dtype": "float16"}
        )
    mx.save_safetensors(str(folder / "source/model.safetensors"), stored)
    (folder / "pack").mkdir()
    mx.save_safetensors(str(folder / "pack/model.safetensors"), packed)
    config |= {"model_type": "prism_hadamard_qwen35", "base_model_type": "qwen3_5"}
    config |= {"schema_version": 2, "tensor_namespace": "mlx-vlm-qwen3_5", "modules": modules}
    config |= {"quantization": {"bits": 2, "group_size": 128, "mode": "affine"}}
    (folder / "pack/config.json").write_text(json.dumps(config))
    said_so = description(names, {512}, {"block_size": PACK_BLOCK, **said})
    values = "prism.hadamard.sign_values"
    said_so[values] = [float(sign) for sign in said_so[values]]  # as they are there
    (folder / "pack/hadamard.json").write_text(json.dumps(said_so))


def test_weights_for_mlx_compute_what_the_checkpoint_does(tmp_path: Path) -> None:
    """On the cpu engine with its own kernels; on MLX in mlx-lm's class, which looks tokens up in
    half precision."""
    write_pack(tmp_path)
    expected = zoo.unsplit_logits(tmp_path / "source")[0][0]
    assert zoo.worst_error([cpu_logits(tmp_path / "pack", [2])[-1]], [expected]) < 1e-4
    [through_mlx, *_] = asyncio.run(zoo.split_logits(tmp_path / "pack", [2], zoo.LAYERS))
    assert zoo.worst_error([through_mlx[0]], [expected]) < 1e-2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, r"hadamard\.json"),
        ({"version": 2}, "version is 2; exo reads 1"),
        ({"gdn_v_grouped": False}, "not grouped"),
        ({"weight_names": ["language_model.lm_head.weight"]}, "is not turned and others are"),
    ],
)
def test_what_the_cpu_engine_would_compute_otherwise_is_left_to_mlx_lm(
    said: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    write_pack(tmp_path, **(said or {}))
    if said is None:
        (tmp_path / "pack/hadamard.json").unlink()
    with pytest.raises(ModelUnsupported, match=message):
        CheckpointModel(tmp_path / "pack")
    CutModel(tmp_path / "pack", mx.float32)
