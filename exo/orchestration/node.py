"""StandardNode: one running exo. Wires discovery, membership, planner, rings and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from exo.download.progress import OnProgress, Progress, unheard
from exo.download.sharing import Sharing
from exo.download.store import ModelStore
from exo.errors import (
    ExoError,
    InvalidRequest,
    PeerUnavailable,
    PlanMismatch,
    StepTimeout,
)
from exo.inference.engine import InferenceEngine
from exo.inference.sampling import SamplingParams
from exo.models.description import ModelDescription
from exo.networking.calls import messages
from exo.networking.calls.messages import (
    GenerationEvent,
    GenerationRequest,
    HeldModel,
    Prepared,
    StepFailure,
)
from exo.networking.calls.peer_handle import Beat
from exo.networking.calls.server import NodeHandler, NodeServer
from exo.networking.discovery.base import Discovery, Route
from exo.networking.discovery.interfaces import KINDS, Interface
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.rings.frames import Frame
from exo.orchestration.config import NodeConfig
from exo.orchestration.files.activity import Activity
from exo.orchestration.files.cluster_files import ClusterFiles
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.files.usage import Usage
from exo.orchestration.membership.membership import Membership
from exo.orchestration.planning.planner import Member, Planner
from exo.orchestration.planning.published import PublishedPlans
from exo.orchestration.serving.rings import Rings
from exo.shard import RingPlan
from exo.tasks import TaskOwner
from exo.topology.capabilities import DeviceCapabilities, probe, refreshed
from exo.topology.topology import NodeView, Topology

logger = logging.getLogger(__name__)

PLAN_ATTEMPTS = 4
"""How often a request asks for another plan because the one it was given had just ended."""

SETTLE_S = 0.2
"""How long a request lets members find out who is gone before it asks again, times the attempt."""

REPLAN_S = 1.0
"""How soon a plan that failed for want of a member is tried again."""

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
        interfaces: list[Interface],
    ) -> None:
        self.config = config
        self.store = store
        self.sharing = sharing
        self.engine = engine
        self.api_url = ""
        self._capabilities = probe(config.memory_bytes)
        self._probed_at = time.monotonic()
        self._discovery = discovery
        self._interfaces = interfaces
        self._server = NodeServer(self)
        self.membership = Membership(
            config,
            self._beat_to,
            self._on_joined,
            self._on_lost,
            self._on_plans,
            self._interface_of,
        )
        sharing.neighbours = self.membership.addresses
        self.rings = Rings(
            config.node_id,
            engine,
            config.step_timeout_s,
            self.membership.handle_of,
            lambda: self.membership.alive,
            lambda plan: self.plans.remove(plan.hash),
        )
        self.plans = PublishedPlans(self._tell_changed)
        self._planner = Planner(config.node_id, self._members, lambda: self.plans, self._next_epoch)
        self.usage = Usage(config.home / "usage.json")
        self.activity = Activity(config.node_id)
        self.files = ModelFiles(config.node_id, store, engine, self.activity)
        self.cluster_files = ClusterFiles(config.node_id, self.files, self._members, self.rings)
        self._changed = asyncio.Condition()
        self._members_changed = asyncio.Event()
        self._tasks = TaskOwner(f"node {config.node_id}")

    # Life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for peers and look for them.

        Raises:
            OSError: the port is taken.
        """
        hosts = sorted({i.address for i in self._interfaces} | {"127.0.0.1"})
        if self.config.node_host:
            hosts = [self.config.node_host]
        self.membership.port = await self._server.start(hosts, self.config.listen_port)
        self._tasks.background(self._replan_on_change(), "replan")
        await self._discovery.start(self.membership, self.port)
        logger.info("node %s listens on %s port %d", self.config.node_id, hosts, self.port)

    async def stop(self) -> None:
        """Say goodbye, end every session, free everything."""
        self.usage.write()
        self.store.close()
        await self._tasks.close()
        await self._discovery.stop()
        await self._planner.close()
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
        """Tokens of one sequence on the model's ring, which is made first if there is none.
        Closing the iterator cancels the sequence on every member.

        Raises:
            ExoError: no plan could be made, or the sequence failed.
        """
        dead_hash = ""
        started = False
        for attempt in range(1, PLAN_ATTEMPTS + 1):
            plan = await self.ensure_plan(model_id, dead_hash, on_progress)
            try:
                async with contextlib.aclosing(self._generate_at_head(plan, request)) as events:
                    async for event in events:
                        if not started:
                            self.usage.note(model_id)
                        started = True
                        yield event
                return
            except (PlanMismatch, PeerUnavailable) as error:
                # The plan ended before a token came out of it: another one serves as well.
                if started or attempt == PLAN_ATTEMPTS:
                    raise
                logger.info("%s; asking for another plan", error.message)
                dead_hash = plan.hash
                await asyncio.sleep(attempt * SETTLE_S)

    async def _generate_at_head(
        self, plan: RingPlan, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        if plan.head_id == self.config.node_id:
            events = self.rings.generate(plan.hash, request)
        else:
            events = self.membership.handle_of(plan.head_id).generate(plan.hash, request)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.token is not None or event.finish_reason:
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
            "epoch": self._epoch_seen(),
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

    # Plans: what peers ask of this node ---------------------------------------------------------

    async def ensure_plan(
        self, model_id: str, dead_hash: str, on_progress: OnProgress, *, make_room: bool = True
    ) -> RingPlan:
        """A plan that serves: the published one unless it is `dead_hash`, else the planner's, which
        may unload idle models for it if `make_room`."""
        for attempt in range(1, PLAN_ATTEMPTS + 1):
            self.plans.remove(dead_hash)
            if (known := self.plans.of(model_id)) is not None:
                return known
            planner_id = self.topology().planner_id
            try:
                if planner_id == self.config.node_id:
                    return await self._planner.ensure(model_id, on_progress, make_room=make_room)
                planner = self.membership.handle_of(planner_id)
                plan = await planner.ensure_plan(
                    model_id, dead_hash, on_progress, make_room=make_room
                )
            except PeerUnavailable:
                # A planner that is gone is followed by another one.
                if attempt == PLAN_ATTEMPTS or self.topology().planner_id == planner_id:
                    raise
            else:
                self._take_plan(plan)
                return plan
        raise AssertionError("the loop returns or raises")

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
        return Prepared(description, memory, held)

    async def models_here(self) -> list[HeldModel]:
        """Models whose files, or some of them, are on this machine."""
        return await self.files.here(self.usage.last_used())

    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None:
        """Bring the files of this node's shard of a plan, load it and take its place in the ring.

        Raises:
            PlanMismatch: the plan is stale, or means other files than this node has.
        """
        published = self.plans.of(plan.model_id)
        if published is not None and plan.epoch < published.epoch:
            raise PlanMismatch(
                f"plan {plan.hash} of {plan.model_id} has epoch {plan.epoch}; node "
                f"{self.config.node_id} serves epoch {published.epoch}"
            )
        self.plans.saw_epoch(plan.epoch)
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
            await self.rings.join(plan, description, path, heard)
        except ExoError as error:
            self.activity.note(plan.model_id, Progress("failed", warning=error.message))
            raise
        self.activity.note(plan.model_id, Progress("ready", str(shard)))

    async def warm_up(self, plan: RingPlan) -> None:
        """Prove the ring with one token, before the plan is published."""
        request = GenerationRequest(
            f"warm-up-{plan.hash}", (0,), SamplingParams(temperature=0), max_tokens=1
        )
        async with contextlib.aclosing(self._generate_at_head(plan, request)) as events:
            async for _ in events:
                logger.info("plan %s of %s is ready", plan.hash, plan.model_id)

    async def publish(self, plan: RingPlan) -> None:
        """The plan serves; shards that no plan needs any more are given back."""
        self._take_plan(plan)
        await self.rings.unload_unused(plan.model_id)

    def _take_plan(self, plan: RingPlan) -> None:
        """The plan serves, unless a later one does; the other one's head lets it run out."""
        other = self.plans.add(plan)
        if other is not None and other.head_id == self.config.node_id:
            self._tasks.background(self.rings.retire(other.hash, "another plan serves"), "retire")
        if plan.planner_id != self.topology().planner_id:
            # Made by who did not see the planner: if that is this node, it looks again.
            self._members_changed.set()

    async def retire(self, plan_hash: str, reason: str, unload_model: str = "") -> None:
        """No new sequences on this plan; with `unload_model` that model's memory is given back."""
        logger.info("plan %s is retired: %s", plan_hash, reason)
        self.plans.remove(plan_hash)
        await self.rings.retire(plan_hash, reason)
        if unload_model:
            self.plans.forget(unload_model)
            await self.rings.unload_unused(unload_model)

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
        route = Route(host, request.port, *self._interface_of(host))
        self.membership.heard(request.node_id, request.instance_id, route)
        if request.node_id in self.membership.alive:
            # It had lost this node, which did not notice: plans may have been made without it.
            self._members_changed.set()
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
            plans=map(messages.plan_to_pb, self.plans),
            ring_port=self._server.ring_port,
        )

    def on_beat(self, node_id: str, beat: Beat) -> Beat:
        self.activity.heard(node_id, beat.progress)
        return self._beat_to(node_id)

    def on_goodbye(self, node_id: str, instance_id: str) -> None:
        self.membership.left(node_id, instance_id)

    def _beat_to(self, node_id: str) -> Beat:
        return Beat(
            self._own_capabilities().memory_available_bytes,
            self._epoch_seen(),
            self.membership.connected_to(node_id),
            self.activity.own(),
        )

    def _own_capabilities(self) -> DeviceCapabilities:
        """With the memory that was free a moment ago."""
        now = time.monotonic()
        if self.config.memory_bytes is None and now - self._probed_at > MEMORY_PROBE_S:
            self._probed_at = now
            self._capabilities = refreshed(self._capabilities)
        return self._capabilities

    def _on_joined(self, node_id: str) -> None:
        self._members_changed.set()
        self._tell_changed()

    def _on_lost(self, node_id: str, error: ExoError) -> None:
        """Plans of a lost member end here at once."""
        self.plans.remove_with(node_id)
        self.activity.lost(node_id)
        self.rings.lose(node_id, error)
        self._members_changed.set()
        self._tell_changed()

    def _on_plans(self, plans: tuple[RingPlan, ...]) -> None:
        for plan in plans:
            self._take_plan(plan)

    async def _replan_on_change(self) -> None:
        """After members came or went, the planner fits the served models to who is there."""
        while True:
            await self._members_changed.wait()
            # They often come several at once.
            await asyncio.sleep(self.config.heartbeat_interval_s)
            self._members_changed.clear()
            for model_id in list(self.plans.served):
                if self.topology().planner_id != self.config.node_id:
                    break
                try:
                    await self._planner.ensure(model_id, unheard, renew=True)
                except (PeerUnavailable, PlanMismatch, StepTimeout) as error:
                    logger.warning("no new plan of %s yet: %s", model_id, error.message)
                    asyncio.get_running_loop().call_later(REPLAN_S, self._members_changed.set)
                except ExoError as error:
                    # Whoever asks for the model next gets this error, or a working plan.
                    logger.warning("no new plan of %s: %s", model_id, error.message)

    def _interface_of(self, host: str) -> tuple[str, int]:
        """(name, rank) of the interface that leads to `host`."""
        found = next((i for i in self._interfaces if i.reaches(host)), None)
        return (found.name, found.rank) if found else ("other", KINDS.index("other"))

    def _members(self) -> dict[str, Member]:
        """Every live node as the planner calls it."""
        peers = {node_id: self.membership.handle_of(node_id) for node_id in self.membership.alive}
        return {self.config.node_id: self, **peers}

    def _epoch_seen(self) -> int:
        return max(self.plans.max_epoch, self.membership.max_epoch)

    def _next_epoch(self) -> int:
        self.plans.saw_epoch(self._epoch_seen() + 1)
        return self.plans.max_epoch

    def _tell_changed(self) -> None:
        self._tasks.background(self._notify(), "notify")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
