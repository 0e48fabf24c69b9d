"""The kinds of tokenizer a GGUF file may hold, made of its vocabulary."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from exo.models.gguf.pretokenizers import Split

_NORMAL = 1
"""The type of a token that is neither special nor a byte."""


def byte_level(tokens: list[str], split: Split, metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE (GPT-2): vocabulary and merges are in the file."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    pieces = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pieces, last])
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece BPE (Llama 1 and 2, Mistral): the merges follow from the pieces' scores."""
    scores = as_list(metadata["tokenizer.ggml.scores"])
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


def merged_characters(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
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


def word_piece(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """WordPiece (BERT). The file marks where words begin, the library where they go on
    (`set_vocab` of llama.cpp's conversion/bert.py does the opposite)."""
    types = as_list(metadata.get("tokenizer.ggml.token_type")) or [_NORMAL] * len(tokens)

    def own(token: str, kind: int) -> str:
        if token.startswith("▁"):
            return token.removeprefix("▁")
        return f"##{token}" if kind == _NORMAL else token

    vocabulary = {own(*pair): i for i, pair in enumerate(zip(tokens, types, strict=True))}
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(WordPiece(vocab=vocabulary, unk_token=unknown))
    lowers = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=lowers)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece Unigram (T5): pieces with scores, and a table of how characters are written."""
    scores = as_list(metadata["tokenizer.ggml.scores"])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown))
    steps: list[normalizers.Normalizer] = []
    charsmap = as_list(metadata.get("tokenizer.ggml.precompiled_charsmap"))
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    prefix = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    return tokenizer


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value.tolist()) if hasattr(value, "tolist") else list(value)
