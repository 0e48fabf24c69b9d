"""What every dialect turns a request into."""

from __future__ import annotations

from dataclasses import dataclass, field

from exo.inference.sampling import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True)
class ChatDefaults:
    """What a request that does not say gets; of sampling only where the model's own
    generation_config.json does not say either."""

    temperature: float | None = None
    max_tokens: int | None = None
    system_prompt: str | None = None

    def introduced(self, messages: list[Message]) -> list[Message]:
        """A conversation that brings no system prompt begins with the default one."""
        if not self.system_prompt or (messages and messages[0]["role"] == "system"):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. `prompt` is a conversation, a text or token ids; a conversation whose last
    message is the assistant's is gone on with if `continues`. `asked` names the sampling fields
    that the request gave itself. `max_tokens` None means up to the end of the context."""

    model: str
    prompt: list[Message] | str | tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None
    asked: frozenset[str] = field(default=frozenset())
    stop: tuple[str, ...] = field(default=())
    choices: int = 1
    continues: bool = False
    user: str = ""
