"""A conversation in the terminal: history, several lines, and what begins with a slash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from exo.cli.run.answer import Answer, show_answer
from exo.cli.run.conversation import Conversation
from exo.cli.run.display import Display, say
from exo.cli.run.question import attached
from exo.cli.settings import home
from exo.errors import ExoError, InvalidRequest
from exo.models.card import registry, resolve

_HISTORY = "run_history"


class Chat:
    """`body` is what every request has beside model and messages, `files` go with the first
    question."""

    def __init__(
        self,
        url: str,
        model: str,
        body: dict[str, Any],
        display: Display,
        system: str | None,
        files: list[Path],
    ) -> None:
        self._url = url
        self._body = body
        self._display = display
        self._conversation = Conversation(model, system or "")
        self._files = [attached(path) for path in files]
        self._answers: list[Answer] = []
        self._over = False
        self._commands: dict[str, tuple[str, str, Callable[[str], object]]] = {
            "help": ("", "this list", lambda _: self._help()),
            "model": ("NAME", "another model from now on", self._set_model),
            "system": ("TEXT", "a system prompt; without TEXT none", self._set_system),
            "file": ("FILE", "a text file that goes with the next question", self._attach),
            "regen": ("", "answer the last question again", lambda _: self._regenerate()),
            "save": ("FILE", "write the conversation, for /load and tinychat's import", self._save),
            "load": ("FILE", "go on with one that was saved or exported", self._load),
            "new": ("", "forget the conversation", lambda _: self._forget()),
            "stats": ("", "model, tokens and speed of this conversation", lambda _: self._stats()),
            "quit": ("", "so does Ctrl-D", lambda _: self._end()),
        }

    async def talk(self) -> int:
        """Until the person ends it."""
        say(f"{self._conversation.model} · /help lists commands, Ctrl-D ends\n")
        prompt: PromptSession[str] = PromptSession(
            history=_history(),
            output=create_output(always_prefer_tty=True),  # answers may go to a file
            completer=_Commands(self._commands),
            complete_while_typing=False,
            key_bindings=_keys(),
            prompt_continuation="… ",
        )
        while not self._over:
            try:
                typed = (await prompt.prompt_async("› ", handle_sigint=False)).strip()
            except EOFError:
                break
            except KeyboardInterrupt:  # of a line that is not wanted any more
                continue
            try:
                if typed.startswith("/"):
                    await self._command(typed[1:])
                elif typed:
                    await self._ask(typed)
            except ExoError as error:
                say(f"exo: {error.message}\n")
        return 0

    async def _command(self, typed: str) -> None:
        name, _, rest = typed.partition(" ")
        if name not in self._commands:
            raise InvalidRequest(f"there is no /{name}: /help lists what there is")
        argument, _, act = self._commands[name]
        if argument and not rest.strip() and name != "system":
            raise InvalidRequest(f"/{name} needs a {argument}")
        done = act(rest.strip())
        if asyncio.iscoroutine(done):
            await done

    async def _ask(self, question: str) -> None:
        self._conversation.ask("\n\n".join([question, *self._files]))
        if await self._answer():
            self._files = []
        else:
            self._conversation.take_back()

    async def _answer(self) -> bool:
        """To the last question: whether anything came. Ctrl-C stops it, and what came stands."""
        talk, answer = self._conversation, Answer(self._conversation.model)
        body = self._body | {"model": talk.model, "messages": talk.sent}
        answering = asyncio.ensure_future(show_answer(self._url, body, self._display, answer))
        me, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert me is not None
        loop.add_signal_handler(signal.SIGINT, answering.cancel)
        try:
            await asyncio.wait([answering])
        finally:
            loop.add_signal_handler(signal.SIGINT, me.cancel)
            answering.cancel()
            with contextlib.suppress(ExoError, asyncio.CancelledError):  # both have been shown
                await answering
        if not answer.text:
            return False
        talk.answer(answer.text)
        self._answers.append(answer)
        return True

    # What begins with a slash -------------------------------------------------------------------

    def _help(self) -> None:
        width = max(len(f"{name} {argument}") for name, (argument, _, _) in self._commands.items())
        for name, (argument, what, _) in self._commands.items():
            say(f"  /{f'{name} {argument}':{width}}  {what}\n")
        say("  Alt-Enter begins a new line, Ctrl-C stops an answer, ↑ brings back earlier lines\n")

    def _set_model(self, name: str) -> None:
        resolve(name)
        self._conversation.model = name
        say(f"[{name} answers from now on]\n")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text
        say("[system prompt set]\n" if text else "[no system prompt]\n")

    def _attach(self, name: str) -> None:
        self._files.append(attached(Path(name)))
        say(f"[{name} goes with the next question]\n")

    async def _regenerate(self) -> None:
        earlier = self._conversation.take_back_answer()
        if earlier is None:
            raise InvalidRequest("there is no answer yet")
        if not await self._answer():
            self._conversation.answer(earlier)

    def _save(self, name: str) -> None:
        self._conversation.save(Path(name))
        say(f"[{len(self._conversation.messages)} messages in {name}]\n")

    def _load(self, name: str) -> None:
        self._conversation.load(Path(name))
        say(f"[{len(self._conversation.messages)} messages from {name}]\n")

    def _forget(self) -> None:
        self._conversation.messages.clear()
        self._files, self._answers = [], []
        say("[a new conversation]\n")

    def _stats(self) -> None:
        say(f"  model     {self._conversation.model}\n")
        say(f"  messages  {len(self._conversation.messages)}\n")
        if not self._answers:
            return
        last = self._answers[-1]
        context = last.prompt_tokens + last.completion_tokens
        say(f"  context   {context} tokens, {last.cached_tokens} of them computed before\n")
        say(f"  written   {sum(one.completion_tokens for one in self._answers)} tokens\n")
        if speeds := [one.tok_s for one in self._answers if one.tok_s is not None]:
            say(f"  speed     {speeds[-1]:.1f} tok/s, at best {max(speeds):.1f}\n")

    def _end(self) -> None:
        self._over = True


class _Commands(Completer):
    """Commands, and names of models after /model."""

    def __init__(self, commands: dict[str, Any]) -> None:
        self._names = [f"/{name}" for name in commands]

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Of what stands before the cursor."""
        typed = document.text_before_cursor
        before, word = ("/model ", typed[7:]) if typed.startswith("/model ") else ("", typed)
        for name in registry() if before else self._names if typed else ():
            if name.startswith(word):
                yield Completion(name, start_position=-len(word))


def _history() -> History:
    """Earlier lines, for their writer alone; of this conversation only where none can be kept."""
    path = home() / _HISTORY
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600))
    except OSError as error:
        say(f"exo: what is typed is not kept for later: {error}\n")
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    """Alt-Enter begins a line; a terminal sends it as Escape and Enter."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
