"""Addresses of which it is not known which node is there: named by somebody, or not trusted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from exo.errors import ExoError
from exo.networking.calls.peer_handle import PeerHandle
from exo.networking.discovery.base import Route
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.trust.cluster_key import SAME_KEY
from exo.orchestration.membership.peer import ROUTE_LIFETIME_S, advice
from exo.tasks import TaskOwner

logger = logging.getLogger(__name__)

MOST_DISTRUSTED = 32


class Strangers:
    """`found` is called with (node id, instance id, route) when one has said who it is; `hello` is
    what it is told, `interface_of` the interface to a host and its rank."""

    def __init__(
        self,
        connect: Callable[[str], PeerHandle],
        hello: Callable[[], pb.HelloRequest],
        found: Callable[[str, str, Route], None],
        interface_of: Callable[[str], tuple[str, int]],
        tasks: TaskOwner,
    ) -> None:
        self._connect = connect
        self._hello = hello
        self._found = found
        self._interface_of = interface_of
        self._tasks = tasks
        self._asking: set[str] = set()
        self._problems: dict[str, str] = {}  # by address, what happened when it was asked last
        # By address: why it is not trusted, and when it was heard.
        self._distrusted: dict[str, tuple[str, float]] = {}

    def problems(self) -> dict[str, str]:
        """By address. For any thread: a screen may ask."""
        return self._problems | {address: why for address, (why, _) in self._lately().items()}

    def distrust(self, node_id: str, route: Route, why: str) -> None:
        """It is heard now, and not connected to. Of very many at once not all are told of."""
        said = f"{node_id} at {route.address} {why}: {SAME_KEY}"
        known, _ = self._distrusted.get(route.address, ("", 0.0))
        if known != said:
            self._distrusted = self._lately()
            if len(self._distrusted) >= MOST_DISTRUSTED:
                return
            logger.warning("%s", said)
        self._distrusted[route.address] = said, time.monotonic()

    def _lately(self) -> dict[str, tuple[str, float]]:
        forgotten = time.monotonic() - ROUTE_LIFETIME_S
        return {
            address: one for address, one in self._distrusted.copy().items() if one[1] > forgotten
        }

    def ask(self, route: Route) -> None:
        """Who is there; not while that is being asked."""
        if route.address not in self._asking:
            self._asking.add(route.address)
            self._tasks.background(self._ask(route), f"ask {route.address}")

    async def _ask(self, route: Route) -> None:
        handle = self._connect(route.address)
        try:
            identity = await handle.hello(self._hello())
        except ExoError as error:
            self._problems[route.address] = advice(route.address, route, error)
        else:
            self._problems.pop(route.address, None)
            interface, rank = self._interface_of(route.host)
            known = replace(route, interface=interface, rank=rank)
            self._found(identity.node_id, identity.instance_id, known)
        finally:
            self._asking.discard(route.address)
            await handle.close()
