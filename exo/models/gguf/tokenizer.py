"""The tokenizer inside a GGUF file, written as a Hugging Face tokenizer directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from exo.errors import ModelUnsupported
from exo.models.gguf.pretokenizers import SPLITS, Split

_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(metadata: dict[str, Any], target: Path, config: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json, and the token ids config.json needs.

    Raises:
        ModelUnsupported: a kind of tokenizer or pre-tokenizer that exo does not know.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    if kind == "gpt2":
        split = _split(metadata)
        tokenizer, adds_bos = _byte_level(tokens, split, metadata), split.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(tokens, metadata), True
    elif kind == "gemma4":
        tokenizer, adds_bos = _merged_characters(tokens, metadata), True
    else:
        raise ModelUnsupported(
            f"the GGUF file's tokenizer is {kind!r}; expected gpt2, llama or gemma4"
        )
    types = _list(metadata.get("tokenizer.ggml.token_type")) or [1] * len(tokens)
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    ends = {end: metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos", "eot")}
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and ends["bos"] is not None:
        bos = tokens[ends["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, ends["bos"])],
        )
    tokenizer.save(str(target / "tokenizer.json"))

    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    for role in ("bos", "eos", "unknown", "padding"):
        if (token_id := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            name = {"unknown": "unk", "padding": "pad"}.get(role, role)
            described[f"{name}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        described["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    config["bos_token_id"] = ends["bos"]
    config["eos_token_id"] = sorted({ends["eos"], ends["eot"], *_ends_of_turns(tokens)} - {None})


_TURN_ENDS = (
    "<turn|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
)


def _ends_of_turns(tokens: list[str]) -> list[int]:
    """Tokens with which chat models end an answer, whatever the file calls eos; llama.cpp looks for
    them as well."""
    known = [token for token in _TURN_ENDS if token in tokens]
    return [tokens.index(token) for token in known]


def _split(metadata: dict[str, Any]) -> Split:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in SPLITS:
        raise ModelUnsupported(f"the GGUF file's pre-tokenizer {pre!r} is not known to exo")
    return SPLITS[pre]


def _byte_level(tokens: list[str], split: Split, metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE (GPT-2): vocabulary and merges are in the file."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    except Exception as error:  # the library raises nothing more special
        raise ModelUnsupported(f"the GGUF file's vocabulary is damaged: {error}") from error
    pieces = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pieces, last])
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE (Llama 1 and 2, Mistral): the merges follow from the pieces' scores."""
    scores = _list(metadata["tokenizer.ggml.scores"])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in vocabulary.items():
        known = [
            (a, b)
            for i in range(1, len(token))
            if (a := token[:i]) in vocabulary and (b := token[i:]) in vocabulary
        ]
        if len(known) > 1:
            known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[index], pair) for pair in known]
    merges.sort(key=lambda scored: -scored[0])
    return _of_characters(tokens, [pair for _, pair in merges], metadata)


def _merged_characters(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """The same with its merges in the file (Gemma 4)."""
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        at = merge.index(" ", 1)
        merges.append((merge[:at], merge[at + 1 :]))
    return _of_characters(tokens, merges, {"tokenizer.ggml.add_space_prefix": False, **metadata})


def _of_characters(
    tokens: list[str], merges: list[tuple[str, str]], metadata: dict[str, Any]
) -> Tokenizer:
    """Whole texts, spaces among them, are merged from characters, unknown ones from bytes."""
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[metadata.get("tokenizer.ggml.unknown_token_id") or 0],
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    first = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, spaces])
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _added(tokens: list[str], types: list[int], kind: int, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == kind
    ]


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value.tolist()) if hasattr(value, "tolist") else list(value)
