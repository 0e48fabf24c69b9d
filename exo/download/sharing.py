"""Files shared with peers: what this node has of them, and who fetches which part from the hub.

Nodes that fetch the same file tell each other every quarter of a second which blocks they have.
A span nobody has belongs to one of them, by its place in the file, who alone asks the hub for it;
the others get it from there. So the hub is asked for each byte about once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from exo.download.hub_cache import DIGEST, Listing, RepoCache, RepoFile, cached_repos
from exo.download.partial_file import (
    PartialFile,
    Told,
    block_states,
    map_of,
    only_saved,
    part_of,
)
from exo.download.supplier import Patience, Rules, Supplier
from exo.errors import DownloadFailed, ExoError, InvalidRequest, ModelNotFound, PeerUnavailable
from exo.models.file_parts import BLOCK, blocks_of

POLL_S = 0.25

STALLED_S = 4.0
"""A peer that has fetched nothing for so long keeps no part of a file to itself."""

WAITING_S = 30.0
"""A peer that has not all files and fetches nothing for so long is waited for no more."""

SHARED_SPAN = 4 * BLOCK
"""Bytes of one request where peers swap parts: smaller than to the hub alone, to spread sooner."""

_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PIECE = 1 << 20


@dataclass(frozen=True)
class Held:
    """What a node has of a file: all of it, or what it tells (`Told`) of each block."""

    digest: str
    is_whole: bool
    blocks: bytes = b""

    def state(self, start: int, end: int) -> Told:
        """Of [start, end): HERE and COMING if all of it is, UNWANTED if some of it is."""
        if self.is_whole:
            return Told.HERE
        first, last = blocks_of(start, end)
        some = self.blocks[first:last]
        if not some or len(some) < last - first:
            return Told.MISSING
        if Told.UNWANTED in some:
            return Told.UNWANTED
        kinds = set(some)  # a peer may tell anything
        if kinds == {Told.HERE}:
            return Told.HERE
        return Told.COMING if kinds <= {Told.HERE, Told.COMING} else Told.MISSING

    def border(self, start: int, end: int) -> int:
        """How far [start, end) is all of what the node wants, or all of what it does not."""
        first, last = blocks_of(start, end)
        some = self.blocks[first:last]
        for block in range(1, len(some)):
            if (some[block] == Told.UNWANTED) != (some[0] == Told.UNWANTED):
                return (first + block) * BLOCK
        return end


class FilePeer(Supplier):
    """Another node that may have files of one repo."""

    kind = "peer"
    checked_at_end = True
    patience = Patience(0.2, 1.0, attempts=3)  # there are others
    node_id: str

    @abstractmethod
    async def exchange(self, own_id: str, digests: Sequence[str]) -> list[Held]:
        """Say which files this node fetches; hear what the peer has of them.

        Raises:
            ExoError: the peer cannot be asked.
        """

    @abstractmethod
    async def listing(self, revision: str, *, ask_hub: bool) -> Listing | None:
        """What the peer knows the repo to hold, or with `ask_hub` the hub; None if it does not.

        Raises:
            ExoError: the peer cannot be asked, or the hub by it.
        """

    @abstractmethod
    def relay(self) -> Supplier:
        """The hub through this peer."""

    def close(self) -> None:
        """Let go of the connection."""


Connect = Callable[[str, str, str], FilePeer]
"""(node id, address, repo) to a peer."""


class Sharing:
    """What this node has. Asked by the node's event loop, told by the threads that fetch.

    `neighbours` gives the addresses of live peers by node id; without any, files come from
    elsewhere.
    """

    def __init__(
        self,
        node_id: str = "",
        neighbours: Callable[[], Mapping[str, str]] = dict,
        connect: Connect | None = None,
    ) -> None:
        self.node_id = node_id
        self.neighbours = neighbours
        self._connect = connect
        self._partials: dict[str, PartialFile] = {}
        self._others: dict[tuple[str, str], float] = {}  # (digest, node) -> heard at
        self._on_new: set[Callable[[], None]] = set()
        self._mutex = threading.Lock()

    def peers(self, repo: str) -> list[FilePeer]:
        """The live peers, to be closed."""
        if self._connect is None:
            return []
        return [self._connect(node, at, repo) for node, at in sorted(self.neighbours().items())]

    @contextlib.contextmanager
    def hearing(self, on_new: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `on_new` is called, from any thread, when somebody else begins a file."""
        with self._mutex:
            self._on_new.add(on_new)
        try:
            yield
        finally:
            with self._mutex:
                self._on_new.discard(on_new)

    def begin(self, partial: PartialFile) -> None:
        """It is fetched here from now on."""
        with self._mutex:
            self._partials[partial.file.digest] = partial

    def end(self, partial: PartialFile) -> None:
        with self._mutex:
            self._partials.pop(partial.file.digest, None)

    def held(self, repo: str, node_id: str, digests: Sequence[str]) -> list[Held]:
        """What is here of files that another node fetches."""
        check_names(repo, digests)
        found = []
        with self._mutex:
            if node_id in self.neighbours():
                self._note_other(node_id, digests)
            for digest in digests:
                if (here := self._here(repo, digest)) is not None:
                    found.append(here)
        return found

    def _here(self, repo: str, digest: str) -> Held | None:
        """What is here of a file; None if nothing. The mutex is held."""
        if (partial := self._partials.get(digest)) is not None:
            return Held(digest, False, partial.states())
        blob = _blob(repo, digest)
        if blob.is_file():
            return Held(digest, True)
        try:
            kept = map_of(blob).read_bytes()
        except FileNotFoundError:
            return None
        # It was fetched in part, and nothing more of it is wanted now.
        return Held(digest, False, block_states(only_saved(kept), bytes(len(kept))))

    def _note_other(self, node_id: str, digests: Sequence[str]) -> None:
        now = time.monotonic()
        if any(self._others.get((d, node_id), 0.0) < now - STALLED_S for d in digests):
            for tell in self._on_new:
                tell()
        self._others = {key: at for key, at in self._others.items() if at > now - STALLED_S}
        self._others |= dict.fromkeys(((digest, node_id) for digest in digests), now)

    def fetching(self, digest: str) -> set[str]:
        """Nodes that said lately that they fetch a file."""
        since = time.monotonic() - STALLED_S
        with self._mutex:
            return {node for (of, node), at in self._others.items() if of == digest and at > since}

    def read(self, repo: str, digest: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes [start, end) of a file that is here, or of what is here of it.

        Raises:
            InvalidRequest: a digest, repo or range that cannot be.
            ModelNotFound: they are not here.
        """
        check_names(repo, [digest])
        with self._mutex:
            held = self._here(repo, digest)
        if held is None:
            raise ModelNotFound(f"{digest} of {repo} is not on this node")
        blob = _blob(repo, digest)
        if not blob.is_file() and held.state(start, end) is not Told.HERE:
            raise ModelNotFound(f"{start} to {end} of {digest} is not on this node yet")
        with _opened(blob) as data:
            if not 0 <= start < end <= os.fstat(data.fileno()).st_size:
                raise InvalidRequest(f"bytes {start} to {end} of {digest}: there are fewer")
            data.seek(start)
            while start < end:
                piece = data.read(min(_PIECE, end - start))
                if not piece:
                    raise ModelNotFound(f"{digest} of {repo} became shorter")
                start += len(piece)
                yield piece

    def listing(self, repo: str, revision: str) -> Listing | None:
        """What this node knows a repo to hold."""
        check_names(repo, [])
        cache = RepoCache(repo)
        # Not a path that a peer made up.
        if repo not in cached_repos() or not re.fullmatch(r"[\w.-]+", revision):
            return None
        commit = cache.commit(revision)
        return cache.listing(commit) if commit else None


class Swarm(Rules):
    """One download beside those of the peers.

    Who begins a file, or learns of another one that fetches it, asks the hub for nothing of it
    until it has looked again at what everyone has: only then do all cut the file into the same
    parts.
    """

    span = SHARED_SPAN

    def __init__(self, sharing: Sharing, peers: Sequence[FilePeer]) -> None:
        self.peers = peers
        self._sharing = sharing
        self._held: dict[str, dict[str, Held]] = {}  # by node, by digest
        self._grew: dict[tuple[str, str], tuple[int, float]] = {}  # (node, digest) -> blocks, when
        self._partials: list[PartialFile] = []
        self._fetching: dict[str, set[str]] = {}  # by digest: who fetched it at the last poll
        self._useful: set[str] = set()  # nodes that at the last poll had what is missing here
        self._answered: dict[str, float] = {}
        self._began = time.monotonic()
        self._look_soon = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def hearing(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile others' beginnings are looked at as they come."""
        return self._sharing.hearing(self._on_new)

    def begin(self, partial: PartialFile) -> None:
        self._partials.append(partial)
        self._sharing.begin(partial)
        self._look_soon.set()

    def end(self, partial: PartialFile) -> None:
        self._partials.remove(partial)
        self._sharing.end(partial)
        self._fetching.pop(partial.file.digest, None)

    def _on_new(self) -> None:
        self._loop.call_soon_threadsafe(self._look_soon.set)

    async def until_next_poll(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._look_soon.wait()

    async def poll(self) -> None:
        """Hear from every peer what it has now."""
        self._look_soon.clear()
        digests = [partial.file.digest for partial in self._partials]
        known = {digest: self._sharing.fetching(digest) for digest in digests}
        await asyncio.gather(*(self._hear(peer, digests) for peer in self.peers))
        self._fetching = known
        self._useful = {node for node, held in self._held.items() if self._has_missing(held)}

    def _has_missing(self, held: Mapping[str, Held]) -> bool:
        """Whether a node has anything of what is missing here."""
        pairs = ((p, held[p.file.digest]) for p in self._partials if p.file.digest in held)
        return any(
            not mine.is_complete if theirs.is_whole else mine.misses_any(theirs.blocks)
            for mine, theirs in pairs
        )

    async def _hear(self, peer: FilePeer, digests: Sequence[str]) -> None:
        if peer.given_up:
            self._held.pop(peer.node_id, None)
            return
        try:
            held = await peer.exchange(self._sharing.node_id, digests)
        except ExoError:
            # It is gone or busy; its part is anybody's until it answers again.
            self._held.pop(peer.node_id, None)
            return
        now = time.monotonic()
        self._answered[peer.node_id] = now
        self._held[peer.node_id] = {one.digest: one for one in held}
        for one in held:
            count = one.blocks.count(Told.HERE)
            before = self._grew.get((peer.node_id, one.digest))
            if before is None or before[0] != count:
                self._grew[peer.node_id, one.digest] = (count, now)

    def lost(self, supplier: Supplier) -> ExoError | None:
        if not isinstance(supplier, FilePeer) or supplier.given_up:
            return None
        now = time.monotonic()
        if now - self._answered.get(supplier.node_id, self._began) > STALLED_S:
            return PeerUnavailable(f"{supplier.name} does not answer")
        has_some = supplier.node_id in self._useful
        grew = [at for (node, _), (_, at) in self._grew.items() if node == supplier.node_id]
        if not has_some and now - max(grew, default=self._began) > WAITING_S:
            return DownloadFailed(f"{supplier.name} has not all files and fetches no more")
        return None

    def may_at_all(self, supplier: Supplier, file: RepoFile, *, alone: bool) -> bool:
        if file.digest not in self._fetching:
            return False
        if isinstance(supplier, FilePeer):
            return file.digest in self._held.get(supplier.node_id, {})
        if alone:
            return True
        holders = (p for p in self.peers if not p.given_up)
        held = (self._held.get(peer.node_id, {}).get(file.digest) for peer in holders)
        return not any(one is not None and one.is_whole for one in held)

    def may(self, supplier: Supplier, file: RepoFile, start: int, end: int, *, alone: bool) -> int:
        if isinstance(supplier, FilePeer):
            held = self._held.get(supplier.node_id, {}).get(file.digest)
            if held is None:
                return start
            end = held.border(start, end)
            return end if held.state(start, end) is Told.HERE else start
        if alone:
            return end
        peers = [peer for peer in self.peers if not peer.given_up]
        for peer in peers:
            if (held := self._held.get(peer.node_id, {}).get(file.digest)) is not None:
                end = held.border(start, end)
        return end if self._is_mine(peers, file, start, end) else start

    def _is_mine(self, peers: Sequence[FilePeer], file: RepoFile, start: int, end: int) -> bool:
        """Whether of all nodes that want a span it is this one that asks the hub for it."""
        fetching = self._sharing.fetching(file.digest)
        if not fetching <= self._fetching[file.digest]:
            return False
        owners = [self._sharing.node_id]
        for peer in peers:
            held = self._held.get(peer.node_id, {}).get(file.digest)
            state = held.state(start, end) if held is not None else Told.MISSING
            if state is Told.HERE:
                return False
            if state is Told.UNWANTED:
                continue
            if held is None or held.is_whole:
                moves = peer.node_id in fetching
            else:
                moves = self._is_moving(peer.node_id, file.digest)
            if moves:
                if state is Told.COMING:
                    return False
                owners.append(peer.node_id)
        return sorted(owners)[start // SHARED_SPAN % len(owners)] == self._sharing.node_id

    def _is_moving(self, node_id: str, digest: str) -> bool:
        return time.monotonic() - self._grew[node_id, digest][1] < STALLED_S


def check_names(repo: str, digests: Sequence[str]) -> None:
    """Raises InvalidRequest for what would be another path in the cache."""
    if not _REPO.fullmatch(repo) or not all(map(DIGEST.fullmatch, digests)):
        raise InvalidRequest(f"{repo!r}: not a repo, or not digests of its files")


def _blob(repo: str, digest: str) -> Path:
    return RepoCache(repo).folder / "blobs" / digest


def _opened(blob: Path) -> BinaryIO:
    """A blob, or what is here of it, which may get its name meanwhile."""
    for path in (blob, part_of(blob), blob):
        with contextlib.suppress(FileNotFoundError):
            return path.open("rb")
    raise ModelNotFound(f"{blob.name} was removed from this node")
