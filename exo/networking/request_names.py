"""A request's name goes with the calls that are made for it, so that each node's log has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from exo.logs import request_id

METADATA: Final = "x-request-id"


def named() -> tuple[tuple[str, str], ...]:
    """What a call is sent as metadata."""
    name = request_id.get()
    return ((METADATA, name),) if name else ()


class TakesName(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """A call is handled under the name with which it came."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        metadata = handler_call_details.invocation_metadata or ()
        name = next((value for key, value in metadata if key == METADATA), "")
        request_id.set(name if isinstance(name, str) else "")
        return await continuation(handler_call_details)
