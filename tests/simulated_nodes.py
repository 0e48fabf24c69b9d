"""Nodes that are only membership, keeper and planner, on a virtual clock.

Those are real; the network between them (`Net`) and the rings they keep places in (`FakeRings`) are
made up. The network loses, delays and so reorders calls, in one direction or both, and cuts
connections; nodes die, freeze and come back.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from exo.download.progress import OnProgress
from exo.errors import ExoError, PeerUnavailable, StepTimeout
from exo.models.description import ModelDescription
from exo.networking.calls.messages import Prepared
from exo.networking.calls.peer_handle import Beat, PeerIdentity
from exo.networking.discovery.base import Route
from exo.networking.generated import node_service_pb2 as pb
from exo.orchestration.config import NodeConfig
from exo.orchestration.membership.membership import Membership
from exo.orchestration.membership.rhythm import News
from exo.orchestration.planning.keeper import PlanKeeper
from exo.shard import RingPlan
from exo.tasks import TaskOwner
from exo.topology.capabilities import DeviceCapabilities
from exo.topology.placement import NodePace, PartitionRule

GB = 10**9


class Net:
    """Who reaches whom. `at(name)` is the node that lives there, if one does."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nodes: dict[str, SimNode] = {}
        self.cut: set[tuple[str, str]] = set()  # from, to: nothing passes
        self.slow: set[tuple[str, str]] = set()
        self.frozen: set[str] = set()  # what they are sent waits for them
        self.loss = 0.0
        self.generation: dict[tuple[str, str], int] = {}  # grows when connections are reset
        self.beats: Counter[str] = Counter()  # that each node has sent

    async def cross(self, source: str, target: str, generation: int) -> SimNode:
        """One message's way; the node it arrives at."""
        link = (source, target)
        await asyncio.sleep(self.rng.uniform(0.0, 0.3 if link in self.slow else 0.01))
        while {source, target} & self.frozen:
            await asyncio.sleep(0.01)
        node = self.nodes.get(target)
        if node is None:
            raise PeerUnavailable(f"{target} is not there for {source}")
        if link in self.cut or self.rng.random() < self.loss:
            await asyncio.sleep(1.0)  # a time-out
            raise StepTimeout(f"{target} does not answer {source}")
        if self.generation.get(link, 0) != generation:
            raise PeerUnavailable(f"the connection of {source} to {target} was reset")
        return node

    def reset(self, name: str) -> None:
        """RST on every connection that others have to a node."""
        for other in self.nodes:
            self.generation[other, name] = self.generation.get((other, name), 0) + 1

    async def kill(self, name: str) -> None:
        """A node that is there ends, and every connection to it with it."""
        node = self.nodes.pop(name)
        self.reset(name)
        await node.stop()


class FakeHandle:
    """PeerHandle without gRPC: the call is made on the other node, after the network's delays."""

    def __init__(self, net: Net, source: str, address: str) -> None:
        self._net, self._source, self.address = net, source, address
        self._target = address.partition(":")[0]
        self._generation = net.generation.get((source, self._target), 0)
        self._closed = False

    async def _call(self, call: Callable[[SimNode], Any]) -> Any:
        if self._closed:
            raise PeerUnavailable("closed")
        node = await self._net.cross(self._source, self._target, self._generation)
        result = call(node)
        if asyncio.iscoroutine(result):
            result = await result
        await self._net.cross(
            self._target, self._source, self._net.generation.get((self._target, self._source), 0)
        )
        return result

    async def close(self) -> None:
        self._closed = True

    async def hello(self, request: pb.HelloRequest) -> PeerIdentity:
        return await self._call(lambda node: node.on_hello(request))

    async def heartbeats(
        self,
        own_id: str,
        own_beat: Callable[[], Beat],
        rest: Callable[[], Awaitable[None]],
        timeout_s: Callable[[], float],
    ) -> AsyncGenerator[tuple[Beat, float], None]:
        while True:
            beat, sent = own_beat(), asyncio.get_running_loop().time()
            self._net.beats[own_id] += 1
            try:
                async with asyncio.timeout(timeout_s()):
                    answer = await self._call(lambda node, beat=beat: node.on_beat(own_id, beat))
            except TimeoutError:
                raise StepTimeout("missed its heartbeat") from None
            yield answer, asyncio.get_running_loop().time() - sent
            await rest()

    async def goodbye(self, node_id: str, instance_id: str) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **extra: Any) -> Any:
            return await self._call(lambda node: getattr(node, name)(*args, **extra))

        return call


