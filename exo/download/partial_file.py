"""A file that is being fetched, or of which only a part is wanted: its data at the right places, a
map of what is there, its digest.

Beside the blob lie `<digest>.exo-part`, the data with holes, and `<digest>.exo-map`, one byte for
each block of 1 MiB (`State`). A process that is killed loses at most the blocks it was writing; the
next one goes on from the map.

A whole file is verified by its digest before it gets its name. A part has none: so there a block
counts only once it is saved for good, and no power cut leaves a hole that is taken for weights. A
kill takes what came of a part in the last two seconds.

Nothing here waits for bytes to come, and no file stays open between two calls: a download may be of
hundreds of files, and a process may have few threads and few descriptors (macOS gives 256).
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from exo.download.hub_cache import RepoFile
from exo.errors import DownloadFailed
from exo.models.file_parts import BLOCK, MAP_SUFFIX, PART_SUFFIX, Ranges, State, blocks_of

_WRITTEN_RUN = re.compile(re.escape(bytes([State.WRITTEN])) + b"+")
_SAVE_BLOCKS, _SAVE_S = 64, 2.0
_AT_ONCE = 16  # blocks hashed by one call, so that a thread serves several files

WHOLE_FROM = 0.9
"""Of a file of which so much is needed all is fetched: then it can be verified, and other programs
find it."""


@dataclass(frozen=True)
class Wanted:
    """Of a file the blocks that are wanted: a byte for each, 1 or 0."""

    file: RepoFile
    blocks: bytes

    @classmethod
    def whole(cls, file: RepoFile) -> Wanted:
        return cls(file, b"\1" * _block_count(file))

    @classmethod
    def of(cls, file: RepoFile, ranges: Ranges) -> Wanted:
        """What these bytes are in; all of it where that is nearly the same."""
        if sum(end - start for start, end in ranges) >= WHOLE_FROM * file.size:
            return cls.whole(file)
        blocks = bytearray(_block_count(file))
        for start, end in ranges:
            first, last = blocks_of(start, end)
            blocks[first:last] = b"\1" * (last - first)
        return cls(file, bytes(blocks))

    @property
    def size(self) -> int:
        """Bytes in them."""
        return _bytes_in(_bits(self.blocks), self.file)

    def here(self, blob: Path) -> int:
        """Bytes of them that an earlier download left beside the blob."""
        kept = saved_map(blob, self.file)
        if 0 in self.blocks:
            kept = only_saved(kept)
        return _bytes_in(_bits(kept) & _bits(self.blocks), self.file)

    def is_here(self, blob: Path) -> bool:
        """Whether all of them are, or the whole file."""
        return blob.is_file() or (0 in self.blocks and self.here(blob) == self.size)


class Told(enum.IntEnum):
    """What other nodes are told of a block."""

    MISSING = 0
    HERE = 1
    COMING = 2
    UNWANTED = 3  # missing, and not asked for


def part_of(blob: Path) -> Path:
    """Where a blob's data is until it is whole."""
    return blob.with_name(f"{blob.name}{PART_SUFFIX}")


def map_of(blob: Path) -> Path:
    """Where the states of its blocks are."""
    return blob.with_name(f"{blob.name}{MAP_SUFFIX}")


def saved_map(blob: Path, file: RepoFile) -> bytes:
    """The states of a file's blocks, as the disk has them."""
    with contextlib.suppress(FileNotFoundError):
        blocks = map_of(blob).read_bytes()
        if part_of(blob).stat().st_size == file.size and len(blocks) == _block_count(file):
            return blocks
    return bytes(_block_count(file))


def tidy(blob: Path) -> None:
    """Take away what a process that was killed at the very end left beside a whole blob."""
    map_of(blob).unlink(missing_ok=True)


def new_digest(size: int, *, is_sha256: bool) -> hashlib._Hash:
    """What a blob of `size` bytes is named by: its sha256, or as git names it, whose hash begins
    with a header (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects)."""
    if is_sha256:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


