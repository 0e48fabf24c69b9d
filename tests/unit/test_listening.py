"""A port, and who connects to it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cluster import until

from exo import listening
from exo.listening import ListeningPort, open_port


class Echo(asyncio.Protocol):
    """Says again what is said to it."""

    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        Echo.made += 1

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@pytest.fixture
async def port() -> AsyncIterator[ListeningPort]:
    Echo.made = 0
    found = ListeningPort(open_port("127.0.0.1", 0), Echo, silent_s=0.2)
    yield found
    await found.close()


async def echoed(port: ListeningPort) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    writer.write(b"hello")
    async with asyncio.timeout(10):
        said = await reader.readexactly(5)
    writer.close()
    await writer.wait_closed()
    return said


async def test_who_says_nothing_is_let_go(port: ListeningPort) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    assert Echo.made == 0
    assert await echoed(port) == b"hello"


async def test_who_has_gone_before_it_was_let_in(port: ListeningPort) -> None:
    for _ in range(20):
        one = socket.create_connection(("127.0.0.1", port.number))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.close()  # with a reset
    assert await echoed(port) == b"hello"


async def test_a_system_without_files_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fake is the system, which says so of its files ten times."""
    monkeypatch.setattr(listening, "RETRY_S", 0.01)
    loop = asyncio.get_running_loop()
    real, left = loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")] * 10
    left[5] = ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort")

    async def accept(sock: socket.socket) -> Any:
        if left:
            raise left.pop()
        return await real(sock)

    monkeypatch.setattr(loop, "sock_accept", accept)
    with caplog.at_level(logging.WARNING):
        port = ListeningPort(open_port("127.0.0.1", 0), Echo)
        assert await echoed(port) == b"hello"
    assert not left
    assert len(caplog.records) == 1 and "ulimit -n" in caplog.text
    await port.close()


def has_connection() -> bool:
    return any(task.get_name().endswith(":connection") for task in asyncio.all_tasks())


async def test_a_port_that_closes_serves_who_has_connected() -> None:
    port = ListeningPort(open_port("127.0.0.1", 0), Echo, silent_s=60)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    await until(has_connection, "it is let in")
    closing = asyncio.create_task(port.close(last_word_s=60))
    writer.write(b"hello")
    async with asyncio.timeout(10):
        assert await reader.readexactly(5) == b"hello"
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await port.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port.number)
    writer.close()
