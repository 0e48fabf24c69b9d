"""GGUF files of our own making, used where they are, compute what the checkpoint they came from
does; on both engines."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import zoo
from gguf_checks import check_both_engines, cpu_logits, write_source
from gguf_files import ARCHITECTURES, Joined, quantized, write_gguf

from exo.download.gguf_file import GGUFFile
from exo.download.store import ModelStore, default_sources
from exo.errors import ModelUnsupported
from exo.inference.cpu.packing import _pack
from exo.inference.cpu.shard_model import CheckpointModel
from exo.models.card import resolve
from exo.models.checkpoint import Checkpoint, Tensor
from exo.models.gguf.file import read_gguf
from exo.models.gguf.folder import parts_of, write_folder
from exo.models.gguf.header import READ_FORMATS
from exo.models.tensor_table import all_tensors, parts_with
from exo.models.tokenizer import HFTokenizer


@pytest.fixture(autouse=True)
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are not computed together by MLX, which is what others are compared with here: to
    try whether they could be takes as long as all else."""
    monkeypatch.setattr("exo.inference.mlx.engine.works", lambda model, start, end: False)


OWN_READERS = ("Q1_0", "Q2_0", "PQ2_0", "PTQ1_0", "MXFP4_PAIRS")
"""What the `gguf` package does not read: test_gguf_low_bits.py, test_gguf_of_ollama.py."""

NEMOTRON_3 = {
    "hybrid_override_pattern": "M*EM*E",
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in ARCHITECTURES),
    ("nemotron_h", NEMOTRON_3),
    ("nemotron_h", NEMOTRON_3 | {"moe_latent_size": 48, "mlp_bias": False}),
    ("nanbeige", {"skip_loop_final_norm": True}),
    ("mamba", {"use_bcdt_rms": True, "tie_word_embeddings": False}),
    ("jamba", {"num_experts": 1}),
    ("jamba", {"attn_layer_period": 6, "num_experts": 1}),
    ("gemma4_text", zoo.GEMMA4_31B),
    ("gemma4_text", zoo.GEMMA4_26B),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "nope"}),
]


@pytest.mark.parametrize(("model_type", "more"), CASES)
def test_a_file_computes_what_its_source_does(
    model_type: str, more: dict[str, Any], tmp_path: Path
) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    write_source(model_type, more, source)
    write_gguf(source, tmp_path / "m.gguf")
    write_folder([tmp_path / "m.gguf"], folder)
    assert (folder / "model.gguf").resolve() == tmp_path / "m.gguf"
    check_both_engines(folder, source, [3])


@pytest.mark.parametrize(("model_type", "more"), CASES)
def test_a_file_of_joined_matrices(model_type: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Queries, keys and values in one, and experts' gates and ups, as the converter writes them
    where it is asked to."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    write_source(model_type, more, source)
    write_gguf(source, tmp_path / "m.gguf", fused="all")
    write_folder([tmp_path / "m.gguf"], folder)
    check_both_engines(folder, source, [])


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "qwen3_5_moe"])
def test_joined_matrices_may_be_packed(model_type: str, tmp_path: Path) -> None:
    def quantize(name: str, numbers: npt.NDArray[np.float32]) -> str:
        is_matrix = numbers.ndim > 1 and not name.endswith("bias")
        return "Q8_0" if is_matrix and numbers.shape[-1] % 32 == 0 else "F32"

    found = []
    write_source(model_type, {"linear_key_head_dim": 128}, tmp_path / "source")
    ways: tuple[Joined, ...] = ("", "all")
    for fused in ways:
        file, folder = tmp_path / f"m{fused}.gguf", tmp_path / f"m{fused}"
        write_gguf(tmp_path / "source", file, quantize, fused=fused)
        write_folder([file], folder)
        found.append((cpu_logits(folder, [])[-1], asyncio.run(zoo.split_logits(folder, [], 6))[0]))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