class PartialFile:
    """Who makes one holds the file's lock. Writing, saving, hashing and `close` may be on different
    threads, one of them hashing; all else is the event loop's."""

    def __init__(self, blob: Path, wanted: Wanted) -> None:
        self.file = wanted.file
        self._blob = blob
        self.data_path = part_of(blob)
        self._map_path = map_of(blob)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _opened(self.data_path, os.O_CREAT) as data, _opened(self._map_path, os.O_CREAT) as m:
            count = _block_count(self.file)
            if os.fstat(data).st_size != self.file.size or os.fstat(m).st_size != count:
                os.ftruncate(m, 0)
                os.ftruncate(m, count)
                os.ftruncate(data, self.file.size)
            blocks = os.pread(m, count, 0)
            self.is_whole_wanted = bool(np.all(_bits(wanted.blocks) | _bits(blocks)))
            if not self.is_whole_wanted:
                blocks = only_saved(blocks)
            self._blocks = bytearray(blocks)
        self._wanted = wanted.blocks
        self.on_its_way: set[tuple[int, int]] = set()  # ranges somebody is asked for
        self._unsaved = 0  # blocks, roughly
        self._saved_at = time.monotonic()
        self._hashed = 0  # blocks
        self._digest = new_digest(self.file.size, is_sha256=bool(self.file.sha256))
        self._changed = threading.Condition()
        self._saving = threading.Lock()
        self._closed = False
        self._users = 0  # threads that write

    @property
    def done_bytes(self) -> int:
        """Of what is wanted."""
        return _bytes_in(_bits(self._blocks) & _bits(self._wanted), self.file)

    @property
    def is_complete(self) -> bool:
        """Whether all that is wanted is there."""
        return not np.any(_bits(self._wanted) & ~_bits(self._blocks))

    def misses_any(self, held: bytes) -> bool:
        """Whether of a peer's blocks (`states`) any is there that is wanted here and missing."""
        theirs = np.frombuffer(held, np.uint8) == Told.HERE
        if len(theirs) != len(self._blocks):
            return False
        return bool(np.any(theirs & _bits(self._wanted) & ~_bits(self._blocks)))

    def states(self) -> bytes:
        """What other nodes are told, a byte (`Told`) for each block."""
        return block_states(self._blocks, self._wanted, list(self.on_its_way))

    def missing(self) -> list[tuple[int, int]]:
        """Ranges [start, end) that are wanted and not there, in order."""
        ranges: list[tuple[int, int]] = []
        for block, (wanted, there) in enumerate(zip(self._wanted, self._blocks, strict=True)):
            if there or not wanted:
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
        written = bytes([State.WRITTEN]) * (last - first)
        if self.is_whole_wanted:  # the digest will tell whether that was true
            with _opened(self._map_path) as descriptor:
                os.pwrite(descriptor, written, first)
        self._blocks[first:last] = written
        self._unsaved += last - first
        return True

    @property
    def wants_saving(self) -> bool:
        """Whether so much was written, or so long ago, that it is time for `save`."""
        passed_s = time.monotonic() - self._saved_at
        return self._unsaved >= _SAVE_BLOCKS or (self._unsaved > 0 and passed_s > _SAVE_S)

    def save(self) -> None:
        """What is there stays, whatever happens to this machine."""
        with self._saving:
            self._unsaved, self._saved_at = 0, time.monotonic()
            blocks = bytes(self._blocks)
            if State.WRITTEN not in blocks:
                return
            with _opened(self.data_path) as descriptor:
                os.fsync(descriptor)
            with _opened(self._map_path) as descriptor:
                for run in _WRITTEN_RUN.finditer(blocks):
                    saved = bytes([State.SAVED]) * len(run[0])
                    os.pwrite(descriptor, saved, run.start())
                    self._blocks[run.start() : run.end()] = saved
                os.fsync(descriptor)

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
        with self._saving:
            self._wanted = b"\1" * len(self._blocks)
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


def block_states(blocks: bytes | bytearray, wanted: bytes, on_its_way: Ranges = ()) -> bytes:
    """See `PartialFile.states`."""
    absent = np.where(_bits(wanted), Told.MISSING, Told.UNWANTED)
    found = np.where(_bits(blocks), Told.HERE, absent)
    states = bytearray(found.astype(np.uint8).tobytes())
    for start, end in on_its_way:
        for block in range(*blocks_of(start, end)):
            states[block] = states[block] or Told.COMING
    return bytes(states)


def _block_count(file: RepoFile) -> int:
    return -(-file.size // BLOCK)


def only_saved(blocks: bytes) -> bytes:
    """A map without the blocks that a power cut may have taken."""
    return blocks.replace(bytes([State.WRITTEN]), bytes([State.MISSING]))


def _bits(blocks: bytes | bytearray) -> npt.NDArray[np.bool_]:
    # Of a copy: a view would keep the array from being replaced by slices.
    return np.frombuffer(bytes(blocks), np.uint8).astype(np.bool_)


def _bytes_in(blocks: npt.NDArray[np.bool_], file: RepoFile) -> int:
    """Bytes in these blocks; the last one may be short."""
    whole = int(blocks.sum()) * BLOCK
    if len(blocks) and blocks[-1]:
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
