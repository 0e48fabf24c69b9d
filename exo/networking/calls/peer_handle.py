"""A peer as this node calls it: one gRPC channel, every call with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from exo.download.progress import OnProgress, Progress
from exo.errors import InvalidFrame, PeerUnavailable, StepTimeout
from exo.networking.calls import messages
from exo.networking.calls.messages import (
    DrainState,
    GenerationEvent,
    GenerationRequest,
    HeldModel,
    ModelState,
    PlansSaid,
    Prepared,
    StepFailure,
)
from exo.networking.calls.serving_report import NodeReport, decode_report, encode_report
from exo.networking.connections import OPEN, Connections
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.generated.node_service_pb2_grpc import NodeServiceStub
from exo.networking.request_names import named
from exo.networking.rings.hidden_states import Wire, smaller, wanted
from exo.networking.rings.stream import RingStream
from exo.networking.rpc import CALL_TIMEOUT_S, errors_of, host_of, until_silent
from exo.shard import RingPlan
from exo.topology.capabilities import DeviceCapabilities
from exo.topology.placement import NodePace

_OWN_LAG = 0.25
"""Of a time-out: who notices its end so much too late did not get to run meanwhile, and cannot say
that nothing came."""

WARM_UP_TIMEOUT_S = 120.0
UNLOAD_TIMEOUT_S = 30.0
"""A first token may have to compile kernels and page in weights."""


@dataclass(frozen=True)
class PeerIdentity:
    """What a hello learned."""

    node_id: str
    instance_id: str
    api_url: str
    capabilities: DeviceCapabilities


@dataclass(frozen=True)
class Beat:
    """One heartbeat. `sees_you`: the sender has a working connection to the receiver too;
    `progress`: what it does for models now, or did lately; `plans`: what it knows of plans;
    `report`: what it computes for whom; `silent`: nodes that did not answer it just now;
    `draining`: it is to have no part in rings."""

    memory_available_bytes: int
    max_epoch: int
    sees_you: bool
    progress: tuple[Progress, ...] = ()
    plans: PlansSaid = field(default_factory=PlansSaid)
    report: NodeReport = field(default_factory=NodeReport)
    silent: frozenset[str] = frozenset()
    draining: bool = False


class PeerHandle:
    """`close` ends every call in flight with PeerUnavailable: nobody waits for a dead peer."""

    def __init__(self, address: str, connections: Connections = OPEN) -> None:
        self.address = address
        self.node_id = ""
        self._connections = connections
        self._channel = connections.aio_channel(address)
        self._stub = NodeServiceStub(self._channel)
        self._ring_port = 0
        self._wire = Wire.EXACT
        self._streams: weakref.WeakSet[RingStream] = weakref.WeakSet()

    @property
    def _name(self) -> str:
        return f"{self.node_id or 'peer'} at {self.address}"

    async def close(self) -> None:
        for stream in list(self._streams):
            stream.cancel()
        await self._channel.close(grace=None)

    async def hello(self, request: pb.HelloRequest) -> PeerIdentity:
        """Learn who is there.

        Raises:
            PeerUnavailable: nobody, or something that is not exo.
            InvalidRequest: the peer refuses this node (another cluster, protocol, same id).
        """
        with errors_of(self._name):
            reply = await self._stub.Hello(request, timeout=CALL_TIMEOUT_S)
        if reply.protocol != messages.PROTOCOL:
            raise InvalidFrame(
                f"{self._name} speaks protocol {reply.protocol}, this node {messages.PROTOCOL}: "
                "run the same version of exo on all nodes"
            )
        self.node_id, self._ring_port = reply.node_id, reply.ring_port
        self._wire = wanted(reply.wire)
        return PeerIdentity(
            reply.node_id,
            reply.instance_id,
            reply.api_url,
            messages.capabilities_from_pb(reply.capabilities),
        )

    async def heartbeats(
        self,
        own_id: str,
        own_beat: Callable[[], Beat],
        rest: Callable[[], Awaitable[None]],
        timeout_s: Callable[[], float],
    ) -> AsyncGenerator[tuple[Beat, float], None]:
        """Send a beat whenever `rest` has returned; yield each answer with its round trip in
        seconds.

        Raises:
            StepTimeout: an answer took longer than `timeout_s`.
            PeerUnavailable: the stream was cut.
        """
        with errors_of(self._name):
            call = self._stub.Heartbeats(metadata=(("exo-node-id", own_id),))
            ended = asyncio.ensure_future(call.code())
            try:
                for counter in itertools.count(1):
                    yield await self._answered(_exchange(call, counter, own_beat()), timeout_s())
                    resting = asyncio.ensure_future(rest())
                    try:
                        await asyncio.wait([ended, resting], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        resting.cancel()
                    if ended.done():
                        # Between two beats: a cut is known at once, not at the next beat.
                        raise PeerUnavailable(f"the connection to node {self._name} was cut")
            finally:
                call.cancel()
                await asyncio.wait([ended])

    async def _answered(
        self, exchange: Coroutine[Any, Any, object], patience_s: float
    ) -> tuple[Beat, float]:
        """The answer to a beat, and after how many seconds it came. Raises what `heartbeats`
        does."""
        sent, waiting = time.monotonic(), asyncio.ensure_future(exchange)
        try:
            while not (await asyncio.wait([waiting], timeout=patience_s))[0]:
                if time.monotonic() - sent < patience_s * (1 + _OWN_LAG):
                    raise StepTimeout(
                        f"node {self._name} missed its heartbeat for {patience_s:.1f} s"
                    )
                # This process itself did not get to run: not the peer's fault.
                sent = time.monotonic()
        finally:
            waiting.cancel()
        answer = waiting.result()
        if answer is grpc.aio.EOF or not isinstance(answer, pb.Heartbeat):
            raise PeerUnavailable(f"node {self._name} ended the heartbeats")
        return beat_from_pb(answer), time.monotonic() - sent

    async def goodbye(self, node_id: str, instance_id: str) -> None:
        request = pb.GoodbyeRequest(node_id=node_id, instance_id=instance_id)
        with errors_of(self._name):
            await self._stub.Goodbye(request, timeout=0.5)

    async def drain(self, *, undo: bool = False) -> DrainState:
        """Have the peer leave its rings, or be used for them again; asked again it says how far it
        is."""
        with errors_of(self._name):
            reply = await self._stub.Drain(pb.DrainRequest(undo=undo), timeout=CALL_TIMEOUT_S)
        return DrainState(tuple(reply.models), dict(reply.problems))

    async def read_log(self, lines: int) -> list[str]:
        """The last lines of the peer's log, oldest first."""
        with errors_of(self._name):
            request = pb.ReadLogRequest(lines=lines)
            reply = await self._stub.ReadLog(request, timeout=CALL_TIMEOUT_S)
        return list(reply.lines)

    async def ensure_plan(
        self,
        model_id: str,
        dead_hash: str,
        on_progress: OnProgress,
        *,
        make_room: bool = True,
        renew: bool = False,
    ) -> RingPlan:
        """Ask the planner for a ready plan of the model, not `dead_hash`; it is made if there is
        none, where idle models may have to go if `make_room`, or if `renew`."""
        request = pb.EnsurePlanRequest(
            model_id=model_id, dead_hash=dead_hash, keep_others=not make_room, renew=renew
        )
        with errors_of(self._name):
            call = self._stub.EnsurePlan(request, metadata=named())
            async with contextlib.aclosing(until_silent(self._name, call)) as events:
                async for event in events:
                    if event.HasField("plan"):
                        return messages.plan_from_pb(event.plan)
                    on_progress(messages.progress_from_pb(event.progress))
        raise PeerUnavailable(f"planner {self._name} ended the call without a plan")

    async def prepare(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> Prepared:
        """Ask what the model needs and the peer has; `renew` makes all its files present there."""
        with errors_of(self._name):
            request = pb.PrepareRequest(model_id=model_id, renew=renew)
            call = self._stub.Prepare(request, metadata=named())
            async with contextlib.aclosing(until_silent(self._name, call)) as events:
                async for event in events:
                    if event.HasField("description"):
                        found = messages.description_from_pb(model_id, event.description)
                        pace = NodePace(event.read_bytes_s, dict(event.round_trips_s))
                        held = dict(event.held_bytes)
                        return Prepared(found, event.memory_bytes, held, pace)
                    on_progress(messages.progress_from_pb(event.progress))
        raise PeerUnavailable(f"{self._name} ended the call without describing {model_id}")

    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None:
        """Have the peer load its shard of the plan and open its link to the next member."""
        with errors_of(self._name):
            request = pb.LoadShardRequest(plan=messages.plan_to_pb(plan))
            call = self._stub.LoadShard(request, metadata=named())
            async with contextlib.aclosing(until_silent(self._name, call)) as events:
                async for event in events:
                    if event.HasField("loaded_hash"):
                        return
                    on_progress(messages.progress_from_pb(event.progress))
        raise PeerUnavailable(f"{self._name} ended the call before its shard was loaded")

    async def warm_up(self, plan: RingPlan) -> None:
        """Ask the head for one token out of the whole ring."""
        with errors_of(self._name):
            await self._stub.WarmUp(
                pb.PlanRequest(plan=messages.plan_to_pb(plan)), timeout=WARM_UP_TIMEOUT_S
            )

    async def publish(self, plan: RingPlan) -> None:
        with errors_of(self._name):
            await self._stub.PublishPlan(
                pb.PlanRequest(plan=messages.plan_to_pb(plan)), timeout=CALL_TIMEOUT_S
            )

    async def retire(self, plan_hash: str, reason: str, unload_model: str = "") -> None:
        request = pb.RetirePlanRequest(
            plan_hash=plan_hash, reason=reason, unload_model=unload_model
        )
        # An engine frees memory between two steps.
        timeout_s = UNLOAD_TIMEOUT_S if unload_model else CALL_TIMEOUT_S
        with errors_of(self._name):
            await self._stub.RetirePlan(request, timeout=timeout_s)

    async def idle_s(self, plan_hash: str) -> float | None:
        """Seconds since something ran on a plan the peer heads; None while something does."""
        request = pb.IdleTimeRequest(plan_hash=plan_hash)
        with errors_of(self._name):
            reply = await self._stub.IdleTime(request, timeout=CALL_TIMEOUT_S)
        return reply.seconds if reply.idle else None

    async def unload(self, plan_hash: str) -> bool:
        """Have the peer end a plan it heads and free its memory everywhere; False if something
        runs on it."""
        request = pb.UnloadPlanRequest(plan_hash=plan_hash)
        with errors_of(self._name):
            reply = await self._stub.UnloadPlan(request, timeout=UNLOAD_TIMEOUT_S)
        return bool(reply.unloaded)

    async def models_here(self) -> list[HeldModel]:
        """Models whose files are on the peer."""
        with errors_of(self._name):
            reply = await self._stub.ListModels(pb.ListModelsRequest(), timeout=CALL_TIMEOUT_S)
        return [HeldModel(m.model_id, m.size, m.whole, m.last_used) for m in reply.models]

    async def report_failure(self, failure: StepFailure) -> None:
        with errors_of(self._name):
            await self._stub.ReportFailure(messages.failure_to_pb(failure), timeout=CALL_TIMEOUT_S)

    async def generate(
        self, plan_hash: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        """The tokens of a sequence, from the head; closing the iterator cancels it there."""
        with errors_of(self._name):
            call = self._stub.Generate(
                messages.generation_to_pb(plan_hash, request), metadata=named()
            )
            try:
                async with contextlib.aclosing(until_silent(self._name, call)) as events:
                    async for event in events:
                        yield messages.event_from_pb(event)
            finally:
                call.cancel()

    async def open_ring(self, plan_hash: str, wire: Wire) -> RingStream:
        """The kept-open stream of ring frames to this peer, which a hello has asked; hidden states
        in as few bytes as either end wants, this one's `wire`.

        Raises:
            PeerUnavailable: it cannot be reached.
        """
        host = host_of(self.address)
        stream = await RingStream.open(
            self._name,
            host,
            self._ring_port,
            plan_hash,
            smaller(wire, self._wire),
            self._connections.tunnel(is_client=True),
        )
        self._streams.add(stream)
        return stream


async def _exchange(call: grpc.aio.StreamStreamCall, counter: int, beat: Beat) -> object:
    await call.write(beat_to_pb(counter, beat))
    return await call.read()


def beat_to_pb(counter: int, beat: Beat) -> pb.Heartbeat:
    return pb.Heartbeat(
        counter=counter,
        memory_available_bytes=beat.memory_available_bytes,
        max_epoch=beat.max_epoch,
        sees_you=beat.sees_you,
        progress=map(messages.progress_to_pb, beat.progress),
        models=(pb.ModelState(**vars(state)) for state in beat.plans.models),
        holds=sorted(beat.plans.holds),
        plans=map(messages.plan_to_pb, beat.plans.plans),
        report=encode_report(beat.report),
        silent=sorted(beat.silent),
        draining=beat.draining,
    )


def beat_from_pb(message: pb.Heartbeat) -> Beat:
    """Raises PlanMismatch where a plan contradicts itself, InvalidFrame where the report cannot be
    read."""
    said = PlansSaid(
        tuple(ModelState(m.model_id, m.epoch, m.plan_hash, m.wanted) for m in message.models),
        frozenset(message.holds),
        tuple(map(messages.plan_from_pb, message.plans)),
    )
    return Beat(
        message.memory_available_bytes,
        message.max_epoch,
        message.sees_you,
        tuple(map(messages.progress_from_pb, message.progress)),
        said,
        decode_report(message.report),
        frozenset(message.silent),
        message.draining,
    )
