"""GGUF files as Ollama's own converter writes them compute what llama.cpp's do, and chat."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import numpy.typing as npt
import pytest
import zoo
from gguf_checks import check_both_engines, cpu_logits, write_source
from gguf_files import Named, quantized, write_gguf

from exo.errors import ModelUnsupported
from exo.models.gguf.chat_templates import usual_template
from exo.models.gguf.file import read_gguf
from exo.models.gguf.folder import write_folder
from exo.models.gguf.unpacking import mxfp4_of_pairs
from exo.models.tokenizer import HFTokenizer

EYES: Named = [
    ("v.blk.0.attn_q.weight", np.ones((8, 8), np.float32)),
    ("mm.input_projection.weight", np.ones((8, 64), np.float32)),
]


def renamed(parts: dict[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for old, new in parts.items():
            name = name.replace(old, new)
        return name

    return rename


CASES: dict[str, tuple[str, str, dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": (
        "gpt_oss",
        "gptoss",
        {"attn_output": "attn_out", "attn_sinks.weight": "attn_sinks"},
        {"expert_feed_forward_length": None},
        {},
    ),
    "qwen2.5vl": ("qwen2", "qwen25vl", {}, {"rope.mrope_section": [2, 3, 3]}, {}),
    "olmo3": ("olmo3", "olmo3", {}, {}, {}),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        "glm4moelite",
        {},
        {"attention.head_count_kv": 4},
        {"v_head_dim": 24},
    ),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {},
        {
            "attention.layer_norm_rms_epsilon": None,
            "rope.freq_base": None,
            "rope.local.freq_base": 5000.0,
            "attention.sliding_window_pattern": [True, True, False] * 2,
        },
        {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 5000.0},
    ),
    "mistral-small3.2": (
        "ministral3",
        "mistral3",
        {},
        {
            "rope.scaling.mscale_all_dim": 1.0,
            "rope.scaling.yarn_log_multiplier": None,
            "rope.scaling_beta": 0.1,
            "attention.temperature_scale": None,
        },
        {},
    ),
    "lfm2": ("lfm2", "lfm2", {"token_embd_norm": "output_norm"}, {"feed_forward_length": 999}, {}),
    "laguna": (
        "laguna",
        "laguna",
        {"attn_gate": "attn_g"},
        {
            "rope.swa.freq_base": 100.0,
            "rope.freq_base_swa": None,
            "rope.swa.dimension_count": 16,
            "rope.dimension_count_swa": None,
        },
        {},
    ),
    "qwen3.5": ("qwen3_5", "qwen35", {"ssm_dt.bias": "ssm_dt"}, {"ssm.v_head_reordered": True}, {}),
}


@pytest.fixture(autouse=True)
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_gguf."""
    monkeypatch.setattr("exo.inference.mlx.engine.works", lambda model, start, end: False)


@pytest.mark.parametrize("name", CASES)
def test_ollama_s_file_computes_what_its_source_does(name: str, tmp_path: Path) -> None:
    model_type, architecture, names, keys, more = CASES[name]
    source, file, folder = tmp_path / "source", tmp_path / "m.gguf", tmp_path / "folder"
    write_source(model_type, more, source)
    if model_type == "glm4_moe_lite":  # a head's lengths, which that file has once for both
        config = json.loads((source / "config.json").read_text())
        head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        assert head == config["v_head_dim"]
        keys = keys | {"attention.key_length": head, "attention.value_length": head}
        keys |= {"attention.key_length_mla": 40, "attention.value_length_mla": 32}
    extra = {f"{architecture}.{key}": value for key, value in keys.items()}
    write_gguf(
        source,
        file,
        beside=dict(EYES),
        called=architecture,
        rename=renamed(names),
        **extra,
    )
    write_folder([file], folder)
    check_both_engines(folder, source, [3])


