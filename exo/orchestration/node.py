"""StandardNode: one running exo. Wires discovery, membership, planner, rings and the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from exo.download.progress import OnProgress, unheard
from exo.download.sharing import Sharing
from exo.download.store import ModelStore
from exo.errors import (
    ExoError,
    InvalidRequest,
)
from exo.inference.engine import InferenceEngine
from exo.models.description import ModelDescription
from exo.networking.calls.messages import (
    DrainState,
    GenerationEvent,
    GenerationRequest,
    HeldModel,
)
from exo.networking.calls.peer_handle import PeerHandle
from exo.networking.calls.server import NodeServer
from exo.networking.connections import OPEN, Connections
from exo.networking.discovery.base import Discovery
from exo.networking.discovery.interfaces import Interface
from exo.networking.discovery.network import Network
from exo.orchestration.answers import Answers
from exo.orchestration.config import NodeConfig
from exo.orchestration.draft_model import DraftModel
from exo.orchestration.files.activity import Activity
from exo.orchestration.files.cluster_files import ClusterFiles
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.files.usage import Usage
from exo.orchestration.for_peers import ForPeers, ListensAt
from exo.orchestration.leaving import Leaving
from exo.orchestration.membership.membership import Membership
from exo.orchestration.membership.rhythm import News
from exo.orchestration.own_shards import OwnShards
from exo.orchestration.planning.keeper import PlanKeeper
from exo.orchestration.planning.planner import Member
from exo.orchestration.serving.reports import Reports
from exo.orchestration.serving.rings import Rings
from exo.orchestration.serving.standby import Standby
from exo.shard import RingPlan
from exo.tasks import TaskOwner
from exo.topology.partitioning import Partition
from exo.topology.topology import NodeView, Topology, planner_among

logger = logging.getLogger(__name__)


class StandardNode:
    """One node's life: `start`, then requests and peers, then `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        engine: InferenceEngine,
        store: ModelStore,
        sharing: Sharing,
        discovery: Discovery,
        network: Network,
        connections: Connections = OPEN,
    ) -> None:
        self.config = config
        self.store = store
        self.sharing = sharing
        self.engine = engine
        self.api_url = ""
        self._discovery = discovery
        self._connections = connections
        self._network = network
        self.membership = Membership(
            config,
            lambda node_id: self._for_peers.beat_to(node_id),
            self._on_joined,
            self._on_lost,
            lambda node_id, beat: self._for_peers.heard(node_id, beat),
            network.interface_of,
            lambda: self.rings.watched | self.answers.heads,
            lambda address: PeerHandle(address, connections),
        )
        sharing.neighbours = self.membership.addresses
        self.rings = Rings(
            config.node_id,
            engine,
            config.serving,
            self.membership.handle_of,
            lambda: self.membership.alive,
            lambda plan: self.plans.remove(plan.hash),
            config.wire,
        )
        self.reports = Reports(
            config.node_id, self.rings, engine, lambda: self.membership.round_trips_s()
        )
        self._keeper = PlanKeeper(
            config.node_id,
            self._members,
            self._planner_id,
            lambda: self.membership.max_epoch,
            self.rings,
            self._tell_changed,
            config.heartbeat_interval_s,
            config.partition,
            self.membership.beat_soon,
            lambda: self.leaving.everyone,
            self.reports.slowdowns,
        )
        self.plans = self._keeper.published
        self.leaving = Leaving(
            config.node_id, self.rings, self.membership, self._keeper, self._members
        )
        self.usage = Usage(config.home / "usage.json")
        self.activity = Activity(config.node_id)
        self.files = ModelFiles(config.node_id, store, engine, self.activity)
        self.cluster_files = ClusterFiles(config.node_id, self.files, self._members, self.rings)
        self.answers = Answers(
            config.node_id,
            config.serving,
            self.rings,
            self.membership,
            self.ensure_plan,
            self.usage,
        )
        self._standby = Standby(config.node_id, self.rings, engine, lambda: self._own.free_bytes())
        self._own = OwnShards(
            config,
            engine,
            self.rings,
            self.files,
            self.activity,
            self.membership,
            self._keeper.check_not_stale,
            self._standby,
            DraftModel(config.draft_model, self.files, self.rings, lambda: self._own.free_bytes()),
        )
        self._for_peers = ForPeers(
            config,
            sharing,
            self.membership,
            self._keeper,
            self.rings,
            self.leaving,
            self._own,
            self.answers,
            self.files,
            self.usage,
            self.activity,
            self.reports,
            network.interface_of,
            lambda: ListensAt(self.api_url, self._server.ring_port),
        )
        self._server = NodeServer(self._for_peers, connections)
        self._changed = asyncio.Condition()
        self._tasks = TaskOwner(f"node {config.node_id}")

    # Life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for peers and look for them.

        Raises:
            OSError: the port is taken.
        """
        fixed = self.config.node_host
        hosts = [fixed] if fixed else self._network.addresses
        port = await self._server.start(hosts, self.config.listen_port)
        now = asyncio.get_running_loop().time
        self.membership.start(port, News(self._urgent_news, self._usual_news, now))
        self._keeper.start()
        if self.config.standby:
            self._standby.start()
        await self._discovery.start(self.membership, self.port)
        self._tasks.forever(lambda: self._network.follow(self._use), "network")
        logger.info("node %s listens on %s port %d", self.config.node_id, hosts, self.port)

    async def _use(self, interfaces: list[Interface]) -> None:
        try:
            if not self.config.node_host:
                await self._server.listen_also(self._network.addresses)
        finally:  # what can be used is, whatever else cannot
            await self._discovery.use(interfaces)

    async def leave(self, limit_s: float, say: Callable[[str], None]) -> None:
        """Before `stop`: have others take over what this node does for them, and end what it does
        for its own clients, for so many seconds at most. What is waited for is told through `say`.
        """
        self.usage.write()  # whoever is in a hurry ends `stop` before it comes to that
        self.answers.end()
        await self.leaving.leave(limit_s, self._needed, say)

    async def stop(self) -> None:
        """Say goodbye, end every session, free everything."""
        await self.leaving.close()
        self.usage.write()
        self.store.close()
        await self._tasks.close()
        await self._discovery.stop()
        await self._keeper.close()
        await self._standby.close()
        await self.rings.close()
        await self.membership.stop()
        await self._server.stop()
        await self.engine.close()

    @property
    def port(self) -> int:
        """Where this node listens for others."""
        return self.membership.port

    # What the API and the CLI ask ---------------------------------------------------------------

    def generate(
        self, model_id: str, request: GenerationRequest, on_progress: OnProgress
    ) -> AsyncGenerator[GenerationEvent, None]:
        """As `Answers.generate`."""
        return self.answers.generate(model_id, request, on_progress)

    async def describe(
        self, model_id: str, on_progress: OnProgress
    ) -> tuple[Path, ModelDescription]:
        """The model, and a folder with its configuration and tokenizer, brought here first if need
        be; then to all nodes at once, as the planner will ask them next. Raises what
        `ModelFiles.describe` raises."""
        if self.plans.of(model_id) is None and not await self.files.are_here(model_id):
            for node_id, member in self._members().items():
                if node_id != self.config.node_id:
                    self._tasks.background(self._have_described(member, model_id), "describe")
        return await self.files.describe(model_id, on_progress)

    async def _have_described(self, member: Member, model_id: str) -> None:
        try:
            await member.prepare(model_id, unheard)
        except ExoError as error:
            # The planner asks again, and says so to who waits.
            logger.info("%s is not described everywhere: %s", model_id, error.message)

    def topology(self) -> Topology:
        """The cluster as this node sees it now."""
        nodes, links = self.membership.views()
        own = NodeView(
            self.config.node_id,
            "self",
            f"{self.config.node_host or '127.0.0.1'}:{self.port}",
            self.api_url,
            self._own.capabilities(),
            self.membership.problem,
            self.leaving.draining,
        )
        views = {view.node_id: view for view in nodes} | {own.node_id: own}
        return Topology(self.config.node_id, views, tuple(links))

    def status(self) -> dict[str, Any]:
        """Counters for people and tests: what this node holds right now."""
        return {
            "tasks": len(asyncio.all_tasks()),
            "sequences": self.rings.sequence_count,
            "places": sorted(plan.hash for plan in self.rings.plans),
            "shards": sorted(map(str, self.rings.shards)),
            "standby": sorted(map(str, self.rings.standby)),
            "epoch": self._keeper.epoch,
            "discovery": self._discovery.status(),
            "sealed": self._connections.are_sealed,
        }

    async def wait_for_peers(self, count: int) -> None:
        """Return once at least `count` peers are alive."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.membership.alive) >= count)

    async def wait_for_members_other_than(self, known: set[str]) -> None:
        """Return once the live peers are others than `known`."""
        async with self._changed:
            await self._changed.wait_for(lambda: set(self.membership.alive) != known)

    async def changed(self) -> None:
        """Return at the next change of members or plans."""
        async with self._changed:
            await self._changed.wait()

    async def preview(self, model_id: str) -> Partition:
        """Where a plan made now would put the model's layers. Raises what `Planner.preview`
        raises."""
        return await self._keeper.preview(model_id)

    async def unload_model(self, model_id: str) -> bool:
        """Have the model's plan ended and its memory given back everywhere; False if something runs
        on it."""
        plan = self.plans.of(model_id)
        if plan is None:
            return True
        return await self._members()[plan.head_id].unload(plan.hash)

    # Leaving: what others do for this node ------------------------------------------------------

    async def drain_node(self, node_id: str, *, undo: bool) -> DrainState:
        """Have a node of the cluster leave all rings, or be used for them again; asked again it
        says how far it is.

        Raises:
            InvalidRequest: there is no such node.
        """
        return await self._member(node_id).drain(undo=undo)

    async def read_log_of(self, node_id: str, lines: int) -> list[str]:
        """The last lines of the log of a node of the cluster, oldest first.

        Raises:
            InvalidRequest: there is no such node.
        """
        return await self._member(node_id).read_log(lines)

    def _member(self, node_id: str) -> Member:
        members = self._members()
        if node_id not in members:
            known = ", ".join(sorted(members))
            raise InvalidRequest(f"no live node is called {node_id!r}; there are: {known}")
        return members[node_id]

    def _needed(self) -> str:
        """What goes on here that others wait for."""
        needed = []
        if self.answers.running:
            needed.append(f"{self.answers.running} answer(s)")
        if self._server.files_read:
            needed.append("files that other nodes fetch from this one")
        return f"finishing {' and '.join(needed)}" if needed else ""

    async def ensure_plan(
        self,
        model_id: str,
        dead_hash: str,
        on_progress: OnProgress,
        *,
        make_room: bool = True,
        renew: bool = False,
    ) -> RingPlan:
        """A plan that serves. Raises what `PlanKeeper.ensure_plan` raises."""
        return await self._keeper.ensure_plan(
            model_id, dead_hash, on_progress, make_room=make_room, renew=renew
        )

    async def models_here(self) -> list[HeldModel]:
        """Models whose files, or some of them, are on this machine."""
        return await self._for_peers.models_here()

    # Membership: who peers are to this node -----------------------------------------------------

    def _urgent_news(self) -> object:
        return self._keeper.news, self.leaving.draining

    def _usual_news(self) -> object:
        return self.activity.own(), self.reports.own()

    def _on_joined(self, node_id: str) -> None:
        self._keeper.look_soon()
        self._tell_changed()

    def _on_lost(self, node_id: str, error: ExoError) -> None:
        """Plans of a lost member end here at once."""
        self._keeper.lost(node_id, error)
        self.activity.lost(node_id)
        self.reports.lost(node_id)
        self.rings.lose(node_id, error)
        self._tell_changed()

    def _members(self) -> dict[str, Member]:
        """Every live node as the planner calls it."""
        peers = {node_id: self.membership.handle_of(node_id) for node_id in self.membership.alive}
        return {self.config.node_id: self._for_peers, **peers}

    def _planner_id(self) -> str:
        """That of `topology`, which is not drawn for it: it is asked for with every beat."""
        own = self.config.node_id
        memory = self.membership.memory_bytes()
        memory[own] = self._own.capabilities().memory_total_bytes
        draining = self.membership.draining
        return planner_among(memory, draining | {own} if self.leaving.draining else draining)

    def _tell_changed(self) -> None:
        self._tasks.background(self._notify(), "notify")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
