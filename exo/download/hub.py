"""Models from the Hugging Face hub and from peers, into the Hugging Face cache.

The bytes are fetched here and not by huggingface_hub, because it neither goes on with a file after
a crash nor verifies one, nor asks peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from filelock import FileLock, Timeout

from exo.download.gguf_repo import quantizations
from exo.download.hub_cache import (
    Listing,
    RepoCache,
    RepoFile,
    RepoName,
    cached_repos,
    check_index,
    left_out,
)
from exo.download.hub_client import HubSupplier, hub_session
from exo.download.outline import Outline
from exo.download.partial_file import Wanted, tidy
from exo.download.progress import OnProgress, Progress
from exo.download.report import PROGRESS_S, Report
from exo.download.sharing import FilePeer, Sharing, Swarm
from exo.download.source import ModelSource
from exo.download.supplier import Patience, Supplier
from exo.download.transfer import Transfer, storage_error
from exo.errors import (
    DiskFull,
    DownloadCancelled,
    DownloadFailed,
    ExoError,
    ModelNotFound,
    ModelUnsupported,
    SourceUnreachable,
)
from exo.models.card import OLLAMA, ModelCard
from exo.models.file_parts import Parts
from exo.models.weight_files import INDEX

logger = logging.getLogger(__name__)

KEEP_FREE = 256 << 20
"""Bytes of disk that a download leaves free."""

LOW_DISK = 5 << 30
"""Bytes of free disk below which a download warns."""


class Hub(ModelSource):
    """What is in the cache is used without asking the hub: a model changes when the user asks for
    it (`exo download`), not when the network is there."""

    name = "Hugging Face hub"
    renews = True

    def __init__(
        self,
        endpoint: str | None = None,
        patience: Patience | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._sharing = sharing or Sharing()
        self._endpoint = endpoint  # None: HF_ENDPOINT, or the hub itself
        self._patience = patience or Patience()
        self._running: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Task[Path]]] = []
        self._closed = False

    def find(self, card: ModelCard) -> Path | None:
        if card.repo is None:
            return None
        name = RepoName.of(card.repo)
        return RepoCache(name.repo, name.quantization).complete_snapshot(name.revision)

    def listed(self) -> list[ModelCard]:
        """Every repo in the cache of which there is what a chat needs, but for weights that another
        node may have."""
        cards = [ModelCard(repo, repo, repo=repo) for repo in cached_repos()]
        found = ((card, self.find_part(card, {})) for card in cards)
        whole = [card for card, here in found if here and (here / "tokenizer.json").is_file()]
        for repo in cached_repos():
            whole += [ModelCard(name, name, repo=name) for name in self._quantizations(repo)]
        return whole

    def _quantizations(self, repo: str) -> list[str]:
        """The models that GGUF files of a repo are, of those that are here, whole or in part."""
        cache = RepoCache(repo)
        here = cache.quantizations_here("main")
        if (listing := _known(cache, "main")) is not None:
            for name in quantizations(file.path for file in listing.files):
                if name not in here and Outline(RepoCache(repo, name), listing).is_described:
                    here.append(name)
        return [f"{repo}:{name}" for name in here]

    def can_fetch(self, card: ModelCard) -> bool:
        if card.repo is None or card.repo.startswith(OLLAMA):
            return False
        return not huggingface_hub.is_offline_mode() or bool(self._sharing.neighbours())

    def left_out(self, card: ModelCard) -> dict[str, list[RepoFile]]:
        if card.repo is None:
            return {}
        name = RepoName.of(card.repo)
        listing = _known(RepoCache(name.repo), name.revision)
        return left_out(listing, name.quantization) if listing is not None else {}

    def find_part(self, card: ModelCard, parts: Parts) -> Path | None:
        if (whole := self.find(card)) is not None or card.repo is None:
            return whole
        name = RepoName.of(card.repo)
        cache = RepoCache(name.repo, name.quantization)
        listing = _known(cache, name.revision)
        try:
            return Outline(cache, listing).find(parts) if listing is not None else None
        except (ModelUnsupported, OSError) as error:
            # Not for exo, or a cache that only others may write: who fetches it is told.
            logger.info("%s: not used in part: %s", card.repo, error)
            return None

    def fetch(self, card: ModelCard, on_progress: OnProgress) -> Path:
        return self._run(card, None, on_progress)

    def fetch_part(self, card: ModelCard, parts: Parts, on_progress: OnProgress) -> Path:
        return self._run(card, parts, on_progress)

    def _run(self, card: ModelCard, parts: Parts | None, on_progress: OnProgress) -> Path:
        assert card.repo is not None
        try:
            return asyncio.run(
                self._cancellable(card.repo, self._fetch(card.repo, parts, on_progress))
            )
        except asyncio.CancelledError:
            raise DownloadCancelled(
                f"the download of {card.repo} was cancelled; what came is kept"
            ) from None

    def remove(self, card: ModelCard) -> bool:
        """All revisions: their files are shared. Where a quantization is named, only that."""
        if card.repo is None:
            return False
        name = RepoName.of(card.repo)
        cache = RepoCache(name.repo, name.quantization)
        if not cache.folder.is_dir():
            return False
        if name.quantization:
            listing = _known(cache, name.revision)
            in_part = listing is not None and Outline(cache, listing).remove()
            return cache.remove_quantization(name.revision) or in_part
        shutil.rmtree(cache.folder)
        return True

    def cancel(self, card: ModelCard) -> bool:
        running = [(loop, task) for repo, loop, task in self._running if repo == card.repo]
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)
        return bool(running)

    def close(self) -> None:
        self._closed = True
        for _, loop, task in list(self._running):
            loop.call_soon_threadsafe(task.cancel)

    async def _cancellable(self, repo: str, work: Coroutine[Any, Any, Path]) -> Path:
        task = asyncio.ensure_future(work)
        entry = (repo, asyncio.get_running_loop(), task)
        self._running.append(entry)
        try:
            if self._closed:
                task.cancel()
            return await task
        finally:
            self._running.remove(entry)

    async def _fetch(self, name: str, parts: Parts | None, on_progress: OnProgress) -> Path:
        """`parts`: None for all and the newest; else those of the commit that is here already,
        if one is: nodes that bring different parts must not mix commits."""
        wanted = RepoName.of(name)
        repo = wanted.repo
        on_progress(Progress("checking", name))
        with contextlib.ExitStack() as stack:
            peers = self._sharing.peers(repo)
            for peer in peers:
                stack.callback(peer.close)
            known = _known(RepoCache(repo), wanted.revision) if parts is not None else None
            at = known.commit if known is not None else wanted.revision
            listing, has_hub = await self._list(repo, at, peers)
            suppliers = _Suppliers(peers, has_hub)
            return await self._store(listing, wanted, parts, suppliers, on_progress)

    async def _list(
        self, repo: str, revision: str, peers: Sequence[FilePeer]
    ) -> tuple[Listing, bool]:
        """What the repo holds, and whether the hub said so or, as it cannot be asked, a peer."""
        from exo.download.hub_listing import look_up

        try:
            return await look_up(repo, revision, self._endpoint), True
        except SourceUnreachable as error:
            ask_hub = not huggingface_hub.is_offline_mode()
            for peer in peers:
                with contextlib.suppress(ExoError):
                    if (listing := await peer.listing(revision, ask_hub=ask_hub)) is not None:
                        logger.info("%s: %s; %s knows it", repo, error.message, peer.name)
                        return listing, False
            if huggingface_hub.is_offline_mode():
                raise ModelNotFound(
                    f"{repo} is neither on this machine nor on a live peer, and the hub is not "
                    "asked (HF_HUB_OFFLINE)",
                    param="model",
                ) from error
            raise

    async def _store(
        self,
        listing: Listing,
        wanted: RepoName,
        parts: Parts | None,
        suppliers: _Suppliers,
        on_progress: OnProgress,
    ) -> Path:
        cache = RepoCache(listing.repo, wanted.quantization)
        try:
            cache.save(listing, wanted.revision)
            outline = Outline(cache, listing)
            brought = outline.wanted(parts)
            async with hub_session() as session:
                hub: list[Supplier] = []
                if suppliers.has_hub:
                    hub = [HubSupplier(session, listing, self._endpoint)]
                elif not huggingface_hub.is_offline_mode():
                    hub = [peer.relay() for peer in suppliers.peers]
                await self._bring(
                    cache, listing, outline, brought, suppliers.peers, hub, on_progress
                )
                if parts is None:
                    paths = [wanted.file.path for wanted in brought]
                    return await asyncio.to_thread(cache.folder_of, listing.commit, paths)
                await outline.fetch_headers(suppliers.peers, hub, self._patience)
                found = await asyncio.to_thread(outline.find, parts)
        except OSError as error:
            raise storage_error(error) from error
        if found is None:
            raise DownloadFailed(f"files of {listing.repo} were deleted while others came")
        return found

    async def _bring(
        self,
        cache: RepoCache,
        listing: Listing,
        outline: Outline,
        brought: Sequence[Wanted],
        peers: Sequence[FilePeer],
        hub: Sequence[Supplier],
        on_progress: OnProgress,
    ) -> None:
        def here(file: RepoFile) -> None:
            if cache.blob(file).is_file():
                cache.link(listing.commit, file)
                outline.got_whole(file)
            if file.path == INDEX:  # one of the first to come: an incomplete model ends here
                check_index(cache.snapshot(listing.commit), listing)

        missing = [wanted for wanted in brought if not _is_here(cache, listing, wanted)]
        check_index(cache.snapshot(listing.commit), listing)
        if not missing:
            return
        report = Report(listing.repo, missing, on_progress, _check_disk(cache, missing))
        swarm = Swarm(self._sharing, peers) if peers else None
        transfer = Transfer(
            [*peers, *hub],
            lambda wanted: _claimed(cache, listing, wanted, report),
            report.arrived,
            here,
            self._patience,
            swarm,
        )
        with swarm.hearing() if swarm else contextlib.nullcontext():
            await transfer.fetch([(wanted, cache.blob(wanted.file)) for wanted in missing])
        report.send("ready")


def _is_here(cache: RepoCache, listing: Listing, wanted: Wanted) -> bool:
    """Whether what is wanted of a file is here; if only its name is missing it gets that."""
    file = wanted.file
    if not cache.has(listing.commit, file):
        if not cache.blob(file).is_file():
            return wanted.is_here(cache.blob(file))
        tidy(cache.blob(file))
        cache.link(listing.commit, file)
    return True


def _known(cache: RepoCache, revision: str) -> Listing | None:
    """What the repo holds at the commit that is here."""
    commit = cache.commit(revision)
    return cache.listing(commit) if commit is not None else None


@dataclass(frozen=True)
class _Suppliers:
    peers: Sequence[FilePeer]
    has_hub: bool


@contextlib.asynccontextmanager
async def _claimed(
    cache: RepoCache, listing: Listing, wanted: Wanted, report: Report
) -> AsyncIterator[bool]:
    """Meanwhile nobody else fetches this file; False if somebody just did. No file waits for
    another one's lock, so two processes cannot wait for each other."""
    lock: FileLock = cache.lock(wanted.file)
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            report.waiting(wanted.file)
            await asyncio.sleep(PROGRESS_S)
    try:
        yield not _is_here(cache, listing, wanted)
    finally:
        lock.release()


def _check_disk(cache: RepoCache, missing: Sequence[Wanted]) -> str:
    """Raises DiskFull if there is too little; a warning if there will be little, else ""."""
    cache.folder.mkdir(parents=True, exist_ok=True)
    wanted = sum(one.size - one.here(cache.blob(one.file)) for one in missing)
    free = shutil.disk_usage(cache.folder).free
    if wanted + KEEP_FREE > free:
        raise DiskFull(
            f"{cache.repo} needs {wanted / 1e9:.1f} GB more of disk and {cache.folder} has "
            f"{free / 1e9:.1f} GB free; free some space or set HF_HOME to another disk"
        )
    left = free - wanted
    return f"low disk: {left / 1e9:.1f} GB will be left" if left < LOW_DISK else ""
