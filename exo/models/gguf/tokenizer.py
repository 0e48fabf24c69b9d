"""The tokenizer inside a GGUF file, written as a Hugging Face tokenizer directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from exo.errors import ModelUnsupported
from exo.models.gguf.pretokenizers import SPLITS, UNSPLIT
from exo.models.gguf.vocabularies import (
    as_list,
    byte_level,
    merged_characters,
    sentencepiece,
    unigram,
    word_piece,
)
from exo.models.panics import panics_are_errors

_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(metadata: dict[str, Any], target: Path, config: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json, and the token ids config.json needs.

    Raises:
        ModelUnsupported: a kind of tokenizer or pre-tokenizer that exo does not know.
    """
    tokens = list(metadata["tokenizer.ggml.tokens"])
    try:
        with panics_are_errors():
            tokenizer, begins, ends = _tokenizer(tokens, metadata)
    except ModelUnsupported:
        raise
    except KeyError as error:
        raise ModelUnsupported(f"the GGUF file has no {error.args[0]}") from error
    except Exception as error:  # the library raises nothing more special
        raise ModelUnsupported(f"the GGUF file's vocabulary is damaged: {error}") from error
    types = as_list(metadata.get("tokenizer.ggml.token_type")) or [1] * len(tokens)
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    _add_ends(tokenizer, tokens, metadata, begins=begins, ends=ends)
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
    stops = {metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")}
    stops |= set(as_list(metadata.get("tokenizer.ggml.eos_token_ids")))  # Ollama's
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = sorted({*stops, *_ends_of_turns(tokens)} - {None})


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


def _tokenizer(tokens: list[str], metadata: dict[str, Any]) -> tuple[Tokenizer, bool, bool]:
    """Without its special tokens; whether a text begins with one, and ends with one, where the file
    does not say."""
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    match kind := metadata.get("tokenizer.ggml.model"):
        case "gpt2" if pre in UNSPLIT:
            return merged_characters(tokens, metadata), True, False
        case "gpt2":
            if pre not in SPLITS:
                raise ModelUnsupported(f"the GGUF file's pre-tokenizer {pre!r} is not known to exo")
            return byte_level(tokens, SPLITS[pre], metadata), SPLITS[pre].adds_bos, False
        case "llama":
            return sentencepiece(tokens, metadata), True, False
        case "gemma4":
            return merged_characters(tokens, metadata), True, False
        case "bert":
            return word_piece(tokens, metadata), True, True
        case "t5":
            return unigram(tokens, metadata), False, True
    raise ModelUnsupported(
        f"the GGUF file's tokenizer is {kind!r}; expected gpt2, llama, gemma4, bert or t5"
    )


def _add_ends(
    tokenizer: Tokenizer,
    tokens: list[str],
    metadata: dict[str, Any],
    *,
    begins: bool,
    ends: bool,
) -> None:
    """What stands before and after every text."""

    def special(roles: tuple[str, ...], key: str, usual: bool) -> int | None:
        ids = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in roles)
        found = next((token_id for token_id in ids if token_id is not None), None)
        return found if metadata.get(f"tokenizer.ggml.add_{key}_token", usual) else None

    first = special(("bos", "cls"), "bos", begins)
    # The key is llama.cpp's, spelled so.
    # Said of a model that writes, it would end what is to be continued.
    last = special(("seperator", "eos") if begins else ("eos",), "eos", True) if ends else None
    known = {tokens[token_id]: token_id for token_id in (first, last) if token_id is not None}
    if not known:
        return

    def around(text: str, part: int) -> str:
        pieces = [first, text, last]
        named = [tokens[p] if isinstance(p, int) else p for p in pieces if p is not None]
        return " ".join(f"{piece}:{part}" for piece in named)

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A", 0),
        pair=f"{around('$A', 0)} {around('$B', 1)}",
        special_tokens=list(known.items()),
    )


def _added(tokens: list[str], types: list[int], kind: int, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == kind
    ]
