"""What every call between nodes shares: channel options, deadlines, and errors as statuses."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio

from exo.errors import ExoError, InvalidRequest, PeerUnavailable, StepTimeout, error_from_code
from exo.networking.trust.cluster_key import NO_KEY, OTHER_KEY, SAME_KEY

Item = TypeVar("Item")

CALL_TIMEOUT_S = 5.0
"""Deadline of calls that answer at once, and the longest silence on a stream that has a pulse.
Shorter blames busy machines; longer keeps clients waiting for a hung node."""

PULSE_S = 1.0
"""A stream whose next event takes time sends an empty one this often."""

_CODE, _PARAM = "exo-code", "exo-param"
# What gRPC tells of connections sealed by a cluster's key, by what its TLS calls it.
_UNFIT = {
    "CERTIFICATE_VERIFY_FAILED": OTHER_KEY,
    "WRONG_VERSION_NUMBER": NO_KEY,
}
_CONNECTING = re.compile(r"last error: .*: (\w[^:]*)$", re.DOTALL)
_MAX_DETAILS = 2000  # gRPC sends the message as a header

OPTIONS = [
    ("grpc.max_receive_message_length", 300 * 2**20),
    ("grpc.max_send_message_length", 300 * 2**20),
    # Two processes on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    # A proxy of the environment is not for machines on the LAN.
    ("grpc.enable_http_proxy", 0),
    # What an attempt to connect may take: several round trips of a line to another continent.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

SERVER_OPTIONS = [
    *OPTIONS,
    # A machine that was unplugged says no goodbye: its connections would be kept for ever.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
]


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ExoError) -> None:
    """End a call with an exo error; the client raises the same class again."""
    status, details, metadata = status_of(error)
    await context.abort(status, details, metadata)


def status_of(error: ExoError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """How an error ends a call: status, details, trailing metadata."""
    status = getattr(grpc.StatusCode, error.grpc_status)
    metadata = ((_CODE, error.code), (_PARAM, error.param or ""))
    return status, error.message[:_MAX_DETAILS], metadata


@contextlib.contextmanager
def errors_of(peer: str) -> Iterator[None]:
    """Raise what a call to `peer` failed with as an exo error."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(peer, error) from error
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        # The channel was closed under the call or the call had ended, because the peer is gone.
        raise PeerUnavailable(f"the connection to {peer} was closed") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody cancelled this task: grpc says so of a call whose channel was closed under it.
        raise PeerUnavailable(f"the connection to {peer} was closed") from error


def from_rpc_error(peer: str, error: grpc.aio.AioRpcError) -> ExoError:
    """A failed call's status as an exo error."""
    metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    return from_status(peer, error.code().name, error.details() or "", metadata)


def from_status(peer: str, status: str, details: str, metadata: Mapping[str, str]) -> ExoError:
    """The error that `status_of` was told, or what fits a status that gRPC itself set."""
    if _CODE in metadata:
        return error_from_code(metadata[_CODE], details, metadata.get(_PARAM) or None)
    if status == grpc.StatusCode.DEADLINE_EXCEEDED.name:
        return StepTimeout(f"node {peer} did not answer in time")
    for said, why in _UNFIT.items():
        if said in details:
            return InvalidRequest(f"node {peer} {why}: {SAME_KEY}")
    if refused := _CONNECTING.search(details):  # gRPC names all it tried
        details = refused[1]
        if details == "Socket closed":
            details = "it hangs up; a node with a cluster key does where this one has none"
    elif status != grpc.StatusCode.UNAVAILABLE.name:
        details = f"{status.lower()}: {details}"
    return PeerUnavailable(f"node {peer} is gone: {details}")


def host_of(address: str) -> str:
    """ "127.0.0.1:5000" → "127.0.0.1", "[::1]:5000" → "::1"."""
    return address.rpartition(":")[0].strip("[]")


async def until_silent(
    peer: str, call: AsyncIterator[Item], silence_s: float = CALL_TIMEOUT_S
) -> AsyncGenerator[Item, None]:
    """The events of a stream that has a pulse; StepTimeout when it falls silent."""
    events = aiter(call)
    while True:
        try:
            async with asyncio.timeout(silence_s):
                event = await anext(events)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise StepTimeout(f"node {peer} fell silent for {silence_s:.0f} s") from error
        yield event
