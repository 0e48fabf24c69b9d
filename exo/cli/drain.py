"""`exo drain`: a node gives its part in rings to others, and nothing is lost."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from urllib.parse import quote

from exo.cli.client import get_json, send_json

POLL_S = 0.2
SAID_AGAIN_S = 10.0


def drain(args: argparse.Namespace) -> int:
    """Until the node has no part in any ring; 1 if some model cannot be served without it."""
    return asyncio.run(_drain(args.chatgpt_api_port, args.node, undo=args.undo))


async def _drain(port: int, node: str | None, *, undo: bool) -> int:
    node = node or (await get_json(port, "/healthcheck"))["node_id"]
    path = f"/v1/nodes/{quote(node, safe='')}/drain"
    if undo:
        await send_json(port, "DELETE", path)
        _say(f"{node} is used for rings again")
        return 0
    said, said_at = "", 0.0
    while True:
        state = await send_json(port, "POST", path)
        problems: dict[str, str] = state["problems"]
        going = [model for model in state["models"] if model not in problems]
        if not going:
            break
        line = f"{node} hands over {', '.join(going)}"
        if line != said or time.monotonic() - said_at > SAID_AGAIN_S:
            _say(line)
            said, said_at = line, time.monotonic()
        await asyncio.sleep(POLL_S)
    for model, why in problems.items():
        print(f"exo: {model} needs {node}: {why}", file=sys.stderr)  # noqa: T201
    if problems:
        _say(f"{node} takes nothing new, but has its part until it is stopped; exo drain --undo")
        return 1
    _say(f"{node} has no part in rings: stop it whenever you like, or exo drain --undo {node}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201
