"""A file that is being fetched: its data at the right places, a map of what is there, its digest.

Beside the blob lie `<digest>.exo-part`, the data with holes, and `<digest>.exo-map`, one byte for
each block of 1 MiB: 1 once the block is whole. A process that is killed loses at most the blocks it
was writing; the next one goes on from the map.
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


def part_of(blob: Path) -> Path:
    """Where a blob's data is while it is fetched."""
    return blob.with_name(f"{blob.name}.exo-part")


class PartialFile:
    """Who opens it holds the file's lock. Writing, hashing and `close` may be on different threads;
    all else is the event loop's."""

    def __init__(self, blob: Path, file: RepoFile) -> None:
        self.file = file
        self._blob = blob
        self.data_path = part_of(blob)
        self._map_path = blob.with_name(f"{blob.name}.exo-map")
        blob.parent.mkdir(parents=True, exist_ok=True)
        blocks = -(-file.size // BLOCK)
        self._data = os.open(self.data_path, os.O_RDWR | os.O_CREAT, 0o644)
        self._map = os.open(self._map_path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._data).st_size != file.size or os.fstat(self._map).st_size != blocks:
            os.ftruncate(self._map, 0)
            os.ftruncate(self._map, blocks)
            os.ftruncate(self._data, file.size)
        self._blocks = bytearray(os.pread(self._map, blocks, 0))
        self.on_its_way: set[tuple[int, int]] = set()  # ranges somebody is asked for
        self._changed = threading.Condition()
        self._closed = False
        self._users = 0  # threads that use the descriptors

    @property
    def done_bytes(self) -> int:
        whole = sum(self._blocks) * BLOCK
        if self._blocks and self._blocks[-1]:
            whole -= len(self._blocks) * BLOCK - self.file.size
        return whole

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
        with self._used():
            view = memoryview(data)
            while view:
                written = os.pwrite(self._data, view, start)
                view, start = view[written:], start + written

    def mark(self, start: int, end: int) -> None:
        """Everything in [start, end) is written, where `start` begins a block: its whole blocks are
        there."""
        first, last = start // BLOCK, end // BLOCK
        if end == self.file.size:
            last = len(self._blocks)
        if last > first:
            os.pwrite(self._map, b"\1" * (last - first), first)
            with self._changed:
                self._blocks[first:last] = b"\1" * (last - first)
                self._changed.notify_all()

    def digest(self) -> str:
        """Digest of the whole file, computed while its bytes arrive; blocks until all are there.

        Raises:
            DownloadFailed: closed before.
        """
        hashed = hashlib.sha256() if self.file.sha256 else hashlib.sha1(usedforsecurity=False)
        if not self.file.sha256:
            # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
            hashed.update(f"blob {self.file.size}\0".encode())
        with self.data_path.open("rb") as data:  # not a descriptor that `close` may pull away
            for block in range(len(self._blocks)):
                self._wait_for(block)
                hashed.update(data.read(BLOCK))
                if block % _FLUSH == _FLUSH - 1:
                    # Bit by bit while the rest comes, not all at the end.
                    os.fsync(data.fileno())
        return hashed.hexdigest()

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

    def _wait_for(self, block: int) -> None:
        with self._changed:
            while not self._blocks[block]:
                if self._closed:
                    raise DownloadFailed(f"the download of {self.file.path} was stopped")
                self._changed.wait()

    def finish(self) -> None:
        """The file is whole and verified: it gets its name."""
        with self._used():
            os.fsync(self._data)
            self.data_path.replace(self._blob)
            self._map_path.unlink(missing_ok=True)
            _sync_folder(self._blob.parent)

    def clear(self) -> None:
        """Forget what was fetched."""
        with self._changed:
            self._blocks = bytearray(len(self._blocks))
            os.pwrite(self._map, self._blocks, 0)

    def close(self) -> None:
        """Wait for who is writing, then let go: a descriptor's number is soon another file's."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._users == 0)
        os.close(self._data)
        os.close(self._map)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
