"""Tokenizers of the kinds that GGUF files have, against what the same vocabulary gives in the form
its makers publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram, WordPiece

from exo.errors import ModelUnsupported
from exo.models.gguf.pretokenizers import SPLITS
from exo.models.gguf.tokenizer import write_tokenizer
from exo.models.tokenizer import load_tokenizer

TEXTS = [
    "Hello World",
    "unhappily  HELLO",
    "café résumé",
    "a b\tc",
    "",
    " lead",
    "new\nline",
    "ﬁne",
]
NORMAL, UNKNOWN, CONTROL = 1, 2, 3


def written(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    write_tokenizer(metadata, folder, {"max_position_embeddings": 512})
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_word_pieces(tmp_path: Path) -> None:
    """BERT's. In the file a piece that begins a word has a ▁ before it, and one that goes on has
    lost its ##."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "un", "##hap", "##pi", "##ly", "cafe"]
    pieces += ["resume", "a", "b", "c", "lead", "new", "line", "##e", "fine"]
    own = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    own.normalizer = normalizers.BertNormalizer()
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    own.decoder = decoders.WordPiece()
    own.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    own.add_special_tokens(["[CLS]", "[SEP]"])

    def stored(piece: str) -> str:
        if piece.startswith("["):
            return piece
        return piece.removeprefix("##") if piece.startswith("##") else f"▁{piece}"

    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [stored(piece) for piece in pieces],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [NORMAL] * (len(pieces) - 3),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 2,
    }
    found = written(metadata, tmp_path)
    for text in TEXTS:
        assert found.encode(text).ids == own.encode(text).ids, text
    assert found.decode(found.encode("unhappily hello").ids) == "unhappily hello"
    assert found.encode("Hello").tokens == ["[CLS]", "hello", "[SEP]"]


def test_unigrams(tmp_path: Path) -> None:
    """T5's: the likeliest way to cut a text into pieces."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁Hello", -3.0)]
    pieces += [("▁World", -4.0), ("▁un", -5.0), ("happi", -5.5), ("ly", -4.5), ("▁a", -3.5)]
    pieces += [(letter, -8.0) for letter in "abcdefghijklmnopqrstuvwxyzHELOW"]
    own = Tokenizer(Unigram(pieces, unk_id=2))
    own.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace("  ", " ")])
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    own.add_special_tokens(["<pad>", "</s>"])
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(pieces) - 3),
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    found = written(metadata, tmp_path)
    for text in TEXTS[:2] + TEXTS[3:6]:
        assert found.encode(text).ids == own.encode(text).ids, text
    assert found.encode("unhappily Hello").tokens == ["▁un", "happi", "ly", "▁Hello", "</s>"]
    assert found.decode(found.encode("unhappily Hello").ids) == "unhappily Hello"


def test_every_split_gives_back_what_it_was_given(tmp_path: Path) -> None:
    """No pattern loses a character or is none: the merges decide the rest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 0,
    }
    text = "Don't  stop 12345 times\n\n我们 happy! ʼn\t東京 x=1; ２３ — fin ?! 3.14 über\r\n"
    for pre in SPLITS:
        found = written({**metadata, "tokenizer.ggml.pre": pre}, tmp_path)
        assert found.decode(found.encode(text, add_special_tokens=False).ids) == text, pre


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("falcon", "abc+12345", ["abc", "+", "123", "45"]),
        ("kimi-k2", "中文abc 1234", ["中文", "abc", " ", "123", "4"]),
        ("deepseek-llm", "Hi 12\nx", ["Hi", " ", "1", "2", "\n", "x"]),
        ("afmoe", "12345 abc", ["12", "345", " abc"]),
        ("bloom", "a, b(c) d.", ["a", ",", " b", "(", "c", ")", " d", "."]),
        ("viking", "ab 12", ["ab", " ", "1", "2"]),
        ("minicpm5", "a1234", ["a", "123", "4"]),
    ],
)
def test_where_a_text_is_cut(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    """By what the makers' tokenizer.json says: patterns one after the other, each match apart."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(pre_tokenizers.ByteLevel.alphabet()),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = written(metadata, tmp_path)
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


def test_a_kind_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="'rwkv'; expected gpt2, llama, gemma4, bert or t5"):
        written({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, tmp_path)


def test_a_prompt_does_not_end_before_the_model_wrote(tmp_path: Path) -> None:
    """Some files say of chat models that each text ends in a token, as it did in training."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    assert written(metadata, tmp_path).encode("a").tokens == ["<s>", "a"]


@pytest.mark.parametrize("merges", [["a b"], ["a c"], ["a"]])
def test_merges_of_no_vocabulary_are_an_error(merges: list[str], tmp_path: Path) -> None:
    """The library panics at the first: a token that is merged is none."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": merges,
    }
    with pytest.raises(ModelUnsupported, match="vocabulary is damaged"):
        written(metadata, tmp_path)


def test_a_tokenizer_json_that_makes_the_library_panic_is_an_error(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(ModelUnsupported, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer("llama", tmp_path)
