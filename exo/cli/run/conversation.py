"""A conversation of `exo run`, kept in a file as tinychat exports and imports them."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exo import json_text
from exo.errors import InvalidRequest

FORMAT = "tinychat-conversations-1"
"""tinychat/conversations.js: a tree of messages, of which a branch is shown."""

_TITLE = 60


@dataclass
class Conversation:
    """Questions and answers in turn, the system prompt beside them."""

    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """The last question, which was not answered."""
        self.messages.pop()

    def take_back_answer(self) -> str | None:
        """The last one, if there is one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return None
        return self.messages.pop()["content"]

    @property
    def sent(self) -> list[dict[str, str]]:
        """As a chat API is given them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def save(self, path: Path) -> None:
        """Raises InvalidRequest where the file cannot be written."""
        messages: dict[str, dict[str, str | None]] = {}
        head = None
        for index, message in enumerate(self.messages):
            parent, head = head, f"m{index}"
            messages[head] = {"id": head, "parent": parent, **message}
        title = self.messages[0]["content"].strip().split("\n")[0] if self.messages else ""
        conversation = {
            "id": str(uuid.uuid4()),
            "title": title if len(title) <= _TITLE else f"{title[: _TITLE - 3]}…",
            "updated": int(time.time() * 1000),
            "head": head,
            "settings": {"system": self.system} if self.system else {},
            "messages": messages,
        }
        text = json.dumps({"format": FORMAT, "conversations": [conversation]}, indent=1)
        try:
            path.expanduser().write_text(text + "\n", "utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Take over what a file holds, of several conversations the one that was in use last; the
        model stays.

        Raises:
            InvalidRequest: it cannot be read or holds none; nothing has changed.
        """
        try:
            data = json_text.parsed(path.expanduser().read_bytes())
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise InvalidRequest(f"{path} is no JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InvalidRequest(f"{path} is not of the format {FORMAT}: /save or tinychat make it")
        try:
            newest = max(data["conversations"], key=lambda one: one.get("updated", 0))
            messages = _branch(newest)
            system = str(newest.get("settings", {}).get("system", ""))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"{path} holds no whole conversation") from error
        self.messages, self.system = messages, system


def _branch(conversation: dict[str, Any]) -> list[dict[str, str]]:
    """From the first message to the one that is shown last."""
    found: list[dict[str, str]] = []
    at = conversation["head"]
    while at is not None:
        message = conversation["messages"][at]
        if message["role"] not in ("user", "assistant") or len(found) > len(
            conversation["messages"]
        ):
            raise ValueError(at)
        found.append({"role": message["role"], "content": str(message["content"])})
        at = message["parent"]
    return found[::-1]
