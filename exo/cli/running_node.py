"""A node with its API, from start to stop, in this process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from exo.api.http.access import Access
from exo.api.request import ChatDefaults
from exo.api.server import ApiConfig, ApiServer
from exo.cli.client import node_at
from exo.cli.keys import API_KEY, api_keys
from exo.cli.open_files import allow_many
from exo.cli.settings import aliases, node_config
from exo.logs import log_as
from exo.orchestration.build import build_node
from exo.orchestration.node import StandardNode

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 8.0
"""For others to take over what this node does, and for its clients' answers to end."""

STOP_TIMEOUT_S = 1.5

_LOOK_AROUND_S = 1.0
"""How long a node of our own looks for others before it goes on alone."""


@contextlib.asynccontextmanager
async def running_node(args: argparse.Namespace, api_port: int) -> AsyncIterator[StandardNode]:
    """A started node that answers on `node.api_url`; at the end it leaves and is stopped in bounded
    time, at once if cancelled again.

    Raises:
        ExoError, OSError: a setting or a port that cannot be.
    """
    allow_many()
    node = build_node(node_config(args))
    defaults = ChatDefaults(
        args.default_temp, args.max_generate_tokens, args.system_prompt, aliases(args)
    )
    keys = api_keys(args)
    if keys:  # this program's own client is one too
        os.environ.setdefault(API_KEY, keys[0])
    access = Access(keys, tuple(args.cors_origin))
    log_as(args.log_format)
    api = ApiServer(node, ApiConfig(args.chatgpt_api_host, api_port, defaults, access))
    try:
        await node.start()
        node.api_url = await api.start()
        # What is imported stays: a full collection need not look at it, which takes as long as
        # several tokens.
        gc.freeze()
        try:
            yield node
        finally:
            await node.leave(LEAVE_TIMEOUT_S, _say)
    finally:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await api.stop()
                await node.stop()
        except TimeoutError:
            logger.warning("not everything ended within %.1f s", STOP_TIMEOUT_S)


def _say(what: str) -> None:
    print(f"exo: {what} (Ctrl-C again: stop at once)", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.asynccontextmanager
async def some_node(args: argparse.Namespace, model_id: str) -> AsyncIterator[str]:
    """The URL of the node that runs on this machine, or of one for this command alone, which is
    about a model."""
    url = await node_at(args.chatgpt_api_port)
    if url is not None:
        yield url
        return
    async with running_node(args, api_port=0) as node:
        if args.wait_for_peers or not await asyncio.to_thread(_can_do_alone, node, model_id):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if args.wait_for_peers else _LOOK_AROUND_S):
                    await node.wait_for_peers(args.wait_for_peers or 1)
        yield node.api_url


def _can_do_alone(node: StandardNode, model_id: str) -> bool:
    """Whether the whole model is here and small for this machine: an answer need not wait for
    others to be found."""
    path = node.store.find(model_id)
    own = node.topology().nodes[node.config.node_id].capabilities
    return (
        path is not None
        and own is not None
        and 2 * node.store.size(path) < own.memory_available_bytes
    )


def run_until_signal(main: Coroutine[Any, Any, int]) -> int:
    """Run `main`; Ctrl-C and SIGTERM cancel it once, and its clean-up runs."""

    async def supervised() -> int:
        task = asyncio.ensure_future(main)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 130

    loop = asyncio.new_event_loop()
    try:
        status = loop.run_until_complete(supervised())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    if any(t is not threading.main_thread() and not t.daemon for t in threading.enumerate()):
        # An engine in the middle of a long operation cannot be interrupted; nobody waits for it.
        logging.shutdown()
        os._exit(status)
    loop.close()
    return status
