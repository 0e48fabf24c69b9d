"""`exo run`: one answer, or a conversation, through the node that runs here or one of our own."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from exo.cli.run.answer import Answer, show_answer
from exo.cli.run.display import Display, Json, Plain
from exo.cli.run.question import asked
from exo.cli.running_node import run_until_signal, some_node
from exo.errors import ExoError, InvalidRequest
from exo.models.card import default_model, resolve


def run(args: argparse.Namespace) -> int:
    """0 when it was answered, 1 when not, 130 after Ctrl-C.

    Raises:
        ExoError: the model or a file is not one.
    """
    model = args.model or default_model()
    resolve(model)
    question = asked(args.prompt, args.file)
    if question is None and args.json:
        raise InvalidRequest("--json answers one question: give --prompt, or pipe it in")
    return run_until_signal(_run(args, model, question))


async def _run(args: argparse.Namespace, model: str, question: str | None) -> int:
    sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    body: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    async with some_node(args, model) as url:
        if question is None:
            from exo.cli.run.chat import Chat

            return await Chat(url, model, body, _display(args), args.system, args.file).talk()
        messages = [{"role": "user", "content": question}]
        if args.system:
            messages.insert(0, {"role": "system", "content": args.system})
        body |= {"model": model, "messages": messages}
        try:
            await show_answer(url, body, _display(args), Answer(model))
        except ExoError:
            return 1
        return 0


def _display(args: argparse.Namespace) -> Display:
    if args.json:
        return Json()
    if args.plain or not sys.stdout.isatty():
        return Plain()
    from exo.cli.run.markdown import Rendered

    return Rendered()
