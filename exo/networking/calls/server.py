"""The gRPC server: decodes what peers send and hands it to the node. One session's failure is
that session's alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from exo.download.progress import OnProgress, Progress
from exo.download.relay import listing_for_peer, relayed
from exo.download.sharing import Sharing
from exo.errors import ExoError, PeerUnavailable
from exo.networking.calls import messages
from exo.networking.calls.messages import (
    DrainState,
    GenerationEvent,
    GenerationRequest,
    HeldModel,
    Prepared,
    StepFailure,
)
from exo.networking.calls.peer_files import CHECKSUM
from exo.networking.calls.peer_handle import Beat, beat_from_pb, beat_to_pb
from exo.networking.connections import OPEN, Connections
from exo.networking.generated import node_service_pb2 as pb
from exo.networking.generated.node_service_pb2_grpc import (
    NodeServiceServicer,
    add_NodeServiceServicer_to_server,
)
from exo.networking.request_names import TakesName
from exo.networking.rings.frames import Frame
from exo.networking.rings.server import RingServer
from exo.networking.rpc import PULSE_S, SERVER_OPTIONS, abort, host_of
from exo.shard import RingPlan
from exo.tasks import Done, with_news, with_pulse

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Result = TypeVar("Result")


class NodeHandler(ABC):
    """What a node does for its peers. Every method may raise an ExoError; the caller gets it."""

    sharing: Sharing

    @abstractmethod
    def on_hello(self, request: pb.HelloRequest, host: str) -> pb.HelloReply: ...

    @abstractmethod
    def on_beat(self, node_id: str, beat: Beat) -> Beat: ...

    @abstractmethod
    def on_goodbye(self, node_id: str, instance_id: str) -> None: ...

    @abstractmethod
    async def drain(self, *, undo: bool = False) -> DrainState: ...

    @abstractmethod
    async def read_log(self, lines: int) -> list[str]: ...

    @abstractmethod
    async def ensure_plan(
        self,
        model_id: str,
        dead_hash: str,
        on_progress: OnProgress,
        *,
        make_room: bool = True,
        renew: bool = False,
    ) -> RingPlan: ...

    @abstractmethod
    async def prepare(
        self, model_id: str, on_progress: OnProgress, *, renew: bool = False
    ) -> Prepared: ...

    @abstractmethod
    async def load_shard(self, plan: RingPlan, on_progress: OnProgress) -> None: ...

    @abstractmethod
    async def warm_up(self, plan: RingPlan) -> None: ...

    @abstractmethod
    async def publish(self, plan: RingPlan) -> None: ...

    @abstractmethod
    async def retire(self, plan_hash: str, reason: str, unload_model: str = "") -> None: ...

    @abstractmethod
    async def idle_s(self, plan_hash: str) -> float | None: ...

    @abstractmethod
    async def unload(self, plan_hash: str) -> bool: ...

    @abstractmethod
    async def models_here(self) -> list[HeldModel]: ...

    @abstractmethod
    def on_frame(self, plan_hash: str, frame: Frame) -> None: ...

    @abstractmethod
    def on_failure(self, failure: StepFailure) -> None: ...

    @abstractmethod
    def generate_as_head(
        self, plan_hash: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]: ...


class NodeServer:
    """Listens on the given hosts: all calls on one port, the streams of rings on another."""

    def __init__(self, handler: NodeHandler, connections: Connections = OPEN) -> None:
        self._connections = connections
        self._rings = RingServer(handler.on_frame, connections)
        self.port = self.ring_port = 0
        self._hosts: set[str] = set()
        self._servers: list[grpc.aio.Server] = []
        self._servicer = _Servicer(handler)

    async def start(self, hosts: list[str], port: int) -> int:
        """Listen; port 0 picks free ones, any other is followed by the one for rings. Returns the
        port.

        Raises:
            OSError: the port is taken.
        """
        ring_port = port + 1 if port else 0
        server, self.port = self._calls_on(hosts, port)
        # After what may fail, so that nothing is left listening.
        self.ring_port = await self._listen_for_rings(hosts, ring_port)
        await server.start()
        self._servers.append(server)
        self._hosts.update(hosts)
        return self.port

    async def listen_also(self, hosts: list[str]) -> None:
        """On these too, on the same ports. A host that is gone is listened on further: when it
        comes back so do its connections.

        Raises:
            OSError: a port is taken there, or the host is gone again.
        """
        for host in sorted(set(hosts) - self._hosts):
            # A server of its own: gRPC's take no more addresses once they run.
            server, _ = self._calls_on([host], self.port)
            await server.start()
            try:
                await self._rings.listen([host], self.ring_port)
            except OSError:
                await server.stop(None)  # frees the port; one that never ran would keep it
                raise
            self._servers.append(server)
            self._hosts.add(host)

    def _calls_on(self, hosts: list[str], port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=[TakesName()], options=SERVER_OPTIONS)
        add_NodeServiceServicer_to_server(self._servicer, server)
        # Pieces of files are bytes from end to end; a message would be copied twice more.
        read_file = grpc.unary_stream_rpc_method_handler(
            self._servicer.ReadFile, pb.ReadFileRequest.FromString
        )
        server.add_registered_method_handlers("exo.NodeService", {"ReadFile": read_file})
        for host in hosts:
            try:
                port = self._connections.listen(server, f"{host}:{port}")
            except RuntimeError as error:
                raise OSError(f"cannot listen on {host}:{port} for other nodes: {error}") from error
        return server, port

    async def _listen_for_rings(self, hosts: list[str], port: int) -> int:
        try:
            return await self._rings.listen(hosts, port)
        except OSError as error:
            if port == 0:
                raise
            found = await self._rings.listen(hosts, 0)
            logger.warning(
                "rings use port %d, because %d is taken (%s): a firewall has to let it through",
                found,
                port,
                error,
            )
            return found

    @property
    def files_read(self) -> int:
        """By peers, at this moment."""
        return self._servicer.reading

    async def stop(self) -> None:
        await self._rings.stop()
        await asyncio.gather(*(server.stop(grace=0.2) for server in self._servers))


class _Servicer(NodeServiceServicer):
    def __init__(self, handler: NodeHandler) -> None:
        self._handler = handler
        self.reading = 0  # files, by peers, now

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        host = _host_of(context.peer())
        if not host:  # of a connection that has ended there is no address any more
            await abort(context, PeerUnavailable(f"{request.node_id} is gone again"))
        return await _answer(context, _sync(self._handler.on_hello, request, host))

    async def Heartbeats(
        self, requests: AsyncIterator[pb.Heartbeat], context: Context
    ) -> AsyncIterator[pb.Heartbeat]:
        node_id = _metadata(context, "exo-node-id")
        try:
            async for beat in requests:
                answer = self._handler.on_beat(node_id, beat_from_pb(beat))
                yield beat_to_pb(beat.counter, answer)
        except ExoError as error:
            await abort(context, error)

    async def Goodbye(self, request: pb.GoodbyeRequest, context: Context) -> pb.Ack:
        self._handler.on_goodbye(request.node_id, request.instance_id)
        return pb.Ack()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        state = await _answer(context, self._handler.drain(undo=request.undo))
        return pb.DrainReply(models=state.models, problems=state.problems)

    async def ReadLog(self, request: pb.ReadLogRequest, context: Context) -> pb.ReadLogReply:
        return pb.ReadLogReply(lines=await _answer(context, self._handler.read_log(request.lines)))

    async def EnsurePlan(
        self, request: pb.EnsurePlanRequest, context: Context
    ) -> AsyncIterator[pb.EnsurePlanEvent]:
        async for event in _with_progress(
            context,
            lambda on_progress: self._handler.ensure_plan(
                request.model_id,
                request.dead_hash,
                on_progress,
                make_room=not request.keep_others,
                renew=request.renew,
            ),
            lambda progress: pb.EnsurePlanEvent(progress=progress),
            lambda plan: pb.EnsurePlanEvent(plan=messages.plan_to_pb(plan)),
        ):
            yield event

    async def Prepare(
        self, request: pb.PrepareRequest, context: Context
    ) -> AsyncIterator[pb.PrepareEvent]:
        async for event in _with_progress(
            context,
            lambda on_progress: self._handler.prepare(
                request.model_id, on_progress, renew=request.renew
            ),
            lambda progress: pb.PrepareEvent(progress=progress),
            lambda prepared: pb.PrepareEvent(
                description=messages.description_to_pb(prepared.description),
                memory_bytes=prepared.memory_bytes,
                held_bytes=prepared.held_bytes,
                read_bytes_s=prepared.pace.read_bytes_s,
                round_trips_s=prepared.pace.round_trips_s,
            ),
        ):
            yield event

    async def LoadShard(
        self, request: pb.LoadShardRequest, context: Context
    ) -> AsyncIterator[pb.LoadShardEvent]:
        async def load(on_progress: OnProgress) -> str:
            plan = messages.plan_from_pb(request.plan)
            await self._handler.load_shard(plan, on_progress)
            return plan.hash

        async for event in _with_progress(
            context,
            load,
            lambda progress: pb.LoadShardEvent(progress=progress),
            lambda plan_hash: pb.LoadShardEvent(loaded_hash=plan_hash),
        ):
            yield event

    async def WarmUp(self, request: pb.PlanRequest, context: Context) -> pb.Ack:
        async def warm_up() -> pb.Ack:
            await self._handler.warm_up(messages.plan_from_pb(request.plan))
            return pb.Ack()

        return await _answer(context, warm_up())

    async def PublishPlan(self, request: pb.PlanRequest, context: Context) -> pb.Ack:
        async def publish() -> pb.Ack:
            await self._handler.publish(messages.plan_from_pb(request.plan))
            return pb.Ack()

        return await _answer(context, publish())

    async def RetirePlan(self, request: pb.RetirePlanRequest, context: Context) -> pb.Ack:
        async def retire() -> pb.Ack:
            await self._handler.retire(request.plan_hash, request.reason, request.unload_model)
            return pb.Ack()

        return await _answer(context, retire())

    async def IdleTime(self, request: pb.IdleTimeRequest, context: Context) -> pb.IdleTimeReply:
        idle_s = await _answer(context, self._handler.idle_s(request.plan_hash))
        return pb.IdleTimeReply(idle=idle_s is not None, seconds=idle_s or 0.0)

    async def UnloadPlan(
        self, request: pb.UnloadPlanRequest, context: Context
    ) -> pb.UnloadPlanReply:
        unloaded = await _answer(context, self._handler.unload(request.plan_hash))
        return pb.UnloadPlanReply(unloaded=unloaded)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsReply:
        found = await _answer(context, self._handler.models_here())
        models = (pb.ListModelsReply.Model(**vars(model)) for model in found)
        return pb.ListModelsReply(models=models)

    async def HeldFiles(self, request: pb.HeldFilesRequest, context: Context) -> pb.HeldFilesReply:
        held = asyncio.to_thread(
            self._handler.sharing.held, request.repo, request.node_id, request.digests
        )
        return messages.held_to_pb(await _answer(context, held))

    async def ListRepo(self, request: pb.ListRepoRequest, context: Context) -> pb.ListRepoReply:
        listing = listing_for_peer(
            self._handler.sharing, request.repo, request.revision, ask_hub=request.ask_hub
        )
        return messages.listing_to_pb(await _answer(context, listing))

    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncIterator[Any]:
        self.reading += 1
        checksum = 0
        try:
            async with contextlib.aclosing(self._pieces(request)) as pieces:
                async for piece in pieces:
                    checksum = zlib.crc32(piece, checksum)
                    yield piece
            context.set_trailing_metadata(((CHECKSUM, str(checksum)),))
        except ExoError as error:
            await abort(context, error)
        finally:
            self.reading -= 1

    async def _pieces(self, request: pb.ReadFileRequest) -> AsyncGenerator[bytes, None]:
        digest, start, end = request.digest, request.start, request.end
        if request.relay:
            async with contextlib.aclosing(relayed(request.repo, digest, start, end)) as ranged:
                async for some in ranged:
                    yield some
            return
        pieces = self._handler.sharing.read(request.repo, digest, start, end)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    async def ReportFailure(self, request: pb.StepFailure, context: Context) -> pb.Ack:
        self._handler.on_failure(messages.failure_from_pb(request))
        return pb.Ack()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateEvent]:
        try:
            tokens = self._handler.generate_as_head(
                request.plan_hash, messages.generation_from_pb(request)
            )
            pulsing = with_pulse(tokens, GenerationEvent(), PULSE_S)
            async with contextlib.aclosing(pulsing) as events:
                async for event in events:
                    yield messages.event_to_pb(event)
        except ExoError as error:
            await abort(context, error)


async def _answer(context: Context, work: Awaitable[Result]) -> Result:
    """The result of `work`, or its ExoError as the call's status."""
    try:
        return await work
    except ExoError as error:
        logger.info("a call of %s was refused: %s", context.peer(), error.message)
        await abort(context, error)
        raise AssertionError("abort always raises") from error


async def _sync(call: Callable[..., Result], *args: Any) -> Result:
    return call(*args)


async def _with_progress(
    context: Context,
    work: Callable[[OnProgress], Awaitable[Result]],
    progress_event: Callable[[pb.Progress], Any],
    result_event: Callable[[Result], Any],
) -> AsyncIterator[Any]:
    """Run `work`; its progress as events, at least one a second, and its result as the last."""
    try:
        pulsing = with_pulse(with_news(work), Progress("waiting"), PULSE_S)
        async with contextlib.aclosing(pulsing) as events:
            async for event in events:
                if isinstance(event, Done):
                    yield result_event(event.value)
                else:
                    yield progress_event(messages.progress_to_pb(event))
    except ExoError as error:
        await abort(context, error)


def _metadata(context: Context, key: str) -> str:
    return next((str(v) for k, v in context.invocation_metadata() or () if k == key), "")


def _host_of(peer: str) -> str:
    """ "ipv4:127.0.0.1:5000" → "127.0.0.1"."""
    return host_of(peer.removeprefix("ipv4:").removeprefix("ipv6:"))
