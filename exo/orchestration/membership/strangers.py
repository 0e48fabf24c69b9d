"""Addresses that somebody named, of which it is not known which node is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from exo.errors import ExoError
from exo.networking.calls.peer_handle import PeerHandle
from exo.networking.discovery.base import Route
from exo.networking.generated import node_service_pb2 as pb
from exo.orchestration.membership.peer import advice
from exo.tasks import TaskOwner


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
        self.problems: dict[str, str] = {}
        """By address: what happened when it was asked last."""

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
            self.problems[route.address] = advice(route.address, route, error)
        else:
            self.problems.pop(route.address, None)
            interface, rank = self._interface_of(route.host)
            known = replace(route, interface=interface, rank=rank)
            self._found(identity.node_id, identity.instance_id, known)
        finally:
            self._asking.discard(route.address)
            await handle.close()
