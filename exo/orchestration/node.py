"""StandardNode: one running exo. Wires discovery, membership, planner, rings and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from exo.download.progress import OnProgress, Progress, unheard
from exo.download.sharing import Sharing
from exo.download.store import ModelStore
from exo.download.watch import watched
from exo.errors import (
    ExoError,
    InvalidRequest,
    PeerUnavailable,
    PlanMismatch,
)
from exo.inference.engine import InferenceEngine
from exo.inference.sampling import SamplingParams
from exo.models.description import ModelDescription
from exo.networking.calls import messages
from exo.networking.calls.messages import (
    DrainState,
    GenerationEvent,
    GenerationRequest,
    HeldModel,
    Prepared,
    StepFailure,
)
from exo.networking.calls.peer_handle import Beat
from exo.networking.calls.server import NodeHandler, NodeServer
from exo.networking.discovery.base import Discovery, Route
from exo.networking.discovery.interfaces import Interface
from exo.networking.discovery.network import Network
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.rings.frames import Frame
from exo.orchestration.config import NodeConfig
from exo.orchestration.files.activity import Activity
from exo.orchestration.files.cluster_files import ClusterFiles
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.files.usage import Usage
from exo.orchestration.leaving import Leaving
from exo.orchestration.membership.membership import Membership
from exo.orchestration.membership.rhythm import News
from exo.orchestration.planning.keeper import PlanKeeper
from exo.orchestration.planning.planner import Member
from exo.orchestration.serving.continuation import generate_on_any_ring
from exo.orchestration.serving.reports import Reports
from exo.orchestration.serving.rings import Rings
from exo.shard import RingPlan
from exo.tasks import TaskOwner
from exo.topology.capabilities import DeviceCapabilities, probe, refreshed
from exo.topology.partitioning import Partition
from exo.topology.placement import STEP_S, NodePace
from exo.topology.topology import NodeView, Topology

logger = logging.getLogger(__name__)

MEMORY_PROBE_S = 2.0


class StandardNode(NodeHandler):
    """One node's life: `start`, then requests and peers, then `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        engine: InferenceEngine,
        store: ModelStore,
        sharing: Sharing,
        discovery: Discovery,
        network: Network,
    ) -> None:
        self.config = config
        self.store = store
        self.sharing = sharing
        self.engine = engine
        self.api_url = ""
        self._capabilities = probe(config.memory_bytes)
        self._probed_at = time.monotonic()
        self._discovery = discovery
        self._network = network
        self._server = NodeServer(self)
        self.membership = Membership(
            config,
            self._beat_to,
            self._on_joined,
            self._on_lost,
            self._on_beat,
            network.interface_of,
            lambda: self.rings.watched,
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
        self.reports = Reports(config.node_id, self.rings, engine)
        self._keeper = PlanKeeper(
            config.node_id,
            self._members,
            lambda: self.topology().planner_id,
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
        self._ends = False
        self._answering = 0  # sequences of this node's clients that have, or had, a ring
        self.usage = Usage(config.home / "usage.json")
        self.activity = Activity(config.node_id)
        self.files = ModelFiles(config.node_id, store, engine, self.activity)
        self.cluster_files = ClusterFiles(config.node_id, self.files, self._members, self.rings)
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
        await self._discovery.start(self.membership, self.port)
        self._tasks.background(self._network.follow(self._use), "network")
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
        self._ends = True
        await self.leaving.leave(limit_s, self._needed, say)

    async def stop(self) -> None:
        """Say goodbye, end every session, free everything."""
        await self.leaving.close()
        self.usage.write()
        self.store.close()
        await self._tasks.close()
        await self._discovery.stop()
        await self._keeper.close()
        await self.rings.close()
        await self.membership.stop()
        await self._server.stop()
        await self.engine.close()

    @property
    def port(self) -> int:
        """Where this node listens for others."""
        return self.membership.port

    # What the API and the CLI ask ---------------------------------------------------------------

    async def generate(
        self, model_id: str, request: GenerationRequest, on_progress: OnProgress
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Tokens of one sequence on the model's ring, which is made first if there is none, and
        again if it ends. Closing the iterator cancels the sequence on every member.

        Raises:
            ExoError: no plan could be made, or the sequence failed.
        """
        if self._ends:
            raise PeerUnavailable(f"node {self.config.node_id} is shutting down; ask another one")
        request = replace(request, timeout_s=self.config.serving.request_timeout_s)

        has_ring = False

        async def ring(dead_hash: str) -> RingPlan:
            nonlocal has_ring
            plan = await self.ensure_plan(model_id, dead_hash, on_progress)
            self._answering += not has_ring
            has_ring = True
            return plan

        def waits() -> None:
            away = self.membership.away[:1] or ["the ring"]
            on_progress(Progress("waiting", f"for {away[0]} to come back"))

        answer = generate_on_any_ring(
            request,
            ring,
            self._generate_at_head,
            self.config.serving.rejoin_wait_s,
            lambda: self.membership.lost_at,
            waits,
        )
        is_first = True
        try:
            async with contextlib.aclosing(answer):
                async for event in answer:
                    if event.prompt_done:
                        total = len(request.prompt)
                        done = min(event.prompt_done, total)
                        on_progress(Progress("reading", "the prompt", done, total))
                        continue
                    if is_first:
                        self.usage.note(model_id)
                    is_first = False
                    yield event
        finally:
            self._answering -= has_ring

    async def _generate_at_head(
        self, plan: RingPlan, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        if plan.head_id == self.config.node_id:
            events = self.rings.generate(plan.hash, request)
        else:
            events = self.membership.handle_of(plan.head_id).generate(plan.hash, request)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.token is not None or event.finish_reason or event.prompt_done:
                    yield event

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
            self._own_capabilities(),
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
            "epoch": self._keeper.epoch,
            "discovery": self._discovery.status(),
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

    async def drain(self, *, undo: bool = False) -> DrainState:
        """Leave all rings, or be used for them again; asked again it says how far it is."""
        if undo:
            self.leaving.undo()
        else:
            self.leaving.drain()
        self._keeper.look_soon()
        return DrainState(tuple(self.leaving.models), dict(self.leaving.problems))

    async def drain_node(self, node_id: str, *, undo: bool) -> DrainState:
        """The same of any node of the cluster.

        Raises:
            InvalidRequest: there is no such node.
        """
        members = self._members()
        if node_id not in members:
            known = ", ".join(sorted(members))
            raise InvalidRequest(f"no live node is called {node_id!r}; there are: {known}")
        return await members[node_id].drain(undo=undo)

    def _needed(self) -> str:
        """What goes on here that others wait for."""
        needed = []
        if self._answering:
            needed.append(f"{self._answering} answer(s)")
        if self._server.files_read:
            needed.append("files that other nodes fetch from this one")
        return f"finishing {' and '.join(needed)}" if needed else ""

    # Plans: what peers ask of this node ---------------------------------------------------------

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

    async def prepare(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> Prepared:
        """Say what the model needs and what memory a shard may take, for which its configuration
        and the headers of its weight files are brought here; with `renew` all its files, newer ones
        if there are."""
        if renew:
            description = await self.files.bring(model_id, on_progress)
        else:
            _, description = await self.files.describe(model_id, on_progress)
        held = self.rings.held_bytes()
        own = held.pop(model_id, 0)
        if self.config.memory_bytes is not None:
            memory = max(0, self.config.memory_bytes - sum(held.values()))
        else:
            self._probed_at = 0.0  # what an unloaded model gave back counts at once
            memory = self._own_capabilities().memory_available_bytes + own
        return Prepared(description, memory, held, await self._pace())

    async def _pace(self) -> NodePace:
        """How fast this node decodes: as its steps say, of the largest shard that had any, else as
        its memory is read. A node that has heard no other measures nothing: it has no choice."""
        others, _ = self.membership.views()
        rate, largest = (await self.engine.read_rate() if others else 0.0), 0
        for shard, seconds in list(self.engine.times.token_s.items()):
            weights = self.files.weights_bytes(shard)
            if weights > largest:
                rate, largest = weights / max(1e-6, seconds - STEP_S), weights
        return NodePace(
            rate / max(1.0, self.engine.times.slowdown), self.membership.round_trips_s()
        )

    async def models_here(self) -> list[HeldModel]:
        """Models whose files, or some of them, are on this machine."""
        return await self.files.here(self.usage.last_used())

    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None:
        """Bring the files of this node's shard of a plan, load it and take its place in the ring.

        Raises:
            PlanMismatch: the plan is stale, or means other files than this node has.
        """
        self._keeper.check_not_stale(plan)
        path, description = await self.files.describe(plan.model_id, on_progress)
        if description.checkpoint != plan.checkpoint:
            raise PlanMismatch(
                f"plan {plan.hash} is for files {plan.checkpoint} of {plan.model_id}; node "
                f"{self.config.node_id} has {description.checkpoint}"
            )

        def heard(progress: Progress) -> None:
            self.activity.note(plan.model_id, progress)
            on_progress(progress)

        shard = plan.shard_of(self.config.node_id)
        path = await self.files.bring_shard(shard, path, on_progress)
        try:
            await watched(
                lambda moves: self.rings.join(plan, description, path, moves),
                heard,
                Progress("loading", str(shard), node_id=self.config.node_id),
            )
        except ExoError as error:
            self.activity.note(plan.model_id, Progress("failed", warning=error.message))
            raise
        self.activity.note(plan.model_id, Progress("ready", str(shard)))

    async def warm_up(self, plan: RingPlan) -> None:
        """Prove the ring with one token, before the plan is published."""
        request = GenerationRequest(
            f"warm-up-{plan.hash}",
            (0,),
            SamplingParams(temperature=0),
            max_tokens=1,
            shortcuts=False,
        )
        async with contextlib.aclosing(self._generate_at_head(plan, request)) as events:
            async for _ in events:
                logger.info("plan %s of %s is ready", plan.hash, plan.model_id)

    async def publish(self, plan: RingPlan) -> None:
        await self._keeper.publish(plan)

    async def retire(self, plan_hash: str, reason: str, unload_model: str = "") -> None:
        await self._keeper.retire(plan_hash, reason, unload_model)

    async def idle_s(self, plan_hash: str) -> float | None:
        return self.rings.idle_s(plan_hash)

    async def unload(self, plan_hash: str) -> bool:
        """End a plan this node heads, on which nothing runs, and free its memory on every member;
        False if something does."""
        plan = await self.rings.unload(plan_hash)
        if plan is not None:
            self.plans.forget(plan.model_id)
        return plan is not None

    def on_frame(self, plan_hash: str, frame: Frame) -> None:
        self.rings.on_frame(plan_hash, frame)

    def on_failure(self, failure: StepFailure) -> None:
        self.rings.on_failure(failure)

    def generate_as_head(
        self, plan_hash: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        return self.rings.generate(plan_hash, request)

    # Membership: who peers are to this node -----------------------------------------------------

    def on_hello(self, request: pb.HelloRequest, host: str) -> pb.HelloReply:
        own = self.config
        if request.protocol != messages.PROTOCOL:
            raise InvalidRequest(
                f"node {own.node_id} speaks protocol {messages.PROTOCOL}, not {request.protocol}: "
                "run the same version of exo on all nodes"
            )
        if request.cluster != own.cluster:
            raise InvalidRequest(
                f"node {own.node_id} belongs to cluster {own.cluster!r}, not {request.cluster!r}"
            )
        route = Route(host, request.port, *self._network.interface_of(host))
        self.membership.heard(request.node_id, request.instance_id, route)
        if request.node_id == own.node_id and request.instance_id != own.instance_id:
            raise InvalidRequest(
                f"two nodes call themselves {own.node_id}, one of them at {route.address}: "
                "start one with another --node-id"
            )
        return pb.HelloReply(
            protocol=messages.PROTOCOL,
            node_id=own.node_id,
            instance_id=own.instance_id,
            api_url=self.api_url,
            capabilities=messages.capabilities_to_pb(self._own_capabilities()),
            ring_port=self._server.ring_port,
            wire=self.config.wire,
        )

    def on_beat(self, node_id: str, beat: Beat) -> Beat:
        self.membership.told_by(node_id, beat)
        self._on_beat(node_id, beat)
        return self._beat_to(node_id)

    def on_goodbye(self, node_id: str, instance_id: str) -> None:
        self.membership.left(node_id, instance_id)

    def _beat_to(self, node_id: str) -> Beat:
        return Beat(
            self._own_capabilities().memory_available_bytes,
            self._keeper.epoch,
            self.membership.connected_to(node_id),
            self.activity.own(),
            self._keeper.says(node_id),
            self.reports.own(),
            self.membership.silent,
            self.leaving.draining,
        )

    def _urgent_news(self) -> object:
        return self._keeper.news, self.leaving.draining

    def _usual_news(self) -> object:
        return self.activity.own(), self.reports.own()

    def _own_capabilities(self) -> DeviceCapabilities:
        """With the memory that was free a moment ago."""
        now = time.monotonic()
        if self.config.memory_bytes is None and now - self._probed_at > MEMORY_PROBE_S:
            self._probed_at = now
            self._capabilities = refreshed(self._capabilities)
        return self._capabilities

    def _on_beat(self, node_id: str, beat: Beat) -> None:
        self.activity.heard(node_id, beat.progress)
        self._keeper.heard(node_id, beat.plans)
        self.reports.heard(node_id, beat.report)

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
        return {self.config.node_id: self, **peers}

    def _tell_changed(self) -> None:
        self._tasks.background(self._notify(), "notify")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
