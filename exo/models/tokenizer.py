"""Text to token ids and back: chat template in, valid UTF-8 out whatever the token borders."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exo import json_text
from exo.errors import InvalidRequest, ModelUnsupported
from exo.models.description import read_config, text_config
from exo.models.markup.markup import Markup, markup_of
from exo.models.panics import panics_are_errors

if TYPE_CHECKING:
    import tokenizers

    from exo.models.grammar import Vocabulary


class Tokenizer(ABC):
    """What the API needs of a tokenizer."""

    eos_token_ids: frozenset[int]
    vocabulary_size: int
    """Token ids are smaller than this."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text as a prompt of its own; special tokens in it are those tokens."""

    @abstractmethod
    def render(
        self, messages: list[dict[str, Any]], *, continues: bool = False, **options: Any
    ) -> str:
        """The text of a conversation up to where the assistant begins to answer, or with
        `continues` where its last message, the assistant's, goes on. `options` are the template's.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the conversation.
        """

    @abstractmethod
    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what `render` wrote, special tokens and all."""

    def encode_chat(self, messages: list[dict[str, Any]], *, continues: bool = False) -> list[int]:
        """Token ids of a conversation. Raises as `render` does."""
        return self.encode_rendered(self.render(messages, continues=continues))

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens without special ones; U+FFFD where bytes are incomplete."""

    markup: Markup
    """How the model marks thoughts and calls of tools."""

    is_for_chat = True
    """Whether there is a chat template; else `render` refuses."""

    added_tokens: Mapping[str, int]
    """Ids of the tokens that were added to the vocabulary, by their text."""

    special_tokens: Mapping[str, int]
    """Those of them that are no text."""

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The tokens as grammars see them; made when first asked for, which takes a moment."""

    @abstractmethod
    def tokens(self) -> Mapping[str, int]:
        """The ids of all tokens, by what the tokenizer calls them."""

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own."""
        return self.decode([token_id])


class HFTokenizer(Tokenizer):
    """The checkpoint's own tokenizer.

    Raises:
        ModelUnsupported: there is none, or it would need code from the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        from exo.models.chat_template import ChatTemplate, find_template  # late: imports jinja2

        config = _json(path / "tokenizer_config.json")
        self._backend = _backend(path, config)
        special = _special_tokens(path, config)
        template = find_template(path, config)
        self._template = ChatTemplate(template, special) if template is not None else None
        self.is_for_chat = template is not None
        self.eos_token_ids = _eos_token_ids(path, self._backend.token_to_id(special["eos_token"]))
        self.vocabulary_size = max(self._backend.get_vocab().values(), default=-1) + 1
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.added_tokens = {token.content: i for i, token in added.items()}
        self.markup = markup_of(template or "", self.special_tokens, self.added_tokens)

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def render(
        self, messages: list[dict[str, Any]], *, continues: bool = False, **options: Any
    ) -> str:
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: it is not a chat model, and can be asked for "
                "completions",
                param="model",
            )
        return self._template.render(messages, continues=continues, **options)

    def encode_rendered(self, text: str) -> list[int]:
        # The template has written the special tokens that it wants.
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def tokens(self) -> Mapping[str, int]:
        return dict(self._backend.get_vocab())

    @cached_property
    def vocabulary(self) -> Vocabulary:
        from exo.models.grammar import Vocabulary

        return Vocabulary(self._backend.to_str(), self.vocabulary_size, [*self.eos_token_ids])


class ByteTokenizer(Tokenizer):
    """One token a byte, for the dummy engine."""

    eos_token_ids = frozenset({257})
    vocabulary_size = 258
    markup = markup_of("<think></think>", {}, {})
    added_tokens: Mapping[str, int] = {}
    special_tokens = added_tokens

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def render(
        self, messages: list[dict[str, Any]], *, continues: bool = False, **options: Any
    ) -> str:
        text = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        return text if continues else text + "\n"

    def encode_rendered(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")

    def tokens(self) -> Mapping[str, int]:
        return {str(number): number for number in range(self.vocabulary_size)}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        from exo.models.grammar import Vocabulary

        tokens = [*(bytes([i]) for i in range(256)), b"<begin>", b"<end>"]
        return Vocabulary(tokens, self.vocabulary_size, [*self.eos_token_ids])


class TextStream:
    """Turns tokens into text piece by piece.

    A token may end in the middle of a character, and some tokenizers write a token differently
    after another one, so each piece is the difference between two decodings that begin at the same
    earlier token.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, str] | None = None) -> None:
        """`shown`: special tokens that are part of the text all the same."""
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._token_ids: list[int] = []
        self._context = 0  # decodings begin here
        self._given = 0  # text up to this token has been given out

    def add(self, token_id: int) -> str:
        """The text that is complete now; empty while a character is unfinished."""
        if token_id in self._shown:
            return self.finish() + self._shown[token_id]
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
    """The tokenizer of a checkpoint; the API and the engine of a process share it."""
    if model_type == "dummy":
        return ByteTokenizer()
    file = path / "tokenizer.json"
    return _load(path, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=8)
def _load(path: Path, changed_ns: int) -> Tokenizer:
    return HFTokenizer(path)


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file.

    Raises:
        ModelUnsupported: it is no JSON object.
    """
    try:
        return json_text.object_in(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{file} cannot be read: {error}") from error


def _backend(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """tokenizer.json, which nearly every checkpoint has; else what `transformers`, whose import
    takes a second, makes of the files of older kinds."""
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        return _converted(path)
    try:
        with panics_are_errors():
            # Not by its path, which may not be UTF-8.
            found = tokenizers.Tokenizer.from_str(file.read_text("utf-8"))
    except Exception as error:  # the library raises nothing more special
        raise ModelUnsupported(f"the tokenizer in {path} cannot be loaded: {error}") from error
    # Tokens that were added to the checkpoint later and only to its configuration.
    for number, token in sorted(config.get("added_tokens_decoder", {}).items(), key=_by_number):
        if found.id_to_token(int(number)) is None:
            added = tokenizers.AddedToken(
                token["content"], normalized=False, special=bool(token.get("special"))
            )
            found.add_tokens([added])
    return found


def _by_number(entry: tuple[str, Any]) -> int:
    return int(entry[0])


def _converted(path: Path) -> tokenizers.Tokenizer:
    # Says at import that PyTorch is missing; nothing here needs it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import tokenizers
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelUnsupported(f"the tokenizer in {path} cannot be loaded: {error}") from error
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelUnsupported(f"the tokenizer in {path} is of a kind that exo does not read")
    return backend


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Texts of the tokens with a role, like bos_token; templates name them. The end is always
    among them, as "" where there is none."""
    found = {"eos_token": ""}
    for source in (_json(path / "special_tokens_map.json"), config):
        for role, token in source.items():
            if role.endswith("_token") and token:
                text = token.get("content") if isinstance(token, dict) else token
                if isinstance(text, str):
                    found[role] = text
    return found


def _eos_token_ids(path: Path, own: int | None) -> frozenset[int]:
    """All tokens that end an answer: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    generation = _json(path / "generation_config.json")
    sources = [text_config(read_config(path)), generation]
    for source in [own, *(source.get("eos_token_id") for source in sources)]:
        found.update(source if isinstance(source, list) else [] if source is None else [source])
    return frozenset(int(i) for i in found)
