"""Weight files of which only parts are on this machine, and which parts.

Such a file is a link to `<digest>.exo-header`, the file's header with nothing after it, or to
`<digest>.exo-part`, its data with holes, beside which `<digest>.exo-map` has a byte for each block
of 1 MiB. All have the file's full size and take the disk of what is in them.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path

BLOCK = 1 << 20

HEADER_SUFFIX = ".exo-header"
PART_SUFFIX = ".exo-part"
MAP_SUFFIX = ".exo-map"

Ranges = Sequence[tuple[int, int]]
"""Bytes [start, end) of a file."""

Parts = Mapping[str, Ranges]
"""Of a model's weight files, by name, the bytes that are needed; of one that is not named, none but
its header."""


class State(enum.IntEnum):
    """Of a block, as the map has it."""

    MISSING = 0
    WRITTEN = 1  # and would be lost if the power went
    SAVED = 2


def is_in_part(file: Path) -> bool:
    """Whether not all of a folder's weight file need be here."""
    return file.is_symlink() and file.readlink().suffix in (HEADER_SUFFIX, PART_SUFFIX)


class BlocksHere:
    """Which blocks of a folder's weight file are on this machine."""

    def __init__(self, file: Path) -> None:
        self._blocks: bytes | None = None  # None: all of them
        if is_in_part(file):
            target = file.parent / file.readlink()
            if target.suffix == HEADER_SUFFIX:
                self._blocks = b""
            else:
                with contextlib.suppress(FileNotFoundError):  # the file has got its name
                    self._blocks = target.with_suffix(MAP_SUFFIX).read_bytes()

    def hold(self, start: int, end: int) -> bool:
        """Whether bytes [start, end) of the file are in them."""
        return self._blocks is None or are_saved(self._blocks, start, end)


def are_saved(blocks: bytes, start: int, end: int) -> bool:
    """Whether a map says that bytes [start, end) are here."""
    first, last = blocks_of(start, end)
    return blocks[first:last] == bytes([State.SAVED]) * (last - first)


def blocks_of(start: int, end: int) -> tuple[int, int]:
    """The blocks [first, last) that bytes [start, end) are in."""
    return start // BLOCK, -(-end // BLOCK)


def merged(ranges: Ranges) -> list[tuple[int, int]]:
    """The same bytes in as few ranges as can be, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
