"""The interfaces that a node uses, followed as networks come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from exo.networking.discovery.interfaces import (
    KINDS,
    Interface,
    find_interfaces,
    lan_interfaces,
    named_interfaces,
)

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0
"""A machine may start before its network does, and carry exo from one Wi-Fi to the next."""


class Network:
    """`names` are the interfaces that the user chose; none stands for all that lead to a private
    network.

    Raises:
        InvalidRequest: there is none of a name.
    """

    def __init__(self, names: Iterable[str] = (), interval_s: float = LOOK_INTERVAL_S) -> None:
        self._names = tuple(names)
        self._interval_s = interval_s
        self.interfaces = named_interfaces(self._names) if self._names else lan_interfaces()

    @property
    def addresses(self) -> list[str]:
        """Of this machine, where others reach it."""
        return sorted({i.address for i in self.interfaces} | {"127.0.0.1"})

    def interface_of(self, host: str) -> tuple[str, int]:
        """(name, rank) of the interface that leads to `host`."""
        found = next((i for i in self.interfaces if i.reaches(host)), None)
        return (found.name, found.rank) if found else ("other", KINDS.index("other"))

    async def follow(self, use: Callable[[list[Interface]], Awaitable[None]]) -> None:
        """Have the interfaces of each moment used, for ever. What `use` fails at is tried again."""
        problem = ""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                # In a thread: macOS is asked for its ports by a command.
                found = await asyncio.to_thread(self._look)
                self._tell(found)
                self.interfaces = found
                await use(found)
                problem = ""
            except OSError as error:
                if str(error) != problem:
                    logger.warning("a network cannot be used yet: %s", error)
                problem = str(error)

    def _tell(self, found: list[Interface]) -> None:
        for one in found:
            if one not in self.interfaces:
                logger.info("the network of %s, %s, is there", one.name, one.address)
        for one in self.interfaces:
            if one not in found:
                logger.info("the network of %s, %s, is gone", one.name, one.address)

    def _look(self) -> list[Interface]:
        return find_interfaces(self._names) if self._names else lan_interfaces()
