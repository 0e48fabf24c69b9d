"""Who is in the cluster: connect to whom discovery hears, keep heartbeats, know who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from exo.errors import ExoError, NodeLeft, PeerUnavailable, StepTimeout
from exo.networking.calls.messages import PROTOCOL
from exo.networking.calls.peer_handle import Beat, PeerHandle
from exo.networking.discovery.base import DiscoveryListener, Route
from exo.networking.generated import node_service_pb2 as pb
from exo.orchestration.config import NodeConfig
from exo.orchestration.membership.patience import LEAST_S, Patience
from exo.orchestration.membership.peer import Peer, advice
from exo.orchestration.membership.rhythm import (
    ACQUAINTED,
    CONFIRM_S,
    SUSPECTED_S,
    News,
    rest_s,
)
from exo.orchestration.membership.strangers import Strangers
from exo.tasks import TaskOwner
from exo.topology.topology import LinkView, NodeView

logger = logging.getLogger(__name__)

ONE_WAY_GRACE_S = 3.0
"""How long a peer may take to connect back before it is called unreachable."""

RETRY_S = 0.5
TOLD_POLL_S = 0.05


class Membership(DiscoveryListener):
    """`on_joined` and `on_lost` are called with a node id when it becomes usable and when it no
    longer is; `on_beat` with every beat of a peer. `watched` gives the peers whose death must be
    known at once, `news` what has to be told without being asked. `connect` makes the handle to an
    address."""

    def __init__(
        self,
        config: NodeConfig,
        own_beat: Callable[[str], Beat],
        on_joined: Callable[[str], None],
        on_lost: Callable[[str, ExoError], None],
        on_beat: Callable[[str, Beat], None],
        interface_of: Callable[[str], tuple[str, int]],
        watched: Callable[[], frozenset[str]],
        connect: Callable[[str], PeerHandle] = PeerHandle,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._wall_clock = wall_clock
        self._watched = watched
        self._own_beat = own_beat
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._on_beat = on_beat
        self._connect = connect
        self._peers: dict[str, Peer] = {}
        self._duplicate_of_self = ""
        self._silent: dict[str, float] = {}  # who fell silent here, until when others are told
        self._lost: dict[str, float] = {}  # when each was last lost; the event loop's clock
        self._tasks = TaskOwner("membership")
        self._strangers = Strangers(connect, self._hello, self.heard, interface_of, self._tasks)
        self.port = 0

    def start(self, port: int, news: News) -> None:
        """This node listens on `port`; from now on others are told of `news`."""
        self.port = port
        self._tasks.forever(lambda: self._tell(news), "news")

    # What discovery and peers tell ------------------------------------------------------------

    def heard(self, node_id: str, instance_id: str, route: Route) -> None:
        now = asyncio.get_running_loop().time()
        if not node_id:
            self._heard_address(route, now)
            return
        if node_id == self._config.node_id:
            if instance_id != self._config.instance_id:
                self._note_double(route)
            return
        peer = self._peers.get(node_id)
        if peer is None:
            patience = Patience(self._config.heartbeat_timeout_s)
            peer = self._peers[node_id] = Peer(node_id, instance_id, patience)
            peer.routes[route] = now
            self._tasks.background(self._keep_connected(peer), f"peer {node_id}")
        elif peer.instance_id == instance_id:
            if not peer.left:
                peer.routes[route] = now
        elif peer.handle is None:
            # It was restarted.
            peer.instance_id, peer.left, peer.double = instance_id, False, None
            peer.patience = Patience(self._config.heartbeat_timeout_s)
            peer.routes = {route: now}
        else:
            self._note_double_of(peer, instance_id, route, now)

    def distrusted(self, node_id: str, route: Route, why: str) -> None:
        self._strangers.distrust(node_id, route, why)

    def left(self, node_id: str, instance_id: str) -> None:
        peer = self._peers.get(node_id)
        if peer is not None and peer.instance_id == instance_id and not peer.left:
            peer.left = True
            peer.routes.clear()
            self._lose(peer, NodeLeft(f"node {node_id} left"))

    def connected_to(self, node_id: str) -> bool:
        """True while this node has a working connection to the peer."""
        peer = self._peers.get(node_id)
        return peer is not None and peer.handle is not None

    # What the node asks -----------------------------------------------------------------------

    def handle_of(self, node_id: str) -> PeerHandle:
        """Raises PeerUnavailable if there is no connection to the node."""
        peer = self._peers.get(node_id)
        if peer is None or peer.handle is None:
            raise PeerUnavailable(
                f"node {self._config.node_id} has no connection to node {node_id}"
            )
        return peer.handle

    @property
    def alive(self) -> list[str]:
        return [peer.node_id for peer in self._peers.values() if peer.alive]

    def memory_bytes(self) -> dict[str, int]:
        """Of live peers, in all."""
        return {
            peer.node_id: peer.identity.capabilities.memory_total_bytes
            for peer in self._peers.values()
            if peer.alive and peer.identity is not None
        }

    @property
    def draining(self) -> frozenset[str]:
        """Live peers that are to have no part in rings."""
        return frozenset(p.node_id for p in self._peers.values() if p.alive and p.draining)

    def addresses(self) -> dict[str, str]:
        """Where live peers listen for nodes. For any thread."""
        peers = list(self._peers.values())
        return {p.node_id: p.handle.address for p in peers if p.alive and p.handle is not None}

    @property
    def silent(self) -> frozenset[str]:
        """Nodes that fell silent here lately: others are to ask them too."""
        now = asyncio.get_running_loop().time()
        self._silent = {node_id: until for node_id, until in self._silent.items() if until > now}
        return frozenset(self._silent)

    def told_by(self, node_id: str, beat: Beat) -> None:
        """What a peer says of nodes, in its beats and in its answers to this node's. Those for whom
        it has waited in vain are asked now, with less patience unless they answered just before."""
        now = asyncio.get_running_loop().time()
        sender = self._peers.get(node_id)
        if sender is not None:
            sender.draining = beat.draining
        for silent in beat.silent:
            peer = self._peers.get(silent)
            if peer is not None and peer.alive and not peer.suspected:
                peer.suspected = now - peer.answered_at > LEAST_S
                peer.due.set()

    async def told(self, timeout_s: float) -> None:
        """Beat with every live peer now; returns when each has answered, or after `timeout_s`."""
        # The first may have been on its way, written before what is to be told.
        enough = [(peer, peer.beats + 2) for peer in self._peers.values() if peer.alive]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while waiting := [p for p, count in enough if p.alive and p.beats < count]:
                    for peer in waiting:
                        peer.due.set()
                    await asyncio.sleep(TOLD_POLL_S)

    def beat_soon(self, node_id: str) -> None:
        """What a peer said last may be old: ask it."""
        peer = self._peers.get(node_id)
        if peer is not None:
            peer.due.set()

    def round_trips_s(self) -> dict[str, float]:
        """To live peers: the shortest of the last ones, since a busy node answers late."""
        return {p.node_id: min(p.round_trips_s) for p in self._peers.values() if p.round_trips_s}

    @property
    def max_epoch(self) -> int:
        """The largest plan epoch any peer has spoken of."""
        return max((peer.max_epoch for peer in self._peers.values()), default=0)

    @property
    def problem(self) -> str:
        """What is wrong with this node itself; empty if nothing."""
        return self._duplicate_of_self

    def views(self) -> tuple[list[NodeView], list[LinkView]]:
        """Every peer heard of, and the connections to the live ones."""
        nodes = []
        links = []
        for peer in self._peers.values():
            if peer.alive:
                state = "alive"
            elif peer.left or not (peer.routes or peer.handle):
                continue
            else:
                state = "unreachable" if peer.problem else "connecting"
            route = peer.route or peer.best_route(asyncio.get_running_loop().time())
            nodes.append(
                NodeView(
                    peer.node_id,
                    state,
                    route.address if route else "",
                    peer.identity.api_url if peer.identity else "",
                    peer.identity.capabilities if peer.identity else None,
                    peer.problem,
                    peer.draining,
                )
            )
            if peer.alive and route is not None:
                links.append(
                    LinkView(
                        self._config.node_id, peer.node_id, route.interface, peer.round_trip_ms
                    )
                )
        nodes += [
            NodeView(address, "unreachable", address, problem=problem)
            for address, problem in self._strangers.problems().items()
        ]
        return nodes, links

    async def stop(self) -> None:
        """Say goodbye to everybody and disconnect."""
        handles = [peer.handle for peer in self._peers.values() if peer.handle is not None]
        await asyncio.gather(*(self._say_goodbye(handle) for handle in handles))
        await self._tasks.close()
        for peer in self._peers.values():
            for handle in (peer.handle, *peer.replaced):
                if handle is not None:
                    await handle.close()

    # Connecting -------------------------------------------------------------------------------

    async def _keep_connected(self, peer: Peer) -> None:
        """While it is announced: connect by the best route, keep heartbeats, start over."""
        loop = asyncio.get_running_loop()
        while (route := peer.best_route(loop.time())) is not None or peer.left:
            if route is not None:
                try:
                    await self._connected(peer, route)
                except ExoError as error:
                    if error.message != peer.problem:
                        peer.problem = advice(peer.node_id, route, error)
                    self._lose(peer, error)
                except Exception as error:
                    # The supervisor of this peer: whatever a session died of, the next one begins.
                    logger.exception("session with %s at %s", peer.node_id, route.address)
                    self._lose(peer, PeerUnavailable(f"{type(error).__name__}: {error}"))
            await asyncio.sleep(RETRY_S)
            if peer.left and not peer.routes:
                break
        del self._peers[peer.node_id]

    async def _connected(self, peer: Peer, route: Route) -> None:
        """One connection's life; always ends with the error that ended it."""
        handle = self._connect(route.address)
        try:
            identity = await handle.hello(self._hello())
            if identity.node_id != peer.node_id:
                peer.routes.pop(route, None)
                raise PeerUnavailable(
                    f"{route.address} is node {identity.node_id}, not {peer.node_id}"
                )
            peer.handle, peer.route, peer.identity = handle, route, identity
            if identity.instance_id == peer.instance_id:
                peer.patience.is_back(asyncio.get_running_loop().time())
            else:
                peer.patience = Patience(self._config.heartbeat_timeout_s)
                peer.instance_id = identity.instance_id
            peer.beats, peer.suspected = 0, False
            self._silent.pop(peer.node_id, None)
            await self._beat(peer)
        finally:
            if peer.handle is not handle:
                await handle.close()

    async def _beat(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            handle = self.handle_of(peer.node_id)
            beats = handle.heartbeats(
                self._config.node_id,
                lambda: self._own_beat(peer.node_id),
                lambda: self._until_due(peer),
                lambda: self._patience_s(peer),
            )
            async with contextlib.aclosing(beats):
                async for beat, round_trip_s in beats:
                    if beat.sees_you:
                        since = loop.time()
                    self._note_beat(peer, beat, round_trip_s)
                    if loop.time() - since > ONE_WAY_GRACE_S:
                        peer.problem = (
                            f"{peer.node_id} can be reached but cannot connect back to this node's "
                            f"port {self.port}: check this machine's firewall"
                        )
                        raise PeerUnavailable(peer.problem)
                    if await self._moved_to_better_route(peer, loop.time()):
                        break

    def _patience_s(self, peer: Peer) -> float:
        usual = self._config.heartbeat_timeout_s
        if peer.node_id in self._watched():
            usual = peer.patience.seconds(asyncio.get_running_loop().time())
        return min(usual, CONFIRM_S) if peer.suspected else usual

    async def _until_due(self, peer: Peer) -> None:
        seconds = self._config.heartbeat_interval_s
        is_settled = peer.alive and not peer.suspected and peer.beats >= ACQUAINTED
        if is_settled and peer.node_id not in self._watched():
            turn_s = rest_s(self._config.node_id, peer.node_id, self.alive, self._wall_clock())
            seconds = max(seconds, turn_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await peer.due.wait()
        peer.due.clear()

    async def _tell(self, news: News) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            if news.is_there(len(self._peers)):
                self._beat_all()

    def _beat_all(self) -> None:
        for peer in self._peers.values():
            peer.due.set()

    def _note_beat(self, peer: Peer, beat: Beat, round_trip_s: float) -> None:
        assert peer.identity is not None
        peer.beats += 1
        peer.answered_at = asyncio.get_running_loop().time()
        peer.suspected = False
        self.told_by(peer.node_id, beat)
        self._on_beat(peer.node_id, beat)
        peer.round_trip_ms = round_trip_s * 1000
        peer.round_trips_s.append(round_trip_s)
        peer.patience.answered(round_trip_s)
        peer.max_epoch = beat.max_epoch
        capabilities = replace(
            peer.identity.capabilities, memory_available_bytes=beat.memory_available_bytes
        )
        peer.identity = replace(peer.identity, capabilities=capabilities)
        if beat.sees_you and not peer.alive:
            # Not sooner: what was wrong may be so again, and is shown until it is not.
            peer.alive, peer.problem = True, ""
            logger.info("node %s joined at %s", peer.node_id, peer.route and peer.route.address)
            self._on_joined(peer.node_id)

    async def _moved_to_better_route(self, peer: Peer, now: float) -> bool:
        """Move to a better kind of interface where one has appeared; plans keep their streams."""
        best = peer.best_route(now)
        if best is None or peer.route is None or best.rank >= peer.route.rank:
            return False
        handle = self._connect(best.address)
        try:
            identity = await handle.hello(self._hello())
        except ExoError as error:
            logger.info("%s announces %s but: %s", peer.node_id, best.address, error.message)
            peer.routes.pop(best, None)
            await handle.close()
            return False
        if identity.instance_id != peer.instance_id or peer.handle is None:
            await handle.close()
            return False
        logger.info("node %s moves from %s to %s", peer.node_id, peer.route.address, best.address)
        peer.replaced.append(peer.handle)
        peer.handle, peer.route = handle, best
        return True

    def _lose(self, peer: Peer, error: ExoError) -> None:
        handles = [h for h in (peer.handle, *peer.replaced) if h is not None]
        was_alive, peer.alive, peer.handle, peer.route = peer.alive, False, None, None
        peer.replaced = []
        for handle in handles:
            self._tasks.background(handle.close(), "close")
        if was_alive:
            logger.info("node %s is gone: %s", peer.node_id, error.message)
            self._lost[peer.node_id] = asyncio.get_running_loop().time()
            if isinstance(error, StepTimeout):
                peer.patience.gave_up(self._lost[peer.node_id])
                if not peer.suspected:
                    # Whose connection was cut everybody knows; who is silent, only those who ask.
                    self._silent[peer.node_id] = self._lost[peer.node_id] + SUSPECTED_S
                    self._beat_all()
            self._on_lost(peer.node_id, error)

    @property
    def lost_at(self) -> float:
        """When a node was last lost, by the event loop's clock."""
        return max(self._lost.values(), default=-math.inf)

    @property
    def away(self) -> list[str]:
        """Nodes that were here once, the last one lost first."""
        away = self._lost.keys() - self.alive
        return sorted(away, key=self._lost.__getitem__, reverse=True)

    def _hello(self) -> pb.HelloRequest:
        return pb.HelloRequest(
            protocol=PROTOCOL,
            cluster=self._config.cluster,
            node_id=self._config.node_id,
            instance_id=self._config.instance_id,
            port=self.port,
        )

    async def _say_goodbye(self, handle: PeerHandle) -> None:
        try:
            await handle.goodbye(self._config.node_id, self._config.instance_id)
        except ExoError as error:
            logger.debug("goodbye: %s", error.message)

    # Addresses without a name, and names given twice --------------------------------------------

    def _heard_address(self, route: Route, now: float) -> None:
        for peer in self._peers.values():
            for known in peer.routes:
                if known.address == route.address and peer.handle is not None:
                    peer.routes[known] = now
                    return
        self._strangers.ask(route)

    def _note_double(self, route: Route) -> None:
        if not self._duplicate_of_self:
            self._duplicate_of_self = (
                f"the node id {self._config.node_id} is also used by {route.address}: "
                "start one of the two with another --node-id"
            )
            logger.error("%s", self._duplicate_of_self)

    def _note_double_of(self, peer: Peer, instance_id: str, route: Route, now: float) -> None:
        """A second process with a live peer's id: a restart not yet noticed, or a cloned id."""
        if peer.double is None or peer.double[0] != instance_id:
            peer.double = (instance_id, now)
        elif now - peer.double[1] > ONE_WAY_GRACE_S and not peer.problem:
            peer.problem = (
                f"two running nodes call themselves {peer.node_id}, the other one at "
                f"{route.address}: give one another --node-id"
            )
            logger.error("%s", peer.problem)
