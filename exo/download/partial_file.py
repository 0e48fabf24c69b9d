"""A file that is being fetched: its data at the right places, a map of what is there, its digest.

Beside the blob lie `<digest>.exo-part`, the data with holes, and `<digest>.exo-map`, one byte for
each block of 1 MiB: 1 once the block is whole. A process that is killed loses at most the blocks it
was writing; the next one goes on from the map.

Nothing here waits for bytes to come, and no file stays open between two calls: a download may be of
hundreds of files, and a process may have few threads and few descriptors (macOS gives 256).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from exo.download.hub_cache import RepoFile
from exo.errors import DownloadFailed

BLOCK = 1 << 20

_FLUSH = 64  # blocks
_AT_ONCE = 16  # blocks hashed by one call, so that a thread serves several files


def part_of(blob: Path) -> Path:
    """Where a blob's data is while it is fetched."""
    return blob.with_name(f"{blob.name}.exo-part")


def bytes_here(blob: Path, file: RepoFile) -> int:
    """How much of a file an earlier download left."""
    try:
        blocks = _map_of(blob).read_bytes()
        if part_of(blob).stat().st_size == file.size and len(blocks) == _block_count(file):
            return _bytes_of(blocks, file)
    except FileNotFoundError:
        pass
    return 0


def tidy(blob: Path) -> None:
    """Take away what a process that was killed at the very end left beside a whole blob."""
    _map_of(blob).unlink(missing_ok=True)


def new_digest(size: int, *, is_sha256: bool) -> hashlib._Hash:
    """What a blob of `size` bytes is named by: its sha256, or as git names it, whose hash begins
    with a header (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects)."""
    if is_sha256:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


class PartialFile:
    """Who makes one holds the file's lock. Writing, hashing and `close` may be on different
    threads, one of them hashing; all else is the event loop's."""

    def __init__(self, blob: Path, file: RepoFile) -> None:
        self.file = file
        self._blob = blob
        self.data_path = part_of(blob)
        self._map_path = _map_of(blob)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _opened(self.data_path, os.O_CREAT) as data, _opened(self._map_path, os.O_CREAT) as m:
            count = _block_count(file)
            if os.fstat(data).st_size != file.size or os.fstat(m).st_size != count:
                os.ftruncate(m, 0)
                os.ftruncate(m, count)
                os.ftruncate(data, file.size)
            self._blocks = bytearray(os.pread(m, count, 0))
        self.on_its_way: set[tuple[int, int]] = set()  # ranges somebody is asked for
        self._hashed = 0  # blocks
        self._digest = new_digest(self.file.size, is_sha256=bool(self.file.sha256))
        self._changed = threading.Condition()
        self._closed = False
        self._users = 0  # threads that write

    @property
    def done_bytes(self) -> int:
        return _bytes_of(self._blocks, self.file)

    def states(self) -> bytes:
        """For each block 1 if it is there, 2 if it is on its way, else 0."""
        states = bytearray(self._blocks)
        for start, end in list(self.on_its_way):
            for block in range(start // BLOCK, -(-end // BLOCK)):
                states[block] = states[block] or 2
        return bytes(states)

    def missing(self) -> list[tuple[int, int]]:
        """Ranges [start, end) that are not there, in order."""
        ranges: list[tuple[int, int]] = []
        for block, there in enumerate(self._blocks):
            if there:
                continue
            start, end = block * BLOCK, min((block + 1) * BLOCK, self.file.size)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
        return ranges

    def write(self, start: int, data: bytes) -> None:
        """Put bytes at `start`; nothing is marked as there yet.

        Raises:
            DownloadFailed: closed before.
        """
        with self._used(), _opened(self.data_path) as descriptor:
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, start)
                view, start = view[written:], start + written

    def mark(self, start: int, end: int) -> bool:
        """Everything in [start, end) is written, where `start` begins a block: its whole blocks are
        there. True if there are any."""
        first, last = start // BLOCK, end // BLOCK
        if end == self.file.size:
            last = len(self._blocks)
        if last <= first:
            return False
        with _opened(self._map_path) as descriptor:
            os.pwrite(descriptor, b"\1" * (last - first), first)
        self._blocks[first:last] = b"\1" * (last - first)
        return True

    @property
    def is_hashed(self) -> bool:
        """True once all blocks are there and part of the digest."""
        return self._hashed == len(self._blocks)

    @property
    def digest(self) -> str:
        """Digest of what is hashed, in hex."""
        return self._digest.hexdigest()

    def hash_ahead(self) -> bool:
        """Hash some of the blocks that follow those hashed before; False if the next one is not
        there yet."""
        first = last = self._hashed
        while last < min(first + _AT_ONCE, len(self._blocks)) and self._blocks[last]:
            last += 1
        if last == first:
            return False
        with self.data_path.open("rb") as data:
            data.seek(first * BLOCK)
            for _ in range(first, last):
                self._digest.update(data.read(BLOCK))
            if last // _FLUSH > first // _FLUSH:
                # Bit by bit while the rest comes, not all at the end.
                os.fsync(data.fileno())
        self._hashed = last
        return True

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise DownloadFailed(f"the download of {self.file.path} was stopped")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """The file is whole and verified: it gets its name."""
        with self._used():
            with _opened(self.data_path) as descriptor:
                os.fsync(descriptor)
            self.data_path.replace(self._blob)
            self._map_path.unlink(missing_ok=True)
            _sync_folder(self._blob.parent)

    def clear(self) -> None:
        """Forget what was fetched. Nobody hashes meanwhile."""
        self._blocks = bytearray(len(self._blocks))
        with _opened(self._map_path) as descriptor:
            os.pwrite(descriptor, self._blocks, 0)
        self._hashed = 0
        self._digest = new_digest(self.file.size, is_sha256=bool(self.file.sha256))

    def close(self) -> None:
        """Wait for who is writing, then nothing more is written: another process may go on."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._users == 0)


def _map_of(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.exo-map")


def _block_count(file: RepoFile) -> int:
    return -(-file.size // BLOCK)


def _bytes_of(blocks: bytes | bytearray, file: RepoFile) -> int:
    """Bytes of the blocks that are there; the last one may be short."""
    whole = sum(blocks) * BLOCK
    if blocks and blocks[-1]:
        whole -= len(blocks) * BLOCK - file.size
    return whole


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
