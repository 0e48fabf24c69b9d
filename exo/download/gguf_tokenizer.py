"""The tokenizer inside a GGUF file, written as a Hugging Face tokenizer directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from exo.errors import ModelUnsupported

_CONTROL, _USER_DEFINED = 3, 4

# How text is split before merging, by `tokenizer.ggml.pre`; the patterns are those of the models'
# own tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(metadata: dict[str, Any], target: Path, config: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json, and the token ids config.json needs.

    Raises:
        ModelUnsupported: a kind of tokenizer or pre-tokenizer that exo does not know.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, metadata)
    else:
        raise ModelUnsupported(f"the GGUF file's tokenizer is {kind!r}; expected gpt2 or llama")
    types = _list(metadata.get("tokenizer.ggml.token_type")) or [1] * len(tokens)
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    tokenizer.save(str(target / "tokenizer.json"))

    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    for role in ("bos", "eos", "unknown", "padding"):
        if (token_id := _scalar(metadata.get(f"tokenizer.ggml.{role}_token_id"))) is not None:
            name = {"unknown": "unk", "padding": "pad"}.get(role, role)
            described[f"{name}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        described["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    config["bos_token_id"] = _scalar(metadata.get("tokenizer.ggml.bos_token_id"))
    ends = {_scalar(metadata.get(f"tokenizer.ggml.{end}_token_id")) for end in ("eos", "eot")}
    config["eos_token_id"] = sorted(ends - {None})


def _byte_level(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE (GPT-2): vocabulary and merges are in the file."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises nothing more special
        raise ModelUnsupported(f"the GGUF file's vocabulary is damaged: {error}") from error
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif pre in ("llama-bpe", "qwen2"):
        pattern = _LLAMA3 if pre == "llama-bpe" else _QWEN2
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise ModelUnsupported(f"the GGUF file's pre-tokenizer {pre!r} is not known to exo")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE (Llama 1 and 2, Mistral): the merges follow from the pieces' scores."""
    scores = _list(metadata["tokenizer.ggml.scores"])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in vocabulary.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in halves if a in vocabulary and b in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[index], pair) for pair in known]
    merges.sort(key=lambda scored: -scored[0])
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=[pair for _, pair in merges],
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[_scalar(metadata.get("tokenizer.ggml.unknown_token_id")) or 0],
        )
    )
    prefix = bool(_scalar(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if prefix else "never", split=False
    )
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


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
