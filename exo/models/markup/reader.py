"""An answer's text, as it comes, parted into what is said, thought and called."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from exo.models.markup.call_format import CallFormat, CallStyle
from exo.models.markup.tools import Tool, ToolCall, tool_call


@dataclass(frozen=True)
class Said:
    text: str


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class CallBegun:
    """The answer's next call, of the tool `name`."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of the call begun last; all of them together are JSON."""

    text: str


Part = Said | Thought | CallBegun | CallArguments


class AnswerReader(ABC):
    """Reads one answer."""

    @abstractmethod
    def add(self, text: str) -> list[Part]:
        """What is certain now."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """The answer is over: what is left."""


class PlainReader(AnswerReader):
    """Everything is said."""

    def add(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class TaggedReader(AnswerReader):
    """Thoughts and calls between markers in the text.

    `thinking`: what opens and closes thoughts, which the prompt has opened already if `thinks`.
    `enforced`: a grammar holds the calls to the format's style, so that arguments are passed on as
    they come; else a call is told whole, and one that cannot be read stays text.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None,
        calls: CallFormat | None,
        tools: Sequence[Tool],
        *,
        thinks: bool = False,
        enforced: bool = False,
    ) -> None:
        self._thinking = thinking
        self._calls = calls if tools else None
        self._tools = tools
        self._streams = enforced and calls is not None and calls.style.streams
        self._in: str = "thought" if thinks else "said"
        self._held = ""
        self._first = True
        """Nothing but space has been said or thought in this state yet."""
        self._call: _StreamedCalls | None = None

    def add(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts = self.add("")
        rest, self._held = self._held, ""
        if self._in == "calls":
            if self._call is not None:
                return parts
            assert self._calls is not None
            return [*parts, *self._read_calls(rest, "")]
        return [*parts, *self._shown(rest)]

    def _step(self, parts: list[Part]) -> bool:
        """Go on by one marker; False where more text is needed."""
        if self._in == "calls":
            return self._step_in_calls(parts)
        markers = self._markers()
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if not found:
            certain = len(self._held) - begun(self._held, markers)
            if self._calls is not None or self._in == "thought":
                # Space before a marker belongs to nobody: it waits for what follows.
                certain = len(self._held[:certain].rstrip())
            parts += self._shown(self._held[:certain])
            self._held = self._held[certain:]
            return False
        at, marker = min(found, key=lambda one: (one[0], -len(one[1])))
        before, self._held = self._held[:at], self._held[at + len(marker) :]
        opens_calls = self._calls is not None and marker == self._calls.opens
        parts += self._shown(before.rstrip() if self._in == "thought" or opens_calls else before)
        if opens_calls:
            self._in = "calls"
            if self._streams:
                assert self._calls is not None
                self._call = _StreamedCalls(self._calls.style)
        else:
            self._in = "said" if self._in == "thought" else "thought"
        self._first = True
        return True

    def _markers(self) -> list[str]:
        found = []
        if self._thinking is not None:
            found.append(self._thinking[self._in == "thought"])
        if self._calls is not None and self._in == "said":
            found.append(self._calls.opens)
        return found

    def _step_in_calls(self, parts: list[Part]) -> bool:
        assert self._calls is not None
        closes = self._calls.closes
        if self._call is not None:
            parts += self._call.add(self._held)
            self._held = self._call.rest
            at = self._held.find(closes) if closes and self._call.between_calls else -1
            if at < 0:
                return False
            self._held, self._call = self._held[at + len(closes) :], None
        else:
            at = self._held.find(closes) if closes else -1
            if at < 0:
                return False
            inside, self._held = self._held[:at], self._held[at + len(closes) :]
            parts += self._read_calls(inside, closes)
        self._in, self._first = "said", True
        return True

    def _read_calls(self, inside: str, closes: str) -> list[Part]:
        assert self._calls is not None
        try:
            calls = self._calls.parse(inside, self._tools)
        except (ValueError, RecursionError):  # the latter of mlx-lm's parsers
            self._in = "said"
            return self._shown(self._calls.opens + inside + closes)
        return [part for call in calls for part in _told(call)]

    def _shown(self, text: str) -> list[Part]:
        if self._first:  # templates put line breaks after markers, which nobody means
            text = text.lstrip() if self._thinking or self._calls else text
            self._first = not text
        if not text:
            return []
        return [Thought(text) if self._in == "thought" else Said(text)]


def _told(call: ToolCall) -> list[Part]:
    return [CallBegun(call.name), CallArguments(call.arguments)]


def begun(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of `text` that begins one of `markers` and is less than it."""
    for length in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0


class _StreamedCalls:
    """Calls in exactly a style: the name once it is there, then the arguments as they come.
    `rest` is what came after the last call that has ended."""

    def __init__(self, style: CallStyle) -> None:
        self._style = style
        self.rest = ""
        self.between_calls = False
        self._json: _JsonEnd | None = None

    def add(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self.rest = text
        while True:
            if self._json is None:
                begins = self.rest.find(self._style.before)
                ends = self.rest.find(self._style.middle, begins + len(self._style.before))
                if begins < 0 or ends < 0:
                    return parts
                parts.append(CallBegun(self.rest[begins + len(self._style.before) : ends].strip()))
                self.rest = self.rest[ends + len(self._style.middle) :]
                self._json, self.between_calls = _JsonEnd(), False
            length, ended = self._json.add(self.rest)
            if length:
                parts.append(CallArguments(self.rest[:length]))
            self.rest = self.rest[length:]
            if not ended:
                return parts
            self._json, self.between_calls = None, True


class _JsonEnd:
    """Where a JSON object, that comes in pieces, ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._escaped = False

    def add(self, text: str) -> tuple[int, bool]:
        """How many characters belong to it, and whether it has ended."""
        for i, letter in enumerate(text):
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_text = False
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1, True
        return len(text), False


_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyReader(AnswerReader):
    """gpt-oss: messages in channels, each with a header.

    Format: https://cookbook.openai.com/articles/openai-harmony
    """

    markers = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._held = ""
        self._header: str | None = ""  # None: in a message's body
        self._kind: type[Said] | type[Thought] | str = Said
        self._arguments = ""

    def add(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            wanted = ["<|message|>"] if self._header is not None else self._ends
            found = [(at, m) for m in wanted if (at := self._held.find(m)) >= 0]
            at, marker = min(found, default=(len(self._held) - begun(self._held, wanted), ""))
            self._take(self._held[:at], parts)
            self._held = self._held[at + len(marker) :]
            if not marker:
                return parts
            if self._header is not None:
                self._begin_body()
            else:
                self._end_body(parts)

    def finish(self) -> list[Part]:
        parts = self.add("")
        self._take(self._held, parts)
        self._held = ""
        if self._header is None:
            self._end_body(parts)
        return parts

    @property
    def _ends(self) -> list[str]:
        return ["<|end|>", "<|call|>", "<|return|>", "<|start|>"]

    def _take(self, text: str, parts: list[Part]) -> None:
        if self._header is not None:
            self._header += text
        elif isinstance(self._kind, str):
            self._arguments += text
        elif text:
            parts.append(self._kind(text))

    def _begin_body(self) -> None:
        header, self._header = self._header or "", None
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._kind, self._arguments = recipient[1], ""
        else:
            self._kind = Thought if "analysis" in header else Said

    def _end_body(self, parts: list[Part]) -> None:
        if isinstance(self._kind, str):
            try:
                parts += _told(tool_call(self._kind, self._arguments, self._tools))
            except ValueError:
                parts.append(Said(self._arguments))
        self._header, self._kind = "", Said