def test_gpt_oss_of_august_2025_computes_what_its_source_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate's row, then an up's, and in a byte two neighbours."""
    source, file, folder = tmp_path / "source", tmp_path / "m.gguf", tmp_path / "folder"
    write_source("gpt_oss", {}, source)

    def joined(named: Named, how: str) -> Named:
        found = dict(named)
        for name in [name for name in found if ".ffn_gate_exps." in name]:
            both = [found.pop(name.replace("gate", part)) for part in ("gate", "up")]
            experts, rows, *columns = both[0].shape
            beside = np.stack(both, axis=2).reshape(experts, 2 * rows, *columns)
            found[name.replace("gate", "gate_up")] = beside
        return list(found.items())

    def in_pairs(numbers: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> Any:
        packed = quantized(numbers, kind)
        if kind != gguf.GGMLQuantizationType.MXFP4:
            return packed
        blocks = packed.reshape(-1, 17)
        values = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
        pairs = values[:, ::2] | values[:, 1::2] << 4
        assert np.array_equal(mxfp4_of_pairs(np.hstack([blocks[:, :1], pairs])), blocks)
        return np.hstack([blocks[:, :1], pairs]).reshape(packed.shape)

    def kinds(name: str, numbers: npt.NDArray[np.float32]) -> str:
        return "MXFP4" if "_exps.weight" in name else "F32"

    write_gguf(source, tmp_path / "today.gguf", kinds)
    write_folder([tmp_path / "today.gguf"], tmp_path / "today")
    monkeypatch.setattr(gguf_files, "_fused", joined)
    monkeypatch.setattr(gguf_files, "quantized", in_pairs)
    names = renamed({"attn_output": "attn_out", "attn_sinks.weight": "attn_sinks"})
    write_gguf(source, file, kinds, fused="all", called="gptoss", rename=names)
    data = bytearray(file.read_bytes())
    for name in re.findall(rb"blk\.\d+\.ffn_\w+_exps\.weight", bytes(data)):
        kind = data.index(name) + len(name) + 4 + 3 * 8  # after the dimensions
        assert data[kind : kind + 4] == b"\x27\0\0\0"
        data[kind] = 4
    file.write_bytes(data)
    write_folder([file], folder)
    for cuts in ([], [3]):
        assert np.array_equal(cpu_logits(folder, cuts), cpu_logits(tmp_path / "today", cuts))
    through_mlx = [
        asyncio.run(zoo.split_logits(one, [2], zoo.LAYERS)) for one in (folder, tmp_path / "today")
    ]
    assert np.array_equal(*(steps[0] for steps in through_mlx))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (
            ["<|start|>", "<|channel|>", "<|message|>"],
            "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        ),
        (
            ["<start_of_turn>", "<end_of_turn>"],
            "\n\nHi<end_of_turn>\n<start_of_turn>model\n",
        ),
        (["[INST]", "[/INST]", "[SYSTEM_PROMPT]"], "[INST]Hi[/INST]"),
        (["<|im_start|>", "<|im_end|>"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_file_without_a_template_has_the_one_of_its_tokens(
    tokens: list[str], expected: str, tmp_path: Path
) -> None:
    zoo.write_checkpoint("qwen2", tmp_path / "source")
    own = [*(chr(33 + i) for i in range(90)), '!"', "#$", *tokens]
    unused = [f"unused{i}" for i in range(zoo.VOCABULARY - len(own) - 2)]
    extra = {
        "tokenizer.ggml.tokens": [*own, *unused, "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1] * 92 + [3] * len(tokens) + [1] * len(unused) + [3, 3],
        "tokenizer.chat_template": None,
    }
    for architecture, chats in (("qwen2", False), ("qwen25vl", True)):
        file, folder = tmp_path / f"{architecture}.gguf", tmp_path / architecture
        write_gguf(tmp_path / "source", file, called=architecture, **extra)
        write_folder([file], folder)
        described = json.loads((folder / "tokenizer_config.json").read_text())
        assert ("chat_template" in described) is chats
    tokenizer = HFTokenizer(tmp_path / "qwen25vl")
    said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.render(said)
    assert rendered.endswith(expected) and "Be short." in rendered
    assert usual_template(own[:90]) is None


def test_all_tokens_that_end_an_answer_are_known(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    extra = {"tokenizer.ggml.eos_token_ids": [127, 5], "tokenizer.ggml.eom_token_id": 7}
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **extra)
    write_folder([tmp_path / "m.gguf"], tmp_path / "folder")
    assert HFTokenizer(tmp_path / "folder").eos_token_ids == {5, 7, 127}


def test_llama_3_of_its_first_weeks_is_split_as_it_should_be(tmp_path: Path) -> None:
    zoo.write_checkpoint("llama", tmp_path / "source")
    tokens = [f"t{i}" for i in range(128009)] + ["<|eot_id|>"]
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": None}
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **extra)
    assert read_gguf(tmp_path / "m.gguf").metadata["tokenizer.ggml.pre"] == "llama-bpe"


@pytest.mark.parametrize(("context", "factor"), [(32768, None), (131072, 8.0)])
def test_positions_of_a_long_gemma_3_are_scaled(
    context: int, factor: float | None, tmp_path: Path
) -> None:
    zoo.write_checkpoint("gemma3_text", tmp_path / "source")
    extra = {"gemma3.context_length": context}
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **extra)
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    assert metadata.get("gemma3.rope.scaling.factor") == factor


def test_windows_that_follow_no_pattern_are_refused(tmp_path: Path) -> None:
    zoo.write_checkpoint("gemma3_text", tmp_path / "source")
    extra = {"gemma3.attention.sliding_window_pattern": [True, False, False, True, True, False]}
    write_gguf(tmp_path / "source", tmp_path / "m.gguf", **extra)
    with pytest.raises(ModelUnsupported, match="windows in layers"):
        write_folder([tmp_path / "m.gguf"], tmp_path / "folder")
