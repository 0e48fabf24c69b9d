"""Weight files that are cut short while they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from exo.errors import EngineFailed
from exo.inference.cpu import _native as native


class FileGuard:
    """Reading on through the map of such a file would end the process. Here what is gone is zeros,
    and `check` says so."""

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}

    def add(self, file: Path, data: npt.NDArray[np.uint8]) -> None:
        """`data` is the whole map, which lives until `close`."""
        self._files[native.guard_map(data)] = file

    def check(self) -> None:
        """To be asked after something was read, before it is used.

        Raises:
            EngineFailed: a file was found cut short.
        """
        for guard, file in self._files.items():
            if native.lost_pages(guard):
                raise EngineFailed(
                    f"{file} was cut short while it was read: something else wrote to it. Bring "
                    "the whole file back and load the model again"
                )

    def close(self) -> None:
        for guard in self._files:
            native.unguard_map(guard)
        self._files.clear()
