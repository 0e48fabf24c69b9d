"""What a node does for its peers and, as a member of its own plans, for itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from exo.download.progress import OnProgress
from exo.download.sharing import Sharing
from exo.errors import InvalidRequest
from exo.logs import recent_lines
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
from exo.networking.calls.server import NodeHandler
from exo.networking.discovery.base import Route
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.rings.frames import Frame
from exo.orchestration.answers import Answers
from exo.orchestration.config import NodeConfig
from exo.orchestration.files.activity import Activity
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.files.usage import Usage
from exo.orchestration.leaving import Leaving
from exo.orchestration.membership.membership import Membership
from exo.orchestration.own_shards import OwnShards
from exo.orchestration.planning.keeper import PlanKeeper
from exo.orchestration.serving.reports import Reports
from exo.orchestration.serving.rings import Rings
from exo.shard import RingPlan


class ListensAt(NamedTuple):
    """Where a node that listens says it does."""

    api_url: str
    ring_port: int


class ForPeers(NodeHandler):
    """Each request goes to the part of the node that knows; `listens_at` is asked when a peer says
    hello."""

    def __init__(
        self,
        config: NodeConfig,
        sharing: Sharing,
        membership: Membership,
        keeper: PlanKeeper,
        rings: Rings,
        leaving: Leaving,
        own: OwnShards,
        answers: Answers,
        files: ModelFiles,
        usage: Usage,
        activity: Activity,
        reports: Reports,
        interface_of: Callable[[str], tuple[str, int]],
        listens_at: Callable[[], ListensAt],
    ) -> None:
        self.sharing = sharing
        self._config = config
        self._membership = membership
        self._keeper = keeper
        self._rings = rings
        self._leaving = leaving
        self._own = own
        self._answers = answers
        self._files = files
        self._usage = usage
        self._activity = activity
        self._reports = reports
        self._interface_of = interface_of
        self._listens_at = listens_at

    # Plans --------------------------------------------------------------------------------------

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
        return await self._own.prepare(model_id, on_progress, renew=renew)

    async def models_here(self) -> list[HeldModel]:
        """Models whose files, or some of them, are on this machine."""
        return await self._files.here(self._usage.last_used())

    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None:
        await self._own.load(plan, on_progress)

    async def warm_up(self, plan: RingPlan) -> None:
        await self._answers.warm_up(plan)

    async def publish(self, plan: RingPlan) -> None:
        await self._keeper.publish(plan)

    async def retire(self, plan_hash: str, reason: str, unload_model: str = "") -> None:
        await self._keeper.retire(plan_hash, reason, unload_model)

    async def idle_s(self, plan_hash: str) -> float | None:
        return self._rings.idle_s(plan_hash)

    async def unload(self, plan_hash: str) -> bool:
        """End a plan this node heads, on which nothing runs, and free its memory on every member;
        False if something does."""
        return await self._rings.unload(plan_hash, self._keeper.published.forget)

    def on_frame(self, plan_hash: str, frame: Frame) -> None:
        self._rings.on_frame(plan_hash, frame)

    def on_failure(self, failure: StepFailure) -> None:
        self._rings.on_failure(failure)

    def generate_as_head(
        self, plan_hash: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        return self._rings.generate(plan_hash, request)

    async def drain(self, *, undo: bool = False) -> DrainState:
        """Leave all rings, or be used for them again; asked again it says how far it is."""
        if undo:
            self._leaving.undo()
        else:
            self._leaving.drain()
        self._keeper.look_soon()
        return DrainState(tuple(self._leaving.models), dict(self._leaving.problems))

    async def read_log(self, lines: int) -> list[str]:
        """The last lines of this node's log, oldest first."""
        return recent_lines(lines)

    # Membership ---------------------------------------------------------------------------------

    def on_hello(self, request: pb.HelloRequest, host: str) -> pb.HelloReply:
        own = self._config
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
        self._membership.heard(request.node_id, request.instance_id, route)
        if request.node_id == own.node_id and request.instance_id != own.instance_id:
            raise InvalidRequest(
                f"two nodes call themselves {own.node_id}, one of them at {route.address}: "
                "start one with another --node-id"
            )
        return pb.HelloReply(
            protocol=messages.PROTOCOL,
            node_id=own.node_id,
            instance_id=own.instance_id,
            api_url=self._listens_at().api_url,
            capabilities=messages.capabilities_to_pb(self._own.capabilities()),
            ring_port=self._listens_at().ring_port,
            wire=self._config.wire,
        )

    def on_beat(self, node_id: str, beat: Beat) -> Beat:
        self._membership.told_by(node_id, beat)
        self.heard(node_id, beat)
        return self.beat_to(node_id)

    def on_goodbye(self, node_id: str, instance_id: str) -> None:
        self._membership.left(node_id, instance_id)

    def beat_to(self, node_id: str) -> Beat:
        """What this node has to say to another one."""
        return Beat(
            self._own.capabilities().memory_available_bytes,
            self._keeper.epoch,
            self._membership.connected_to(node_id),
            self._activity.own(),
            self._keeper.says(node_id),
            self._reports.own(),
            self._membership.silent,
            self._leaving.draining,
        )

    def heard(self, node_id: str, beat: Beat) -> None:
        """What a beat says, whoever began to speak."""
        self._activity.heard(node_id, beat.progress)
        self._keeper.heard(node_id, beat.plans)
        self._reports.heard(node_id, beat.report)
