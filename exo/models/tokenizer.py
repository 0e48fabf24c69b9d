"""Text to token ids and back: chat template in, valid UTF-8 out whatever the token borders."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exo.errors import InvalidRequest, ModelUnsupported
from exo.models.description import read_config, text_config


class Tokenizer(ABC):
    """What the API needs of a tokenizer."""

    eos_token_ids: frozenset[int]

    @abstractmethod
    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant begins to answer.

        Raises:
            InvalidRequest: the model's chat template refuses the conversation.
        """

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens without special ones; U+FFFD where bytes are incomplete."""

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own."""
        return self.decode([token_id])


class HFTokenizer(Tokenizer):
    """The checkpoint's own tokenizer, through `transformers`.

    Raises:
        ModelUnsupported: there is none, or it would need code from the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        # Says at import that PyTorch is missing; nothing here needs it.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                path, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelUnsupported(f"the tokenizer in {path} cannot be loaded: {error}") from error
        self.eos_token_ids = _eos_token_ids(path, self._tokenizer)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        import jinja2

        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template: it is not a chat model")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class ByteTokenizer(Tokenizer):
    """One token a byte, for the dummy engine."""

    eos_token_ids = frozenset({257})

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return [256, *text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")


class TextStream:
    """Turns tokens into text piece by piece.

    A token may end in the middle of a character, and some tokenizers write a token differently
    after another one, so each piece is the difference between two decodings that begin at the same
    earlier token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._context = 0  # decodings begin here
        self._given = 0  # text up to this token has been given out

    def add(self, token_id: int) -> str:
        """The text that is complete now; empty while a character is unfinished."""
        self._token_ids.append(token_id)
        before, now = self._decodings()
        if now.endswith("\ufffd"):
            return ""
        self._context, self._given = self._given, len(self._token_ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What is left, an unfinished character as U+FFFD."""
        before, now = self._decodings()
        self._context = self._given = len(self._token_ids)
        return now[len(before) :]

    def _decodings(self) -> tuple[str, str]:
        return (
            self._tokenizer.decode(self._token_ids[self._context : self._given]),
            self._tokenizer.decode(self._token_ids[self._context :]),
        )


def load_tokenizer(model_type: str, path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint; slow the first time (imports `transformers`)."""
    return ByteTokenizer() if model_type == "dummy" else HFTokenizer(path)


def _eos_token_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """All tokens that end an answer: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    sources = [text_config(read_config(path)).get("eos_token_id"), tokenizer.eos_token_id]
    generation = path / "generation_config.json"
    if generation.is_file():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    for source in sources:
        found.update(source if isinstance(source, list) else [] if source is None else [source])
    return frozenset(int(i) for i in found)
