"""What every dialect turns a request into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exo.inference.sampling import SamplingParams
from exo.models.markup.tools import Tool, ToolChoice

Message = dict[str, Any]
"""As chat templates have it: role, content, and where there are any tool_calls (with arguments as
objects), tool_call_id, name, reasoning_content."""

MAX_CHOICES = 16


@dataclass(frozen=True)
class ChatDefaults:
    """What a request that does not say gets; of sampling only where the model's own
    generation_config.json does not say either. `aliases`: models by further names."""

    temperature: float | None = None
    max_tokens: int | None = None
    system_prompt: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def introduced(self, messages: list[Message]) -> list[Message]:
        """A conversation that brings no system prompt begins with the default one."""
        if not self.system_prompt or (messages and messages[0]["role"] == "system"):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def model(self, name: str) -> str:
        """What is meant by a model's name."""
        return self.aliases.get(name, name)


@dataclass(frozen=True)
class Thinking:
    """Whether the model is to think before it answers, None as it likes; `budget` limits the tokens
    of that, `effort` is what its template makes of it."""

    wanted: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. `prompt` is a conversation, a text or token ids; a conversation whose last
    message is the assistant's is gone on with if `continues`. `asked` names the sampling fields
    that the request gave itself. `max_tokens` None means up to the end of the context.

    `grammar` holds the answer to a format (models/grammar.py). `template` is given to the chat
    template. `ends`: tokens that end the answer besides the model's own, which are none if
    `ignores_end`. Without `shortcuts` every token is computed, for those who measure or compare.
    `truncates`: a conversation that is too long loses its oldest messages."""

    model: str
    prompt: list[Message] | str | tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None = None
    asked: frozenset[str] = field(default=frozenset())
    stop: tuple[str, ...] = field(default=())
    choices: int = 1
    continues: bool = False
    user: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    grammar: str | None = None
    thinking: Thinking = field(default_factory=Thinking)
    template: Mapping[str, Any] = field(default_factory=dict)
    ends: frozenset[int] = field(default=frozenset())
    ignores_end: bool = False
    shortcuts: bool = True
    truncates: bool = False
    shows_special: bool = False
