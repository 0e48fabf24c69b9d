"""Peers by address: `--peers host:port,…` or a JSON file, read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from exo import json_text
from exo.errors import InvalidRequest
from exo.networking.discovery.base import Discovery, DiscoveryListener, Route
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)


def parse_peer(text: str) -> Route:
    """ "host:port" as a route.

    Raises:
        InvalidRequest: not of that form.
    """
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"peer {text!r} is not host:port")
    return Route(host.strip("[]"), int(port))


class ManualDiscovery(Discovery):
    """`source` is a list "host:port,host:port", or the path of a JSON file holding a list of such
    texts, or the object {"peers": [...]}."""

    def __init__(self, source: str, interval_s: float = 1.0) -> None:
        self._file = Path(source) if source.endswith(".json") else None
        self._routes = [] if self._file else [parse_peer(p) for p in source.split(",") if p]
        self._modified = -1
        self._interval_s = interval_s
        self._tasks = TaskOwner("discovery")
        if self._file:
            self._routes = read_peers(self._file)

    async def start(self, listener: DiscoveryListener, port: int) -> None:
        self._tasks.forever(lambda: self._tell_forever(listener), "manual")

    async def stop(self) -> None:
        await self._tasks.close()

    async def _tell_forever(self, listener: DiscoveryListener) -> None:
        while True:
            if self._file is not None:
                self._reread(self._file)
            for route in self._routes:
                listener.heard("", "", route)
            await asyncio.sleep(self._interval_s)

    def _reread(self, file: Path) -> None:
        """A file that is broken for now (an editor is writing it) leaves the last good list."""
        try:
            modified = file.stat().st_mtime_ns
            if modified == self._modified:
                return
            self._modified = modified
            self._routes = read_peers(file)
        except (OSError, InvalidRequest) as error:
            logger.warning("%s: %s; the peers stay as they were", file, error)


def read_peers(file: Path) -> list[Route]:
    """The routes a JSON file lists.

    Raises:
        InvalidRequest: unreadable, or not a list of "host:port".
    """
    try:
        data = json_text.parsed(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read peers from {file}: {error}") from error
    listed = data.get("peers") if isinstance(data, dict) else data
    if not isinstance(listed, list) or not all(isinstance(peer, str) for peer in listed):
        raise InvalidRequest(f'{file} must hold a list like ["10.0.0.2:50051"]')
    return [parse_peer(peer) for peer in listed]