class FakeRings:
    """Places in plans, which work as long as nobody ends them."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.by_hash: dict[str, RingPlan] = {}

    @property
    def plans(self) -> list[RingPlan]:
        return list(self.by_hash.values())

    @property
    def holding(self) -> frozenset[str]:
        return frozenset(self.by_hash)

    def is_busy(self, plan_hash: str) -> bool:
        return False

    def end(self, plan_hash: str, error: ExoError) -> None:
        plan = self.by_hash.pop(plan_hash, None)
        if plan is not None and plan.head_id == self._node.name:
            self._node.keeper.published.remove(plan_hash)
            self._node.tasks.background(self._tell(plan_hash), "end")

    async def _tell(self, plan_hash: str) -> None:
        for handle in self._node.peers().values():
            try:
                await handle.retire(plan_hash, "over")
            except PeerUnavailable:
                continue

    async def retire(self, plan_hash: str, reason: str) -> None:
        plan = self.by_hash.pop(plan_hash, None)
        if plan is not None and plan.head_id == self._node.name:
            self._node.tasks.background(self._tell(plan_hash), "retire")

    async def unload_unused(self, model_id: str) -> None: ...


class SimNode:
    """A node's membership and plans, without API, engine, files and sockets."""

    def __init__(
        self,
        net: Net,
        name: str,
        instance: str,
        gb: float,
        partition: PartitionRule = PartitionRule.MEMORY,
    ) -> None:
        self.net, self.name, self.gb = net, name, gb
        self.read_bytes_s, self.slowdown = 1e9, 1.0
        self.experts = 0.0  # share of a layer's bytes
        self.config = NodeConfig(name, instance, Path("/nowhere"))
        self.rings = FakeRings(self)
        self.membership = Membership(
            self.config,
            self.beat_to,
            lambda node_id: self.keeper.look_soon(),
            self.on_lost,
            self.heard,
            lambda host: ("net", 1),
            lambda: frozenset(n for plan in self.rings.plans for n in plan.node_ids),
            lambda address: FakeHandle(net, name, address),  # type: ignore[arg-type, return-value]
            asyncio.get_running_loop().time,
        )
        self.keeper = PlanKeeper(
            name,
            self.members,
            lambda: max((net_gb(n), n) for n in self.members())[1],
            lambda: self.membership.max_epoch,
            self.rings,
            lambda: None,
            self.config.heartbeat_interval_s,
            partition,
            self.membership.beat_soon,
            slowdowns=lambda: {n: node.slowdown for n, node in net.nodes.items()},
        )
        self.tasks = TaskOwner(name)

    def start(self) -> None:
        self.keeper.start()
        now = asyncio.get_running_loop().time
        self.membership.start(1, News(lambda: self.keeper.news, lambda: None, now))
        self.tasks.background(self._announce(), "announce")

    async def stop(self) -> None:
        await self.tasks.close()
        await self.keeper.close()
        await self.membership.stop()

    async def _announce(self) -> None:
        while True:
            for other, node in list(self.net.nodes.items()):
                if other != self.name and (self.name, other) not in self.net.cut:
                    route = Route(self.name, 1)
                    node.membership.heard(self.name, self.config.instance_id, route)
            await asyncio.sleep(1.0)

    def peers(self) -> dict[str, Any]:
        return {n: self.membership.handle_of(n) for n in self.membership.alive}

    def members(self) -> dict[str, Any]:
        return {self.name: self, **self.peers()}

    def beat_to(self, node_id: str) -> Beat:
        sees = self.membership.connected_to(node_id)
        said = self.keeper.says(node_id)
        return Beat(GB, self.keeper.epoch, sees, (), said, silent=self.membership.silent)

    def heard(self, node_id: str, beat: Beat) -> None:
        self.keeper.heard(node_id, beat.plans)

    def on_hello(self, request: pb.HelloRequest) -> PeerIdentity:
        route = Route(request.node_id, 1)
        self.membership.heard(request.node_id, request.instance_id, route)
        found = DeviceCapabilities("sim", "sim", "cpu", int(self.gb * GB), int(self.gb * GB), 1)
        return PeerIdentity(self.name, self.config.instance_id, "", found)

    def on_beat(self, node_id: str, beat: Beat) -> Beat:
        self.membership.told_by(node_id, beat)
        self.heard(node_id, beat)
        return self.beat_to(node_id)

    def on_lost(self, node_id: str, error: ExoError) -> None:
        self.keeper.lost(node_id, error)
        for plan in self.rings.plans:
            if node_id in plan.node_ids:
                self.rings.end(plan.hash, error)

    # What members are asked ---------------------------------------------------------------------

    async def prepare(self, model_id: str, on_progress: OnProgress) -> Prepared:
        sizes: dict[str, Any] = {"first_bytes": 0, "last_bytes": 0, "context_length": 64}
        experts = (int(self.experts * GB / 8),) * 8 if self.experts else ()
        found = ModelDescription(
            model_id, "sim", "files", (GB // 8,) * 8, **sizes, expert_bytes=experts
        )
        return Prepared(found, int(self.gb * GB), {}, NodePace(self.read_bytes_s / self.slowdown))

    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None:
        self.keeper.check_not_stale(plan)
        await asyncio.sleep(self.net.rng.uniform(0.05, 1.0))
        self.rings.by_hash[plan.hash] = plan

    async def warm_up(self, plan: RingPlan) -> None:
        for name in plan.node_ids:
            node = (
                await self.net.cross(self.name, name, self.net.generation.get((self.name, name), 0))
                if name != self.name
                else self
            )
            if plan.hash not in node.rings.by_hash:
                raise PeerUnavailable(f"{name} has no place in {plan.hash}")

    async def publish(self, plan: RingPlan) -> None:
        await self.keeper.publish(plan)

    async def retire(self, plan_hash: str, reason: str, unload_model: str = "") -> None:
        await self.keeper.retire(plan_hash, reason, unload_model)

    async def idle_s(self, plan_hash: str) -> float | None:
        return 0.0

    async def unload(self, plan_hash: str) -> bool:
        return False

    async def ensure_plan(
        self,
        model_id: str,
        dead_hash: str,
        on_progress: OnProgress,
        *,
        make_room: bool = True,
        renew: bool = False,
    ) -> RingPlan:
        return await self.keeper.ensure_plan(
            model_id, dead_hash, on_progress, make_room=make_room, renew=renew
        )


def net_gb(name: str) -> int:
    """Memory by name: whichever node lives there, so that all agree on who plans."""
    return {"a": 4, "b": 8, "c": 8, "d": 2, "e": 16}.get(name, 1)
