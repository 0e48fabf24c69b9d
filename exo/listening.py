"""A TCP port that stays open, whatever those who connect to it do or leave undone."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable

from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""How long nobody is let in where the system has nothing left for another connection. asyncio's own
server asks again at once and for ever, with a page of log each time."""
_SAID_EVERY_S = 60.0
BACKLOG = 128
"""Connections that the system holds for one who has not got to accept them."""


class ListeningPort:
    """Gives each connection to an asyncio protocol of its own.

    One on which nothing is said for `silent_s` after it was opened is closed: asyncio's protocols
    begin to count with the first byte. One that would leave this process fewer than `spare_files`
    files to open, or a quarter of all, is closed at once: the rest of the program goes on.

    `number` is the port's.
    """

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        silent_s: float | None = None,
        spare_files: int = 0,
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._protocol = protocol
        self._silent_s = silent_s
        self._spare_files = spare_files
        self.number = int(listening.getsockname()[1])
        self._tasks = TaskOwner(f"port {self.number}")
        self._said = float("-inf")
        self._accepting = self._tasks.forever(self._accept, "accept")

    async def close(self, last_word_s: float = 0.0) -> None:
        """Nobody connects from now on. Who has, and says something in this time, is served;
        connections that have a protocol stay with it."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listening.close()
        await asyncio.sleep(last_word_s)
        await self._tasks.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except ConnectionError as error:  # who it was has gone already
                logger.debug("port %d: %s", self.number, error)
            except OSError as error:
                self._tell(error)
                await asyncio.sleep(RETRY_S)
            else:
                if self._is_too_many(connection):
                    self._tell(OSError(errno.EMFILE, "nearly all files are open"))
                    connection.close()
                    continue
                self._tasks.background(self._hand_over(connection), "connection")

    def _is_too_many(self, connection: socket.socket) -> bool:
        """The system gives each file the lowest number that is free."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most == resource.RLIM_INFINITY:
            return False
        return connection.fileno() >= most - min(self._spare_files, most // 4)

    def _tell(self, error: OSError) -> None:
        if time.monotonic() >= self._said + _SAID_EVERY_S:
            self._said = time.monotonic()
            advice = "; ulimit -n says how many" if error.errno == errno.EMFILE else ""
            text = "nobody can connect to port %d for now: %s%s"
            logger.warning(text, self.number, error.strerror, advice)

    async def _hand_over(self, connection: socket.socket) -> None:
        try:
            if self._silent_s is not None:
                async with asyncio.timeout(self._silent_s):
                    await _something_said(connection)
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except TimeoutError:
            logger.debug("port %d: a connection on which nothing was said", self.number)
            connection.close()
        except OSError as error:  # who it was has gone
            logger.debug("port %d: %s", self.number, error)
            connection.close()
        except BaseException:
            connection.close()
            raise


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens; 0 picks a free port, "::" is all addresses of both families.

    Raises:
        OSError: the port is taken, or the host is none of this machine.
    """
    if ":" not in host:
        return socket.create_server((host, port), backlog=BACKLOG)
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=both
    )


async def _something_said(connection: socket.socket) -> None:
    """Or the other side has gone: that is for the protocol to find out."""
    loop = asyncio.get_running_loop()
    said = asyncio.Event()
    loop.add_reader(connection, said.set)
    try:
        await said.wait()
    finally:
        loop.remove_reader(connection)
