"""GGUF files of our own making, converted, compute what the checkpoint they came from does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
import zoo
from mlx_lm.utils import load_model

from exo.download.gguf import convert_gguf
from exo.download.gguf_file import GGUFFile
from exo.download.store import ModelStore, default_sources
from exo.errors import ModelUnsupported
from exo.models.card import resolve
from exo.models.tokenizer import HFTokenizer

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders them for RoPE over neighbouring pairs."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def write_gguf(checkpoint: Path, file: Path, architecture: str, **extra: Any) -> None:
    """A GGUF file with the checkpoint's weights and a byte-level tokenizer."""
    config = json.loads((checkpoint / "config.json").read_text())
    weights = mx.load(str(checkpoint / "model.safetensors"))
    tensors = {}
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        if module.startswith("model.layers."):
            _, _, layer, rest = module.split(".", 3)
            target = f"blk.{layer}.{_NAMES[rest]}.{kind}"
        else:
            target = f"{_OUTER[module]}.{kind}"
        if architecture == "llama" and ("attn_q." in target or "attn_k." in target):
            heads = config["num_attention_heads" if "attn_q." in target else "num_key_value_heads"]
            array = mx.array(permuted(np.array(array), heads))
        tensors[target] = array
    a = architecture
    tokens = [chr(33 + i) for i in range(90)]
    tokens += [f"unused{i}" for i in range(zoo.VOCABULARY - 94)] + ['!"', "#$", "<s>", "</s>"]
    metadata: dict[str, Any] = {
        "general.architecture": a,
        f"{a}.embedding_length": mx.array(config["hidden_size"], mx.uint32),
        f"{a}.block_count": mx.array(config["num_hidden_layers"], mx.uint32),
        f"{a}.feed_forward_length": mx.array(config["intermediate_size"], mx.uint32),
        f"{a}.attention.head_count": mx.array(config["num_attention_heads"], mx.uint32),
        f"{a}.attention.head_count_kv": mx.array(config["num_key_value_heads"], mx.uint32),
        f"{a}.attention.key_length": mx.array(config.get("head_dim", 16), mx.uint32),
        f"{a}.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"], mx.float32),
        f"{a}.context_length": mx.array(512, mx.uint32),
        f"{a}.rope.freq_base": mx.array(config["rope_theta"], mx.float32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ['! "', "# $"],
        "tokenizer.ggml.token_type": mx.array([1] * (len(tokens) - 2) + [3, 3], mx.int32),
        "tokenizer.ggml.bos_token_id": mx.array(len(tokens) - 2, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(len(tokens) - 1, mx.uint32),
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    mx.save_gguf(str(file), tensors, {k: v for k, v in (metadata | extra).items() if v is not None})


def logits(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([[5, 9, 2, 77, 31, 8]])))


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_a_converted_file_computes_what_its_source_does(
    model_type: str, architecture: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    zoo.write_checkpoint(model_type, source)
    write_gguf(source, tmp_path / "m.gguf", architecture)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "converted")
    assert np.abs(logits(tmp_path / "converted") - logits(source)).max() < 2e-2
    tokenizer = HFTokenizer(tmp_path / "converted")
    assert tokenizer.encode_chat([{"role": "user", "content": 'a!"b'}]) == [64, 124, 65]
    assert tokenizer.eos_token_ids == {zoo.VOCABULARY - 1}


def test_quantize_packs_what_would_stay_float16(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", "llama")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "float")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "q8", quantize=8)
    size = {n: (tmp_path / n / "model.safetensors").stat().st_size for n in ("float", "q8")}
    assert size["q8"] < 0.75 * size["float"]
    difference = np.abs(logits(tmp_path / "q8") - logits(tmp_path / "float")).max()
    assert 0 < difference < 0.2


def test_the_default_models_tensors_are_bit_for_bit_those_of_its_file(exo_home: Path) -> None:
    """Against the numbers in the GGUF file itself, dequantized by the format's definition."""
    models = exo_home / "models"
    store = ModelStore(models, default_sources(models))
    path = asyncio.run(store.ensure("smollm2-135m", lambda progress: None))
    weights = mx.load(str(path / "model.safetensors"))
    prefix = "model.layers.3.mlp.down_proj"
    packed, scales, biases = (weights[f"{prefix}.{n}"] for n in ("weight", "scales", "biases"))
    assert packed.dtype == mx.uint32 and scales.dtype == mx.float16
    assert packed.shape[1] * 8 == 1536 and scales.shape[1] == 1536 // 32
    # Q4_1 has a scale and a minimum: affine with 4 bits, nothing rounded.
    dense = mx.dequantize(packed, scales, biases, group_size=32, bits=4)
    nibbles = (np.array(packed)[0, 0] >> (4 * np.arange(8))) & 15
    expected = np.array(scales)[0, 0] * nibbles.astype(np.float16) + np.array(biases)[0, 0]
    assert np.allclose(np.array(dense)[0, :8], expected, atol=1e-3)
    assert weights["model.embed_tokens.weight"].shape[1] * 4 == 576  # Q8_0 is 8 bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer is 't5'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"llama.rope.scaling.type": "magic", "llama.rope.scaling.factor": 2.0}, "scaling 'magic'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    extra = {k: mx.array(v) if isinstance(v, float) else v for k, v in change.items()}
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", "llama", **extra)
    with pytest.raises(ModelUnsupported, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "converted")
    assert not (tmp_path / "converted" / "config.json").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not at all")
    with pytest.raises(ModelUnsupported, match="not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "converted")


def test_a_changed_file_is_converted_anew(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    file = tmp_path / "m.gguf"
    write_gguf(tmp_path / "source", file, "llama")
    source = GGUFFile(tmp_path / "models", None)
    card = resolve(str(file))
    first = source.fetch(card, lambda progress: None)
    assert source.find(card) == first
    write_gguf(tmp_path / "source", file, "llama", **{"general.name": "other"})
    assert source.find(resolve(str(file))) is None


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    """Q4_K_M of a small Gemma: rows too short for K-quants are Q5_0, which MLX refuses."""
    file = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(file, "gemma3")
    rows = np.zeros((4, 22), np.uint8)  # a Q5_0 block is 22 bytes for 32 values
    writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"holds 1 tensors of Q5_0; exo reads F32.*Q6_K"):
        convert_gguf(file, tmp_path / "out")
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ModelUnsupported, match="not a GGUF file, or not a whole"):
        convert_gguf(file, tmp_path / "out")
