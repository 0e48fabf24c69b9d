"""MiniMax M3 on the cpu engine, where there are more blocks of keys than a query attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zoo
from gguf_files import write_gguf
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from native_ring import TOKENS, NativeRing, part

from exo.errors import ModelUnsupported
from exo.inference.cpu.shard_model import CheckpointModel
from exo.models.gguf.folder import write_folder


def write(folder: Path, **more: Any) -> Path:
    config = zoo.tiny_config("minimax_m3_vl")
    zoo.write_checkpoint(
        "minimax_m3_vl", folder, config | {"text_config": config["text_config"] | more}
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("m3"))


def write_like(source: Path, folder: Path, weights: dict[str, mx.array]) -> None:
    """Of the same configuration."""
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text((source / "config.json").read_text())


def of_mlx(folder: Path) -> np.ndarray:
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([TOKENS]), cache=make_prompt_cache(model))[0])


@pytest.mark.parametrize("cuts", [(), (1, 4)])
def test_it_computes_what_mlx_does(cuts: tuple[int, ...], folder: Path) -> None:
    expected = of_mlx(folder)
    found = NativeRing(folder, *cuts, kv_bits=32).whole()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_what_is_chosen_matters(folder: Path, tmp_path: Path) -> None:
    """Else the test before said nothing."""
    all_of_them = write(tmp_path, index_topk_blocks=8)
    few, every = (NativeRing(one, kv_bits=32).whole() for one in (folder, all_of_them))
    assert (few[:128] == every[:128]).all()
    assert np.abs(few[128:] - every[128:]).max() > 1e-2 * np.abs(every).max()


def test_its_gguf_file_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "m.gguf")
    write_folder([tmp_path / "m.gguf"], tmp_path / "model")
    expected = of_mlx(folder)
    found = NativeRing(tmp_path / "model", 3, kv_bits=32).whole()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_file_of_before_it_had_an_indexer_is_refused(folder: Path, tmp_path: Path) -> None:
    write_gguf(
        folder, tmp_path / "m.gguf", rename=lambda name: name.replace("indexer.q", "index_q")
    )
    with pytest.raises(ModelUnsupported, match="MiniMax M3 without its indexer"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "model")


@pytest.mark.parametrize("more", [{"index_block_size": 128, "index_topk_blocks": 1}, {}])
def test_a_token_is_the_same_in_pieces_and_in_company(more: dict[str, Any], tmp_path: Path) -> None:
    NativeRing(write(tmp_path, **more), 4, precise=False).check_pieces()


@pytest.mark.parametrize("kv_bits", [8, 16])
def test_it_goes_on_from_what_another_sequence_computed(kv_bits: int, folder: Path) -> None:
    ring = NativeRing(folder, precise=False, kv_bits=kv_bits)
    expected = ring.whole("first")
    ring.take_over("second", "first", 170)
    assert (ring.step(part("second", 170, len(TOKENS) - 170)) == expected[170:]).all()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"index_block_size": 48}, "takes blocks that 64 divides"),
        ({"index_local_blocks": 0}, "at least the newest block"),
        ({"index_n_heads": 4}, "an indexer of 4 heads for 2 KV heads"),
        ({"index_head_dim": 16, "rotary_dim": 32, "head_dim": 32}, "positions turn 32"),
        ({"sparse_attention_config": {"sparse_init_block": 1}}, "otherwise than by their best key"),
        ({"swiglu_limit": 9.0}, "alpha and limit"),
        ({"use_gemma_norm": False}, "norms do not add one"),
    ],
)
def test_what_it_does_not_compute_is_refused(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=said):
        CheckpointModel(write(tmp_path, **more))


def test_a_shared_expert_among_the_others_is_left_to_mlx(folder: Path, tmp_path: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    shared = [name for name in weights if ".shared_experts." in name]
    for name in shared:
        stack = name.replace("shared_experts", "switch_mlp")
        weights[stack] = mx.concatenate([weights[stack], weights.pop(name)[None]])
    write_like(folder, tmp_path, weights)
    with pytest.raises(ModelUnsupported, match="is of 5 experts, not 4"):
        CheckpointModel(tmp_path)
    assert (of_mlx(tmp_path) == of_mlx(folder)).all()


def test_weights_of_another_shape_than_said_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    name = next(name for name in weights if name.endswith("index_q_proj.weight"))
    write_like(folder, tmp_path, {**weights, name: mx.zeros((4 * 16, 64))})
    with pytest.raises(ModelUnsupported, match="index_q_proj has 64 rows, not 2 heads of 16"):
        NativeRing(tmp_path)
