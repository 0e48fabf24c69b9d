import json
from pathlib import Path

import pytest
import zoo

from exo.errors import ModelUnsupported
from exo.inference.cpu.shard_model import CheckpointModel
from exo.models.description import context_length, describe_checkpoint, read_config, text_config
from exo.shard import Shard


def test_sizes_are_those_of_the_file(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path)
    found = describe_checkpoint("m", tmp_path, zoo.LAYERS)
    weights = (tmp_path / "model.safetensors").stat().st_size
    kv = 4096 * 2 * 2 * 2 * 16  # tokens x (key, value) x 2 bytes x 2 heads x 16
    bytes_counted = sum(found.layer_bytes) - zoo.LAYERS * kv + found.first_bytes
    assert weights * 0.95 < bytes_counted < weights
    assert len(set(found.layer_bytes)) == 1
    assert found.context_length == 4096 or found.context_length == 512


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3n", "gemma4_text", "lfm2"])
def test_a_tied_embedding_counts_once_where_one_node_has_both_ends(
    family: str, tmp_path: Path
) -> None:
    """Configurations need not say that it is the head too: there is no other in the checkpoint."""
    config = zoo.tiny_config(family)
    zoo.write_checkpoint(family, tmp_path)
    found = describe_checkpoint("m", tmp_path, zoo.LAYERS)
    embedding = zoo.VOCABULARY * text_config(config)["hidden_size"] * 4
    assert found.shared_bytes == embedding < found.last_bytes
    n = zoo.LAYERS
    whole = found.bytes_of([Shard("m", 0, n, n)])
    assert whole == sum(found.layer_bytes) + found.first_bytes + found.last_bytes - embedding
    parts = found.bytes_of([Shard("m", 0, 2, n)]) + found.bytes_of([Shard("m", 2, n, n)])
    assert parts == whole + embedding


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "internlm2", "glm4_moe"])
def test_a_head_of_its_own_is_the_last_nodes(family: str, tmp_path: Path) -> None:
    zoo.write_checkpoint(family, tmp_path)
    found = describe_checkpoint("m", tmp_path, zoo.LAYERS)
    head = zoo.VOCABULARY * text_config(zoo.tiny_config(family))["hidden_size"] * 4
    assert found.shared_bytes == 0
    assert found.first_bytes == head < found.last_bytes < 1.1 * head


def test_the_checkpoint_digest_follows_configuration_and_tensors(tmp_path: Path) -> None:
    digests = set()
    for name in ("llama", "qwen3", "llama again"):
        zoo.write_checkpoint(name.split()[0], tmp_path / name)
        digests.add(describe_checkpoint("m", tmp_path / name, zoo.LAYERS).checkpoint)
    assert len(digests) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 100_000, '{"a":' * 600])
def test_a_config_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelUnsupported):
        read_config(tmp_path)


def test_pickles_and_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelUnsupported, match="pickled weights are not read"):
        describe_checkpoint("m", tmp_path, 2)
    for damaged in (b"", b"\xff" * 100, (1000).to_bytes(8, "little") + b"{"):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ModelUnsupported, match="not a safetensors file"):
            describe_checkpoint("m", tmp_path, 2)


@pytest.mark.parametrize(
    "header",
    [
        [1],
        {"w": 1},
        {"w": {"dtype": "F32", "shape": [1]}},
        {"w": {"dtype": "F32", "shape": 4, "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"w": {"dtype": "?", "shape": [1], "data_offsets": [4, 0]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        {"w": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 2**72]}},
    ],
)
def test_headers_that_say_what_cannot_be_are_refused(header: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelUnsupported, match=r"model\.safetensors"):
        describe_checkpoint("m", tmp_path, 2)


def test_the_context_is_read_by_its_many_names() -> None:
    assert context_length({"max_position_embeddings": 7}) == 7
    assert context_length({"n_ctx": 9, "max_position_embeddings": None}) == 9
    assert context_length({"text_config": {"max_position_embeddings": 5}}) == 5
    assert context_length({}) == 4096


MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v2", "ernie4_5_moe", "kimi_linear", "llama4")


@pytest.mark.parametrize("family", MIXTURES)
def test_what_a_token_leaves_unread_of_a_mixture(family: str, tmp_path: Path) -> None:
    zoo.write_checkpoint(family, tmp_path)
    found, model = describe_checkpoint("m", tmp_path, zoo.LAYERS), CheckpointModel(tmp_path)
    own = model.architecture
    assert found.routed_share == own.experts_per_token / own.expert_count < 1
    left = 1 - found.routed_share
    assert found.unread_bytes == tuple(int(size * left) for size in model.expert_bytes)


def test_of_what_is_no_mixture_all_is_read(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path)
    found = describe_checkpoint("m", tmp_path, zoo.LAYERS)
    assert (found.routed_share, found.unread_bytes) == (1.0, ())
