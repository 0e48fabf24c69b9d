"""The HTTP server: API and tinychat on one port."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from exo.api.chat import Chat
from exo.api.cluster.bench import BenchRoutes
from exo.api.cluster.catalog import CatalogRoutes
from exo.api.cluster.downloads import DownloadRoutes
from exo.api.cluster.events import EventRoutes
from exo.api.cluster.metrics import Metrics
from exo.api.cluster.state import ClusterRoutes
from exo.api.dialects.anthropic import Anthropic
from exo.api.dialects.embeddings import Embeddings
from exo.api.dialects.ollama import Ollama
from exo.api.dialects.ollama_models import OllamaModels
from exo.api.dialects.openai_chat import OpenAIChat
from exo.api.dialects.openai_completions import OpenAICompletions
from exo.api.dialects.openai_models import OpenAIModels
from exo.api.dialects.openai_responses import OpenAIResponses
from exo.api.http.access import Access, add_cors_headers, only_known_origins, only_with_key
from exo.api.http.errors import as_errors
from exo.api.http.openapi import openapi_routes
from exo.api.http.pages import Pages
from exo.api.http.request_id import add_request_id, with_request_id
from exo.api.http.routes import add_routes
from exo.api.request import ChatDefaults
from exo.listening import ListeningPort, open_port
from exo.orchestration.node import StandardNode

logger = logging.getLogger(__name__)

DIALECTS = (
    OpenAIChat,
    OpenAICompletions,
    OpenAIResponses,
    Embeddings,
    OpenAIModels,
    Anthropic,
    Ollama,
    OllamaModels,
)
"""What clients may speak; each turns requests into the core's (chat.py) and answers back."""

MAX_BODY_BYTES = 8 * 2**20
PORTS_TO_TRY = 20
SHUTDOWN_S = 0.5
SILENT_S = 60.0
"""How long a connection is kept on which no request was ever begun."""
SPARE_FILES = 48
"""Of those that this process may open, what clients leave for peers and models."""
_ALL = ("0.0.0.0", "::", "")

LAST_WORD_S = 0.2
"""How long who connected just before the end is still answered, by a refusal that says so: a
connection that is closed without a word looks like a crash."""


@dataclass(frozen=True)
class ApiConfig:
    """`host` is loopback unless the user asks for more."""

    host: str
    port: int
    defaults: ChatDefaults = field(default_factory=ChatDefaults)
    access: Access = field(default_factory=Access)


class ApiServer:
    """One node's HTTP side."""

    def __init__(self, node: StandardNode, config: ApiConfig) -> None:
        self._config = config
        loopback_only = config.host in ("127.0.0.1", "localhost", "::1")
        metrics = Metrics(node)
        app = web.Application(
            middlewares=[
                with_request_id,
                metrics.counting(),
                as_errors(metrics.failed),
                only_known_origins(config.access.origins, loopback_only=loopback_only),
                only_with_key(config.access.api_keys),
            ],
            client_max_size=MAX_BODY_BYTES,
        )
        app.on_response_prepare.extend([add_request_id, add_cors_headers])
        chat = Chat(node, metrics.timed)
        downloads = DownloadRoutes(node)
        app.on_cleanup.append(downloads.close)
        routes = [route for one in DIALECTS for route in one(node, chat, config.defaults).routes()]
        routes += ClusterRoutes(node).routes() + BenchRoutes(node).routes() + downloads.routes()
        routes += CatalogRoutes(node).routes() + EventRoutes(node).routes()
        routes += metrics.routes()
        pages = Pages(_folder("tinychat"), "/tinychat/")
        routes += openapi_routes(routes, pages)
        add_routes(app, routes)
        index = pages.page("index.html", {"Content-Security-Policy": PAGE_POLICY})
        app.router.add_get("/", index)
        Pages(_folder("docs"), "/tinychat/guide/").add_to(app)
        pages.add_to(app)
        # A client that goes away cancels its handler, which cancels its sequence on every node.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None
        )

        self._ports: list[ListeningPort] = []

    async def start(self) -> str:
        """Listen on the configured port, or the next free one; the URL to open.

        Raises:
            OSError: none of the ports tried is free.
        """
        await self._runner.setup()
        protocol = self._runner.server
        assert protocol is not None
        self._ports = [
            ListeningPort(one, protocol, silent_s=SILENT_S, spare_files=SPARE_FILES)
            for one in _listening(self._config.host, self._config.port)
        ]
        port = self._ports[0].number
        if self._config.port not in (0, port):
            logger.warning("port %d is taken, using %d", self._config.port, port)
        host = "127.0.0.1" if self._config.host in _ALL else self._config.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        await asyncio.gather(*(port.close(LAST_WORD_S) for port in self._ports))
        await self._runner.cleanup()


def _listening(host: str, port: int) -> list[socket.socket]:
    last = OSError(f"no port to listen on at {host}")
    for candidate in range(port, port + PORTS_TO_TRY) if port else (0,):
        try:
            return _on_all_names(host, candidate)
        except OSError as error:
            last = OSError(f"cannot listen on {host}:{candidate}: {error.strerror}")
    raise last


def _on_all_names(host: str, port: int) -> list[socket.socket]:
    """Of this machine alone by IPv6 too, where it has that: for some clients localhost is nothing
    else."""
    found = [open_port(host, port)]
    if host in ("127.0.0.1", "localhost"):
        try:
            found.append(open_port("::1", found[0].getsockname()[1]))
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:  # localhost would be somebody else
                found[0].close()
                raise
            logger.debug("not on ::1: %s", error)
    return found


PAGE_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    ]
)
"""Nothing a model says can run, load or send anything, even if the page were wrong about it."""


def _folder(name: str) -> Path:
    """Inside an installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / name
    return installed if installed.is_dir() else Path(__file__).parents[2] / name