def test_a_joined_matrix_has_as_many_rows_as_the_heads(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    more = {"llama.attention.head_count_kv": 4}
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", fused="all", **more)
    with pytest.raises(ModelUnsupported, match=r"attn_qkv.* has 128 rows; by the .* it has 192"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "folder")


@pytest.mark.parametrize(
    ("model_type", "architecture", "more"),
    [
        ("llama", "internlm2", {}),
        ("llama", "exaone", {}),
        ("llama", "baichuan", {}),
        ("llama", "xverse", {}),
        ("llama", "pangu-embedded", {}),
        ("stablelm", "orion", {}),
        ("qwen2", "qwen", {"qwen.feed_forward_length": 256, "fused": "all"}),
        ("qwen2", "qwen2vl", {}),
        ("ernie4_5_moe", "bailingmoe", {"bailingmoe.expert_weights_norm": True}),
        ("mistral4", "deepseek2", {}),
    ],
)
def test_a_file_of_another_name_for_what_it_computes(
    model_type: str,
    architecture: str,
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ARCHITECTURES, model_type, architecture)
    source, folder = tmp_path / "source", tmp_path / "folder"
    plain = {"attention_bias": architecture == "pangu-embedded", "mlp_bias": False}
    write_source(model_type, plain, source)
    write_gguf(source, tmp_path / "m.gguf", **more)
    write_folder([tmp_path / "m.gguf"], folder)
    check_both_engines(folder, source, [3])


@pytest.mark.parametrize(
    ("model_type", "pairs", "said"),
    [
        ("phi3", 8, {}),
        ("phimoe", 8, {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}),
        ("minicpm3", 4, {"original_max_position_embeddings": 32}),
    ],
)
def test_factors_of_long_positions(
    model_type: str, pairs: int, said: dict[str, float], tmp_path: Path
) -> None:
    """They stand in tensors; what Phi 3.5's mixture multiplies by, nowhere."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    long, short = (1 + step * np.arange(pairs, dtype=np.float32) for step in (0.25, 0.0))
    scaling = {"type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
    more = {
        "rope_scaling": scaling | said,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128,
        "partial_rotary_factor": 1.0,
    }
    write_source(model_type, more, source)
    factors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    architecture = ARCHITECTURES[model_type]
    metadata = {f"{architecture}.rope.scaling.original_context_length": 32}
    write_gguf(source, tmp_path / "m.gguf", beside=factors, **metadata)
    write_folder([tmp_path / "m.gguf"], folder)
    check_both_engines(folder, source, [3])


def test_qwen3_next_as_files_had_it_before_2026(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta nets' projections in one tensor, as they are in the checkpoint."""
    own = gguf_files._own_name

    def named(name: str, names: Any) -> str:
        joined = name.endswith("in_proj_qkvz.weight")
        return f"blk.{name.split('.')[2]}.ssm_in.weight" if joined else own(name, names)

    monkeypatch.setattr(gguf_files, "_own_name", named)
    monkeypatch.setattr(gguf_files, "_split", lambda tensors, config: tensors.items())
    source, folder = tmp_path / "source", tmp_path / "folder"
    write_source("qwen3_next", {}, source)
    write_gguf(source, tmp_path / "m.gguf")
    write_folder([tmp_path / "m.gguf"], folder)
    check_both_engines(folder, source, [3])


@pytest.mark.parametrize("model_type", ["deepseek_v2", "glm4_moe_lite"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_latents_are_read_as_files_had_them_before_may_2025(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    """Keys and values of each head in one matrix. Mlx-lm's class wants the other form of one of
    the two models, in files of today and in those."""
    config = zoo.tiny_config(model_type) | {"kv_lora_rank": 32, "n_group": 1, "topk_group": 1}
    zoo.write_checkpoint(model_type, tmp_path / "source", config)
    lengths = [config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]]
    expected = [logits[0] for logits in zoo.unsplit_logits(tmp_path / "source")]
    for joined in (True, False):
        folder, file = tmp_path / f"{joined}", tmp_path / f"{joined}.gguf"
        extra: dict[str, Any] = {}
        if joined:
            extra["deepseek2.attention.head_count_kv"] = config["num_attention_heads"]
            for part, length in zip(("key", "value"), lengths, strict=True):
                extra[f"deepseek2.attention.{part}_length"] = length
                extra[f"deepseek2.attention.{part}_length_mla"] = None

        def quantize(name: str, numbers: npt.NDArray[np.float32]) -> str:
            of_latents = any(part in name for part in ("attn_k_b", "attn_v_b", "attn_kv_b"))
            return kind if of_latents and numbers.shape[-1] % 32 == 0 else "F32"

        write_gguf(tmp_path / "source", file, quantize, joined_latents=joined, **extra)
        write_folder([file], folder)
        few = 1e-4 if kind == "F32" else 0.05
        assert not CheckpointModel(folder).architecture.uncuttable
        assert zoo.worst_error([cpu_logits(folder, [3])[-1]], [expected[0]]) < few
        [through_mlx, *_] = asyncio.run(zoo.split_logits(folder, [2], zoo.LAYERS))
        assert zoo.worst_error([through_mlx[0]], [expected[0]]) < few


@pytest.mark.parametrize("leaves_out", [True, False])
def test_layers_of_glm_5_2_attend_to_what_another_chose(leaves_out: bool, tmp_path: Path) -> None:
    """Of indexers that no layer asks files may have the weights, or not."""
    kinds = ["full", "full", "full", "shared", "shared", "full"]
    source, folder, file = tmp_path / "source", tmp_path / "folder", tmp_path / "m.gguf"
    zoo.write_checkpoint("glm_moe_dsa", source, zoo.tiny_config("glm_moe_dsa"))
    whole = asyncio.run(zoo.split_logits(source, [], zoo.LAYERS))[0][0]
    config = json.loads((source / "config.json").read_text()) | {"indexer_types": kinds}
    (source / "config.json").write_text(json.dumps(config))
    weights = dict(mx.load(str(source / "model.safetensors")))
    for name in list(weights):
        if leaves_out and ".indexer." in name and kinds[int(name.split(".")[2])] == "shared":
            del weights[name]
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_gguf(source, file)
    write_folder([file], folder)
    expected = cpu_logits(source, [])[-1]
    assert np.abs(expected - whole).max() > 1e-3
    for place in (source, folder):
        description = asyncio.run(zoo.describe(place))
        assert description.cuts == CheckpointModel(place).architecture.cuts == {1, 2, 5}
        assert np.array_equal(cpu_logits(place, [2, 5])[-1], expected)
        for cuts in ([], [2, 5]):
            steps = asyncio.run(zoo.split_logits(place, cuts, zoo.LAYERS))
            assert zoo.worst_error([steps[0][0]], [expected]) < 1e-4


def test_gemma_4_has_layers_of_both_kinds(tmp_path: Path) -> None:
    zoo.write_checkpoint("gemma4_text", tmp_path / "source")
    said = {"gemma4.attention.sliding_window_pattern": [True] * zoo.LAYERS}
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **said)
    with pytest.raises(ModelUnsupported, match="expected layers of both kinds"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "folder")


def test_a_layer_that_guesses_further_tokens_is_left_out(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    config = zoo.tiny_config("glm4_moe") | {"num_hidden_layers": zoo.LAYERS + 1}
    zoo.write_checkpoint("glm4_moe", source, config)
    own = {f"blk.{zoo.LAYERS}.nextn.eh_proj.weight": np.zeros((8, 16), np.float32)}
    said = {"glm4moe.nextn_predict_layers": 1}
    write_gguf(source, tmp_path / "m.gguf", beside=own, **said)
    write_folder([tmp_path / "m.gguf"], folder)
    [through_mlx, *_] = asyncio.run(zoo.split_logits(folder, [2], zoo.LAYERS))
    assert zoo.worst_error([cpu_logits(folder, [])[-1]], [through_mlx[0]]) < 1e-4


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_both_engines_read_the_same_numbers(name: str, tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")

    def quantize(tensor: str, numbers: npt.NDArray[np.float32]) -> str:
        return name if numbers.ndim == 2 else "F32"

    write_gguf(tmp_path / "source", tmp_path / "m.gguf", quantize)
    write_folder([tmp_path / "m.gguf"], tmp_path / "folder")
    found = cpu_logits(tmp_path / "folder", [])[-1]
    [through_mlx, *_] = asyncio.run(zoo.split_logits(tmp_path / "folder", [2], zoo.LAYERS))
    assert zoo.worst_error([found], [through_mlx[0]]) < 1e-4
    assert zoo.worst_error([found], [zoo.unsplit_logits(tmp_path / "source")[0][0]]) < 0.6


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0", "NVFP4"])
def test_the_cpu_engine_holds_the_numbers_of_formats_that_no_kernel_reads(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (37, 512 // columns * size), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    if name == "NVFP4":
        blocks[:, :4] &= 0x7F
    else:
        blocks[:, -2:] = rng.uniform(-1, 1, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    packed = _pack(None, {"weight": Tensor("w", name, (37, 512), data.reshape(-1))})
    found = packed.read_rows(np.arange(37, dtype=np.int32))
    assert np.array_equal(found, gguf.quants.dequantize(data, kind))
    assert packed.nbytes <= 1.2 * data.nbytes * 48 / 37 * (1 if name == "NVFP4" else 1.25)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "phi3"])
def test_an_nvfp4_weight_has_a_scale_for_all_of_it(model_type: str, tmp_path: Path) -> None:
    """Or one for each expert; as llama.cpp's converter writes what ModelOpt made."""
    kind = gguf.GGMLQuantizationType.NVFP4
    zoo.write_checkpoint(model_type, tmp_path / "source")
    beside: dict[str, npt.NDArray[np.float32]] = {}

    def scales(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        count = len(numbers) if numbers.ndim == 3 else 1
        found = np.linspace(0.01, 0.02, count, dtype=np.float32)
        return found.reshape(-1, *[1] * (numbers.ndim - 1))

    def is_packed(name: str, numbers: npt.NDArray[np.float32]) -> bool:
        return numbers.ndim >= 2 and numbers.shape[-1] % 64 == 0 and name.startswith("blk.")

    def quantize(name: str, numbers: npt.NDArray[np.float32]) -> str:
        if not is_packed(name, numbers):
            return "F32"
        own = scales(numbers)
        numbers /= own
        beside[name.replace("weight", "scale")] = own.reshape(-1)
        beside[name.replace("weight", "input_scale")] = np.ones(1, np.float32)
        return "NVFP4"

    def rounded(name: str, numbers: npt.NDArray[np.float32]) -> str:
        if is_packed(name, numbers):
            own = scales(numbers)
            blocks = quantized(numbers / own, kind)
            numbers[...] = own * gguf.quants.dequantize(blocks, kind)
        return "F32"

    write_gguf(tmp_path / "source", tmp_path / "packed.gguf", quantize, beside)
    write_gguf(tmp_path / "source", tmp_path / "rounded.gguf", rounded)
    assert beside
    for name in ("packed", "rounded"):
        write_folder([tmp_path / f"{name}.gguf"], tmp_path / name)
    found, expected = (cpu_logits(tmp_path / name, [])[-1] for name in ("packed", "rounded"))
    assert zoo.worst_error([found], [expected]) < 1e-4
    [through_mlx, *_] = asyncio.run(zoo.split_logits(tmp_path / "packed", [2], zoo.LAYERS))
    assert zoo.worst_error([through_mlx[0]], [expected]) < 0.05


@pytest.mark.parametrize(
    "name", [n for n in READ_FORMATS if n not in ("F32", "F16", "BF16", *OWN_READERS)]
)
def test_mlx_holds_the_numbers_of_the_file(name: str) -> None:
    import mlx.core as mx

    from exo.inference.mlx.gguf_weights import GROUP, affine
    from exo.models.checkpoint import Tensor

    kind = gguf.GGMLQuantizationType[name]
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    data = rng.integers(0, 60, (5, 512 // columns * size), dtype=np.uint8)  # no scale is infinite
    if name == "MXFP4":
        data.reshape(-1, size)[:, 0] += 100
    weight, scales, offsets = affine(Tensor("w", name, (5, 512), data.reshape(-1)))
    bits = weight.shape[-1] * 32 // 512
    parts = (mx.array(part) for part in (weight, scales, offsets))
    found = np.array(mx.dequantize(*parts, group_size=GROUP, bits=bits))
    expected = gguf.quants.dequantize(data, kind)
    step = np.repeat(np.abs(scales), GROUP, axis=-1)
    widened = name in ("Q2_K", "Q3_K", "Q6_K", "NVFP4")
    steps = 1.01 if widened or name[:3] in ("IQ1", "IQ2", "IQ3") else 1e-5
    assert (np.abs(found - expected) <= steps * step + 1e-6 * np.abs(expected)).all()


def test_the_tokenizer_is_the_file_s(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "m.gguf")
    write_folder([tmp_path / "m.gguf"], tmp_path / "folder")
    tokenizer = HFTokenizer(tmp_path / "folder")
    assert tokenizer.encode_chat([{"role": "user", "content": 'a!"b'}]) == [64, 124, 65]
    assert tokenizer.encode("a") == [64]
    assert tokenizer.eos_token_ids == {zoo.VOCABULARY - 1}
    extra = {"tokenizer.ggml.pre": "llama-bpe"}  # whose prompts begin with a token
    write_gguf(tmp_path / "source", tmp_path / "bos.gguf", **extra)
    write_folder([tmp_path / "bos.gguf"], tmp_path / "with-bos")
    assert HFTokenizer(tmp_path / "with-bos").encode("a") == [zoo.VOCABULARY - 2, 64]


def test_a_vocabulary_of_characters_has_its_merges_in_the_file(tmp_path: Path) -> None:
    """Gemma 4's: spaces are merged as letters are, and what is unknown is bytes."""
    own = ["<unk>", "<bos>", "<turn|>", "▁", "a", "b", "ab", "▁ab", "▁▁", "\n", "<0xC3>", "<0xA9>"]
    tokens = own + [f"unused{i}" for i in range(zoo.VOCABULARY - len(own))]
    zoo.write_checkpoint("llama", tmp_path / "source")
    extra = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b", "▁ ab", "▁ ▁"],
        "tokenizer.ggml.token_type": [1, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **extra)
    write_folder([tmp_path / "m.gguf"], tmp_path / "folder")
    tokenizer = HFTokenizer(tmp_path / "folder")
    found = tokenizer.encode("ab ab\n  é")
    assert [tokens[i] for i in found] == ["<bos>", "ab", "▁ab", "\n", "▁▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found[1:]) == "ab ab\n  é"
    assert tokenizer.eos_token_ids == {2}


def test_the_default_model_is_its_file(exo_home: Path) -> None:
    models = exo_home / "models"
    store = ModelStore(models, default_sources(models))
    path = asyncio.run(store.ensure("smollm2-135m", lambda progress: None))
    with Checkpoint(path) as checkpoint:
        down = checkpoint.tensor("model.layers.3.mlp.down_proj.weight")
        assert down.dtype == "Q4_1" and down.shape == (576, 1536)
        [file] = path.glob("model*.gguf")
        there = read_gguf(file).tensors["blk.3.ffn_down.weight"]
        with file.open("rb") as stream:
            stream.seek(there.offset)
            assert stream.read(there.nbytes) == down.data.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "rwkv7"}, "architecture 'rwkv7'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer is 'rwkv'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"llama.rope.scaling.type": "magic", "llama.rope.scaling.factor": 2.0}, "scaling 'magic'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **change)
    source = GGUFFile(tmp_path / "models")
    card = resolve(str(tmp_path / "m.gguf"))
    with pytest.raises(ModelUnsupported, match=message):
        source.fetch(card, lambda progress: None)
    assert source.find(card) is None and not list((tmp_path / "models").iterdir())


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    zoo.write_checkpoint("llama", tmp_path / "source")
    write_gguf(tmp_path / "source", file)
    whole = file.read_bytes()
    for data in (
        b"",
        b"not at all",
        whole[:40],
        whole[:3000],
        whole[:-200],
        b"GGUF" + b"\xff" * 40,
    ):
        file.write_bytes(data)
        with pytest.raises(ModelUnsupported, match=r"not a GGUF file, or not a whole|GGUF version"):
            write_folder([file], tmp_path / "out")


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "gemma3")
    rows = np.zeros((4, 292), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"holds 1 tensors of Q8_K; exo reads F32.*Q6_K"):
        write_folder([file], tmp_path / "out")


def test_a_file_in_parts_is_one_model(tmp_path: Path) -> None:
    zoo.write_checkpoint("qwen3", tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "whole.gguf")
    parts = [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]
    whole = gguf.GGUFReader(tmp_path / "whole.gguf")
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "qwen3")
        if number == 0:
            for field in list(whole.fields.values())[3:]:
                if field.name != "general.architecture":
                    kind = field.types[0]
                    of = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), kind, of)
        for tensor in whole.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    write_folder(parts_of(parts[1]), tmp_path / "folder")
    expected = zoo.unsplit_logits(tmp_path / "source")[0][0]
    assert zoo.worst_error([cpu_logits(tmp_path / "folder", [])[-1]], [expected]) < 1e-4
    parts[0].unlink()
    with pytest.raises(ModelUnsupported, match=r"m-00001-of-00002\.gguf is missing beside"):
        write_folder(parts_of(parts[1]), tmp_path / "again")


def test_the_store_uses_the_user_s_file_and_never_deletes_it(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    file = tmp_path / "m.gguf"
    write_gguf(tmp_path / "source", file)
    models = tmp_path / "models"
    store = ModelStore(models, default_sources(models))
    folder = asyncio.run(store.ensure(str(file), lambda progress: None))
    assert store.find(str(file)) == folder
    assert store.size(folder) < file.stat().st_size  # of the weights nothing is a copy
    moved = shutil.move(file, tmp_path / "elsewhere.gguf")
    shutil.copy(moved, file)  # another file of the name: read anew
    assert store.find(str(file)) is None
    asyncio.run(store.ensure(str(file), lambda progress: None))
    store.remove(str(file))
    assert file.is_file() and store.find(str(file)) is None


def test_step_s_positions_are_scaled_where_its_file_has_factors(tmp_path: Path) -> None:
    """In layers that see all, for the half of each head that positions turn there; llama.cpp's
    converter writes them so, and ones for the other half."""
    scaling = {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 131072,
    }
    source, folder = tmp_path / "source", tmp_path / "folder"
    theta = ([5e6] + [1e4] * 3) * 2
    write_source("step3p5", {"rope_scaling": scaling, "rope_theta": theta}, source)
    turns = 131072 / (2 * np.pi * 5e6 ** (np.arange(0, 8, 2) / 8))
    smooth = np.clip((turns - 1) / 31, 0, 1)
    factors = np.concatenate([1 / ((1 - smooth) / 2 + smooth), np.ones(4)]).astype(np.float32)
    assert len(set(factors.tolist())) == 3
    write_gguf(source, tmp_path / "m.gguf", beside={"rope_freqs.weight": factors})
    write_folder([tmp_path / "m.gguf"], folder)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling
    check_both_engines(folder, source, [3])


def test_numbers_of_layers_in_the_metadata_belong_to_the_header(tmp_path: Path) -> None:
    """Apertus': a node that fetches some layers gets the whole header, not the half before them."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    write_source("apertus", {}, source)
    write_gguf(source, tmp_path / "m.gguf")
    write_folder([tmp_path / "m.gguf"], folder)
    wanted = [name for name in all_tensors(folder) if ".layers.2." in name]
    assert "model.layers.2.mlp.act_fn.alpha_p" in wanted
    ((start, end), *_) = parts_with(folder, wanted)["model.gguf"]
    assert (start, end >= read_gguf(tmp_path / "m.gguf").data_start) == (0, True)


def test_a_first_file_of_metadata_alone_is_wanted_whole(tmp_path: Path) -> None:
    """As `gguf-split --no-tensor-first-split` writes it, here with Apertus' numbers."""
    write_source("apertus", {}, tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "whole.gguf")
    write_folder([tmp_path / "whole.gguf"], tmp_path / "folder")
    whole = tmp_path / "whole.gguf"
    header = bytearray(whole.read_bytes()[: read_gguf(whole).data_start])
    header[8:16] = bytes(8)  # so many tensors
    (tmp_path / "folder/model.gguf").unlink()
    (tmp_path / "folder/model.gguf").write_bytes(header)
    wanted = all_tensors(tmp_path / "folder")
    assert parts_with(tmp_path / "folder", wanted)["model.gguf"] == [(0, len(header))]


def test_numbers_of_other_layers_than_there_are_are_refused(tmp_path: Path) -> None:
    write_source("apertus", {}, tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **{"apertus.block_count": zoo.LAYERS - 1})
    with pytest.raises(ModelUnsupported, match=r"xielu\.alpha_p has 6 numbers.*5 layers"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "folder")
