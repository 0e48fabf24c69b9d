"""Weight files that are cut short while they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from exo.errors import EngineFailed
from exo.inference.cpu import _native as native


@dataclass(frozen=True)
class _Mapped:
    file: Path
    size: int
    inode: tuple[int, int]

    @property
    def is_shorter(self) -> bool:
        """Within the last page that is left of a file its map reads zeros."""
        try:
            found = self.file.stat()
        except FileNotFoundError:
            return False  # the map keeps what had this name
        return (found.st_dev, found.st_ino) == self.inode and found.st_size < self.size


class FileGuard:
    """Reading on through the map of such a file would end the process. Here what is gone is zeros,
    and `check` says so."""

    def __init__(self) -> None:
        self._files: dict[int, _Mapped] = {}

    def add(self, file: Path, data: npt.NDArray[np.uint8]) -> None:
        """`data` is the whole map, which lives until `close`."""
        found = file.stat()
        mapped = _Mapped(file, data.nbytes, (found.st_dev, found.st_ino))
        self._files[native.guard_map(data)] = mapped

    def check(self) -> None:
        """To be asked after something was read, before it is used.

        Raises:
            EngineFailed: a file was found cut short.
        """
        for guard, mapped in self._files.items():
            if native.lost_pages(guard) or mapped.is_shorter:
                raise EngineFailed(
                    f"{mapped.file} was cut short while it was read: something else wrote to it. "
                    "Bring the whole file back and load the model again"
                )

    def close(self) -> None:
        for guard in self._files:
            native.unguard_map(guard)
        self._files.clear()
