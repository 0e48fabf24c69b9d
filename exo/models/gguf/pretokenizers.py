"""How text is split before merging, by `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json; which name means which is llama.cpp's
(src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_HAN_OR_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _HAN_OR_KANA,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER_NOT_HAN, _LOWER_NOT_HAN = f"[{_UPPER}&&[^\\p{{Han}}]]", f"[{_LOWER}&&[^\\p{{Han}}]]"
_KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_JAIS2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+"
    + "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN_OR_KANA,
    _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_TRIPLES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE = (
    _TRIPLES,
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    _DEEPSEEK3[2],
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True)
class Split:
    """`patterns` one after the other, each match a piece of its own; then GPT-2's own pattern if
    `gpt2`. `whole_words`: what is a token as it stands is not merged (ignore_merges)."""

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False


_SPLITS: Mapping[str, Split] = {
    "default gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling"
    " exaone4": Split(gpt2=True),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Split(
        (r"\p{N}",), gpt2=True
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Split(
        (_LLAMA3,), whole_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Split((_LLAMA3,)),
    "glm4 glm5": Split((_LLAMA3,), whole_words=True),
    "qwen2 deepseek-r1-qwen kormo megrez f2llmv2": Split((_QWEN2,), nfc=True),
    "stablelm2 hunyuan solar-open grok-2": Split((_QWEN2,)),
    "qwen35": Split((_QWEN35,)),
    "tekken": Split((_TEKKEN,), whole_words=True),
    "gpt-4o llama4 kanana2 minimax-m2 talkie": Split((_GPT4O,)),
    "seed-coder": Split((_SEED,)),
    "bailingmoe bailingmoe2 llada-moe": Split((_BAILING,)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(_DEEPSEEK3),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "kimi-k2": Split((_KIMI,)),
    "falcon": Split((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": Split((_BLOOM,)),
    "viking": Split((_BLOOM, r"\p{N}")),
    "jais-2": Split((_JAIS2,)),
    "exaone-moe": Split((_EXAONE_MOE,)),
    "youtu": Split(_YOUTU, whole_words=True),
    "afmoe": Split(_AFMOE),
    "tiny_aya cohere2moe": Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "minicpm5": Split((r"\p{N}{1,3}", _LLAMA3.replace(r"{1,3}", "+")), whole_words=True),
    "ufakzeka": Split((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "laguna": Split((r"[^\n]+|[\n]+", _QWEN2)),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
}
SPLITS: Mapping[str, Split] = {
    name: split for names, split in _SPLITS.items() for name in names.split()
}

UNSPLIT = ("gemma4", "sarvam-moe")
"""Texts that are merged whole, from characters instead of bytes."""
