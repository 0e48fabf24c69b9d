"""Who has files, in ranges; and who of several brings which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from exo.download.hub_cache import RepoFile
from exo.download.partial_file import PartialFile
from exo.errors import ExoError


class SupplierFailed(Exception):
    """A span did not come. `rest_s`: how long the supplier asked to be left alone. `final`: this
    file will never come from there."""

    def __init__(self, error: ExoError, *, rest_s: float = 0.0, final: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.rest_s = rest_s
        self.final = final


class Supplier(ABC):
    """Somebody who has files, in ranges."""

    name: str
    kind: str
    workers: int
    checked_at_end = False
    """Whether only the end of a range tells that its bytes are right."""
    patience: Patience | None = None  # its own; None: the transfer's
    given_up = False
    """Set once it has failed too often."""

    @abstractmethod
    def read(self, file: RepoFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """The bytes [start, end) of a file, in pieces, in order.

        Raises:
            SupplierFailed: they did not all come.
        """


@dataclass(frozen=True)
class Patience:
    """Rests double from `first_rest_s` to `longest_rest_s`; after `attempts` failures in a row the
    supplier is given up. The default outlasts 40 seconds of outage."""

    first_rest_s: float = 0.3
    longest_rest_s: float = 20.0
    attempts: int = 8


class Rules(ABC):
    """Who brings which span, where several may."""

    span: int

    @abstractmethod
    def begin(self, partial: PartialFile) -> None:
        """This file is fetched from now on."""

    @abstractmethod
    def end(self, partial: PartialFile) -> None:
        """It is whole, or given up."""

    @abstractmethod
    async def poll(self) -> None:
        """Look at what suppliers have now."""

    @abstractmethod
    async def until_next_poll(self) -> None: ...

    @abstractmethod
    def may_at_all(self, supplier: Supplier, file: RepoFile, *, alone: bool) -> bool:
        """False if no span of the file should come from that supplier now."""

    @abstractmethod
    def may(self, supplier: Supplier, file: RepoFile, start: int, end: int, *, alone: bool) -> int:
        """How far from its start, which begins a block, this span should come from that supplier
        now; `start` if not at all. `alone`: there is no other."""

    @abstractmethod
    def lost(self, supplier: Supplier) -> ExoError | None:
        """Why nothing more is to be hoped for from that supplier, if so."""
