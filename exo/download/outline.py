"""A checkpoint of which not all weights are here: a folder with every file that is, and of each
weight file that is not its header.

Beside a repo's snapshots in the cache lies `outlines/<commit>/`: links to blobs, and for absent
weight files links to `<digest>.exo-header`, which has the file's size and header and takes no more
disk than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from exo.download.hub_cache import Listing, RepoCache, RepoFile, needed_files, set_link
from exo.download.sharing import FilePeer
from exo.download.supplier import Patience, Supplier, SupplierFailed
from exo.download.transfer import first_cause
from exo.errors import DownloadFailed, ExoError, ModelUnsupported
from exo.models.tensor_table import HEADER_SUFFIX, header_length

_FIRST_READ = 64 << 10
"""Bytes asked for at first: most headers are shorter."""

_AT_ONCE = 8


def is_weights(file: RepoFile) -> bool:
    """True for what only some nodes need; the rest is needed by all."""
    return file.path.endswith(".safetensors")


class Outline:
    """One commit of a repo, as far as it is here."""

    def __init__(self, cache: RepoCache, listing: Listing) -> None:
        self._cache = cache
        self._listing = listing
        self._files = needed_files(listing)
        self.folder = cache.folder / "outlines" / listing.commit

    def find(self, weights: Collection[str]) -> Path | None:
        """The folder if everything but weights is here, those named `weights` too, and of the
        others at least the header."""
        targets = {}
        for file in self._files:
            target = self._whole(file)
            if target is None and is_weights(file) and file.path not in weights:
                target = self._header(file)
            if target is None or not target.is_file():
                return None
            targets[file] = target
        for file, target in targets.items():
            set_link(self.folder / file.path, target)
        return self.folder

    async def fetch_headers(
        self, peers: Sequence[FilePeer], hub: Sequence[Supplier], patience: Patience
    ) -> None:
        """Bring the header of every weight file of which nothing is here.

        Raises:
            ExoError: nobody has a file, or it is no safetensors file.
            OSError: this machine cannot store it.
        """
        weights = [file for file in self._files if is_weights(file) and self._whole(file) is None]
        missing = [file for file in weights if not self._header(file).is_file()]
        holders = await _holders(peers, missing) if missing else {}
        limit = asyncio.Semaphore(_AT_ONCE)

        async def bring(file: RepoFile) -> None:
            async with limit:
                suppliers = [*holders[file.digest], *hub]
                header = await _read_header(suppliers, file, patience)
            await asyncio.to_thread(self._write_header, file, header)

        try:
            async with asyncio.TaskGroup() as group:
                for file in missing:
                    group.create_task(bring(file))
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures

    def _whole(self, file: RepoFile) -> Path | None:
        """The file, if all of it is here."""
        places = (self._cache.blob(file), self._cache.snapshot(self._listing.commit) / file.path)
        return next((place for place in places if place.is_file()), None)

    def _header(self, file: RepoFile) -> Path:
        return self.folder.parent / f"{file.digest}{HEADER_SUFFIX}"

    def _write_header(self, file: RepoFile, header: bytes) -> None:
        target = self._header(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        with fresh.open("wb") as stream:
            stream.write(header)
            stream.truncate(file.size)
        fresh.replace(target)


async def _holders(
    peers: Sequence[FilePeer], files: Sequence[RepoFile]
) -> dict[str, list[FilePeer]]:
    """Who has which whole file, by digest."""
    holders: dict[str, list[FilePeer]] = {file.digest: [] for file in files}
    for peer in peers:
        with contextlib.suppress(ExoError):  # it is gone; others may have them
            # Nameless: no peer is to wait for what this node does not fetch.
            for held in await peer.exchange("", list(holders)):
                if held.is_whole:
                    holders[held.digest].append(peer)
    return holders


async def _read_header(suppliers: Sequence[Supplier], file: RepoFile, patience: Patience) -> bytes:
    """The first bytes of a safetensors file, to the end of its header."""
    start = await _read(suppliers, file, 0, min(_FIRST_READ, file.size), patience)
    try:
        end = 8 + header_length(start, file.size)
    except ValueError as error:
        raise ModelUnsupported(f"{file.path} is not a safetensors file: {error}") from error
    if end > len(start):
        start += await _read(suppliers, file, len(start), end, patience)
    return start[:end]


async def _read(
    suppliers: Sequence[Supplier], file: RepoFile, start: int, end: int, patience: Patience
) -> bytes:
    """A range from the first supplier that has it."""
    last: ExoError = DownloadFailed(f"nobody has {file.path}")
    for supplier in suppliers:
        rest_s = patience.first_rest_s
        for _ in range((supplier.patience or patience).attempts):
            try:
                data = b"".join([piece async for piece in supplier.read(file, start, end)])
                if len(data) == end - start:
                    return data
                last = DownloadFailed(f"{supplier.name} broke off {file.path}")
            except SupplierFailed as failure:
                last = failure.error
                if failure.final:
                    break
                rest_s = max(rest_s, failure.rest_s)
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, patience.longest_rest_s)
    raise last
