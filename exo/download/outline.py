"""A checkpoint of which not all weights are here: a folder with every file that is, and of each
weight file that is not as much as there is, or its header.

Beside a repo's snapshots in the cache lies `outlines/<commit>/`: links to blobs, and for other
weight files links to what `exo/models/file_parts.py` describes, beside the folder. Of GGUF files
the folder is one that is made of their metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from exo.download.hub_cache import Listing, RepoCache, RepoFile, needed_files, set_link
from exo.download.partial_file import Told, Wanted, map_of, part_of, saved_map
from exo.download.sharing import FilePeer
from exo.download.supplier import Patience, Supplier, SupplierFailed
from exo.download.transfer import first_cause
from exo.errors import DownloadFailed, ExoError, ModelUnsupported
from exo.models.file_parts import (
    BLOCK,
    HEADER_SUFFIX,
    MAP_SUFFIX,
    PART_SUFFIX,
    Parts,
    Ranges,
    are_saved,
)
from exo.models.gguf.config import tensors_in_config
from exo.models.gguf.file import parse_gguf
from exo.models.gguf.header import ENDS_TOO_SOON
from exo.models.tensor_table import header_length

_FIRST_READ = 64 << 10
"""Bytes asked for at first: most headers are shorter."""

_LONGEST_HEADER = 128 << 20
"""Of a GGUF file: its vocabulary, some megabytes, is part of it."""

_AT_ONCE = 8


class Outline:
    """One commit of a repo, as far as it is here.

    Raises:
        ModelUnsupported: the repo holds nothing that exo runs.
    """

    def __init__(self, cache: RepoCache, listing: Listing) -> None:
        self._cache = cache
        self._listing = listing
        self._files = needed_files(listing, cache.quantization)
        parent = cache.folder / "outlines"
        self._names = {file.path: file.path for file in self._files}
        """What files are called in the folder, by their path in the repo."""
        if not self._is_gguf:
            self.folder = parent / listing.commit
            return
        from exo.models.gguf.folder import weight_names  # late: imports tokenizers

        self.folder = parent / f"{listing.commit}-{Path(self._files[0].path).stem}"
        self._names = dict(zip(self._names, weight_names(len(self._files)), strict=True))

    @property
    def _is_gguf(self) -> bool:
        return self._files[0].path.endswith(".gguf")

    @property
    def is_described(self) -> bool:
        """Whether the folder was made of GGUF files' headers."""
        return (self.folder / "config.json").is_file()

    def wanted(self, parts: Parts | None) -> list[Wanted]:
        """What is to be brought: the files, of weights what `parts` says, None being all."""
        found = []
        for file in self._files:
            if parts is None or not is_weights(file):
                found.append(Wanted.whole(file))
            elif ranges := parts.get(self._names[file.path]):
                found.append(Wanted.of(file, ranges))
        return found

    def find(self, parts: Parts) -> Path | None:
        """The folder if everything but weights is here, and of those `parts` and the headers."""
        targets = {}
        for file in self._files:
            name = self._names[file.path]
            target = self._whole(file)
            if target is not None:
                self._forget_part(file)
            elif is_weights(file) and self._header(file).is_file():
                target = self._part(file, parts.get(name, ()))
            if target is None:
                return None
            targets[name] = target
        if self._is_gguf and not self.is_described:
            from exo.models.gguf.folder import make_folder  # late: imports tokenizers

            headers = [self._whole(file) or self._header(file) for file in self._files]
            make_folder(headers, self.folder)
        for name, target in targets.items():
            set_link(self.folder / name, target)
        return self.folder

    async def fetch_headers(
        self, peers: Sequence[FilePeer], hub: Sequence[Supplier], patience: Patience
    ) -> None:
        """Bring the header of every weight file of which nothing is here.

        Raises:
            ExoError: nobody has a file, or it is not what its name says.
            OSError: this machine cannot store it.
        """
        missing = [
            file
            for file in self._files
            if is_weights(file) and self._whole(file) is None and not self._header(file).is_file()
        ]
        holders = await _holders(peers, missing) if missing else {}
        limit = asyncio.Semaphore(_AT_ONCE)

        async def bring(file: RepoFile) -> None:
            async with limit:
                source = _Source([*holders[file.digest], *hub], file, patience)
                header = await (_gguf_header(source) if self._is_gguf else _header(source))
            await asyncio.to_thread(self._write_header, file, header)

        try:
            async with asyncio.TaskGroup() as group:
                for file in missing:
                    group.create_task(bring(file))
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures

    def got_whole(self, file: RepoFile) -> None:
        """A file has its name now: who reads a part of it goes on, and it keeps no disk of its
        own."""
        if os.path.lexists(part := self._beside(file, PART_SUFFIX)):
            set_link(part, self._cache.blob(file))

    def remove(self) -> bool:
        """Delete what is here of the weights in part; False if nothing is."""
        found = self.folder.is_dir()
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in filter(is_weights, self._files):
            blob = self._cache.blob(file)
            found = found or part_of(blob).is_file()
            self._forget_part(file)
            for path in (self._header(file), part_of(blob), map_of(blob)):
                path.unlink(missing_ok=True)
        return found

    def _whole(self, file: RepoFile) -> Path | None:
        """The file, if all of it is here."""
        places = (self._cache.blob(file), self._cache.snapshot(self._listing.commit) / file.path)
        return next((place for place in places if place.is_file()), None)

    def _part(self, file: RepoFile, ranges: Ranges) -> Path | None:
        """What is here of a weight file if these bytes are: the header, where there never were any.
        A link that once led to data never leads to holes again: who loads opens files as it goes.
        """
        if not ranges:
            part = self._beside(file, PART_SUFFIX)
            return part if part.exists() else self._header(file)
        blob = self._cache.blob(file)
        kept = saved_map(blob, file)
        if not all(are_saved(kept, start, end) for start, end in ranges):
            return None
        # By names of their own, which stay when the blob gets its name while this is read.
        data = self._beside(file, PART_SUFFIX)
        _hard_link(map_of(blob), self._beside(file, MAP_SUFFIX))
        _hard_link(part_of(blob), data)
        return data

    def _forget_part(self, file: RepoFile) -> None:
        for suffix in (PART_SUFFIX, MAP_SUFFIX):
            self._beside(file, suffix).unlink(missing_ok=True)

    def _header(self, file: RepoFile) -> Path:
        return self._beside(file, HEADER_SUFFIX)

    def _beside(self, file: RepoFile, suffix: str) -> Path:
        return self.folder.parent / f"{file.digest}{suffix}"

    def _write_header(self, file: RepoFile, header: dict[int, bytes]) -> None:
        target = self._header(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        with fresh.open("wb") as stream:
            stream.truncate(file.size)
            for start, data in header.items():
                stream.seek(start)
                stream.write(data)
        fresh.replace(target)


def is_weights(file: RepoFile) -> bool:
    """True for what only some nodes need; the rest is needed by all."""
    return file.path.endswith((".safetensors", ".gguf"))


def _hard_link(source: Path, link: Path) -> None:
    if link.exists() and link.samefile(source):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.hardlink_to(source)
    except OSError:  # Android forbids it, some file systems have none
        fresh.symlink_to(os.path.relpath(source, link.parent))
    fresh.replace(link)


async def _holders(
    peers: Sequence[FilePeer], files: Sequence[RepoFile]
) -> dict[str, list[FilePeer]]:
    """Who has the beginning of which file, by digest."""
    holders: dict[str, list[FilePeer]] = {file.digest: [] for file in files}
    for peer in peers:
        with contextlib.suppress(ExoError):  # it is gone; others may have them
            # Nameless: no peer is to wait for what this node does not fetch.
            for held in await peer.exchange("", list(holders)):
                if held.state(0, 1) is Told.HERE:
                    holders[held.digest].append(peer)
    return holders


async def _header(source: _Source) -> dict[int, bytes]:
    """The first bytes of a safetensors file, to the end of its header."""
    file = source.file
    start = await source.read(0, min(_FIRST_READ, file.size))
    try:
        end = 8 + header_length(start, file.size)
    except ValueError as error:
        raise ModelUnsupported(f"{file.path} is not a safetensors file: {error}") from error
    if end > len(start):
        start += await source.read(len(start), end)
    return {0: start[:end]}


async def _gguf_header(source: _Source) -> dict[int, bytes]:
    """The first bytes of a GGUF file, to the end of its header, and the tensors that are part of
    its configuration. Only at its end is known how long a header is."""
    file = source.file
    start = await source.read(0, min(_FIRST_READ, file.size))
    while True:
        try:
            gguf = await asyncio.to_thread(parse_gguf, Path(file.path), start, file.size)
            break
        except ENDS_TOO_SOON as error:
            more = min(max(BLOCK, 3 * len(start) // 2), file.size, _LONGEST_HEADER)
            if not start.startswith(b"GGUF") or more <= len(start):
                raise ModelUnsupported(f"{file.path} is not a GGUF file: {error}") from error
        start += await source.read(len(start), more)
    return {0: start[: gguf.data_start]} | {
        one.offset: await source.read(one.offset, one.offset + one.nbytes)
        for one in tensors_in_config(gguf)
    }


class _Source:
    """A file's ranges, from the first supplier that has them."""

    def __init__(self, suppliers: Sequence[Supplier], file: RepoFile, patience: Patience) -> None:
        self.file = file
        self._suppliers = suppliers
        self._patience = patience

    async def read(self, start: int, end: int) -> bytes:
        """Raises ExoError if nobody has them."""
        file, patience = self.file, self._patience
        last: ExoError = DownloadFailed(f"nobody has {file.path}")
        for supplier in self._suppliers:
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
