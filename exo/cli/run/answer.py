"""One answer of a node: its text as it comes, and its numbers at the end."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exo.cli.client import stream_chat
from exo.errors import ExoError

if TYPE_CHECKING:
    from exo.cli.run.display import Display


STOPPED = "stopped"
"""Why an answer ended that the person did not want any more."""


@dataclass
class Answer:
    """What has come of it, all of it or until it was stopped. Seconds are since it was asked for;
    `first_s` is None until text or a thought came."""

    model: str
    text: str = ""
    thoughts: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_s: float | None = None
    seconds: float = 0.0

    @property
    def tok_s(self) -> float | None:
        """Of decoding; None for fewer than two tokens."""
        decoding_s = self.seconds - (self.first_s or 0.0)
        many = self.completion_tokens > 1 and decoding_s > 0
        return (self.completion_tokens - 1) / decoding_s if many else None

    def numbers(self) -> str:
        """One line for the person who asked, empty where there is nothing to tell."""
        if self.finish_reason == STOPPED:
            return "[stopped]\n"
        if self.first_s is None:
            return ""
        speed = f", {self.tok_s:.1f} tok/s" if self.tok_s is not None else ""
        cut = ", cut at the longest answer" if self.finish_reason == "length" else ""
        return f"[{self.completion_tokens} tokens, first after {self.first_s:.2f} s{speed}{cut}]\n"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "model": self.model,
            "content": self.text,
            "reasoning": self.thoughts or None,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds_to_first_token": self.first_s and round(self.first_s, 4),
            "tokens_per_second": self.tok_s and round(self.tok_s, 2),
        }


async def show_answer(url: str, body: dict[str, Any], display: Display, answer: Answer) -> None:
    """Ask the node at `url`, and show and note in `answer` what comes.

    Raises:
        ExoError: what the node answered with; it has been shown.
    """
    began = time.perf_counter()
    try:
        async with contextlib.aclosing(stream_chat(url, body)) as events:
            async for event in events:
                if event.waiting:
                    display.waiting(event.waiting)
                if (event.thought or event.text) and answer.first_s is None:
                    answer.first_s = time.perf_counter() - began
                if event.thought:
                    answer.thoughts += event.thought
                    display.thought(event.thought)
                if event.text:
                    answer.text += event.text
                    display.text(event.text)
                answer.finish_reason = event.finish_reason or answer.finish_reason
                if event.usage is not None:
                    answer.prompt_tokens = event.usage["prompt_tokens"]
                    answer.completion_tokens = event.usage["completion_tokens"]
                    details = event.usage.get("prompt_tokens_details") or {}
                    answer.cached_tokens = details.get("cached_tokens", 0)
    except ExoError as error:
        display.failed(error)
        raise
    except BaseException:  # cancelled: the terminal is given back as it was
        answer.finish_reason = STOPPED
        display.done(answer)
        raise
    answer.seconds = time.perf_counter() - began
    display.done(answer)
