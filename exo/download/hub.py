"""Models from the Hugging Face hub, into the Hugging Face cache.

huggingface_hub knows where the hub is, who the user is and what a repo holds (HF_ENDPOINT,
HF_TOKEN, `hf auth login`, HF_HUB_OFFLINE). The bytes are fetched here, because it neither goes on
with a file after a crash nor verifies one. Proxies and certificates are the environment's
(HTTPS_PROXY, SSL_CERT_FILE).
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import re
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import huggingface_hub
from filelock import FileLock, Timeout
from huggingface_hub import constants, hf_api
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from exo.download.hub_cache import (
    Listing,
    RepoCache,
    RepoFile,
    cached_repos,
    needed_files,
    split_revision,
)
from exo.download.progress import OnProgress, Progress
from exo.download.sharing import FilePeer, Sharing, Swarm
from exo.download.source import ModelSource
from exo.download.transfer import Arrived, Patience, Supplier, SupplierFailed, Transfer
from exo.errors import (
    AccessDenied,
    DiskFull,
    DownloadCancelled,
    DownloadFailed,
    ExoError,
    ModelNotFound,
    SourceUnreachable,
)
from exo.models.card import ModelCard

logger = logging.getLogger(__name__)

KEEP_FREE = 256 << 20
"""Bytes of disk that a download leaves free."""

_LOOK_UPS = 4  # attempts to list a repo
_PROGRESS_S = 0.1  # between two events


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
        repo, revision = split_revision(card.repo)
        return RepoCache(repo).complete_snapshot(revision)

    def listed(self) -> list[ModelCard]:
        """Every repo in the cache whose files a chat needs are there."""
        cards = [ModelCard(repo, repo, repo=repo) for repo in cached_repos()]
        return [c for c in cards if (here := self.find(c)) and (here / "tokenizer.json").is_file()]

    def can_fetch(self, card: ModelCard) -> bool:
        if card.repo is None:
            return False
        return not huggingface_hub.is_offline_mode() or bool(self._sharing.neighbours())

    def fetch(self, card: ModelCard, on_progress: OnProgress) -> Path:
        assert card.repo is not None
        repo, revision = split_revision(card.repo)
        try:
            return asyncio.run(
                self._cancellable(card.repo, self._fetch(repo, revision, on_progress))
            )
        except asyncio.CancelledError:
            raise DownloadCancelled(
                f"the download of {card.repo} was cancelled; what came is kept"
            ) from None

    def remove(self, card: ModelCard) -> bool:
        """All revisions: their files are shared."""
        if card.repo is None:
            return False
        folder = RepoCache(split_revision(card.repo)[0]).folder
        if not folder.is_dir():
            return False
        shutil.rmtree(folder)
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

    async def _fetch(self, repo: str, revision: str, on_progress: OnProgress) -> Path:
        on_progress(Progress("checking", repo))
        with contextlib.ExitStack() as stack:
            peers = self._sharing.peers(repo)
            for peer in peers:
                stack.callback(peer.close)
            listing, has_hub = await self._list(repo, revision, peers)
            suppliers = _Suppliers(peers, has_hub)
            return await self._store(listing, revision, suppliers, on_progress)

    async def _list(
        self, repo: str, revision: str, peers: Sequence[FilePeer]
    ) -> tuple[Listing, bool]:
        """What the repo holds, and whether the hub said so or, as it cannot be asked, a peer."""
        try:
            return await _look_up(repo, revision, self._endpoint), True
        except SourceUnreachable as error:
            for peer in peers:
                with contextlib.suppress(ExoError):
                    if (listing := await peer.listing(revision)) is not None:
                        logger.info("%s: %s; %s has it", repo, error.message, peer.name)
                        return listing, False
            if huggingface_hub.is_offline_mode():
                raise ModelNotFound(
                    f"{repo} is neither on this machine nor on a live peer, and the hub is not "
                    "asked (HF_HUB_OFFLINE)",
                    param="model",
                ) from error
            raise

    async def _store(
        self, listing: Listing, revision: str, suppliers: _Suppliers, on_progress: OnProgress
    ) -> Path:
        cache = RepoCache(listing.repo)
        try:
            cache.save(listing, revision)
            files = needed_files(listing)
            async with _locked(cache, files, on_progress):
                await self._bring(cache, listing, files, suppliers, on_progress)
        except PermissionError as error:
            raise DownloadFailed(
                f"{error.filename} cannot be written; set HF_HOME to a folder of your own"
            ) from error
        return cache.snapshot(listing.commit)

    async def _bring(
        self,
        cache: RepoCache,
        listing: Listing,
        files: Sequence[RepoFile],
        suppliers: _Suppliers,
        on_progress: OnProgress,
    ) -> None:
        missing = []
        for file in files:
            if cache.has(listing.commit, file):
                continue
            if cache.blob(file).is_file():
                cache.link(listing.commit, file)
            else:
                missing.append(file)
        if not missing:
            return
        _check_disk(cache, missing)
        report = _Report(listing.repo, missing, on_progress)
        swarm = None
        if suppliers.peers:
            swarm = Swarm(self._sharing, suppliers.peers)
        async with hub_session() as session:
            hub = [HubSupplier(session, listing, self._endpoint)] if suppliers.has_hub else []
            transfer = Transfer(
                [*suppliers.peers, *hub],
                report.arrived,
                lambda file: cache.link(listing.commit, file),
                self._patience,
                swarm,
            )
            await transfer.fetch([(file, cache.blob(file)) for file in missing])
        report.send("ready")


@dataclass(frozen=True)
class _Suppliers:
    peers: Sequence[FilePeer]
    has_hub: bool


class HubSupplier(Supplier):
    """Ranges of a repo's files, over HTTP."""

    name = "the hub"
    kind = "hub"
    workers = 8

    def __init__(
        self, session: aiohttp.ClientSession, listing: Listing, endpoint: str | None
    ) -> None:
        self._session = session
        self._listing = listing
        self._endpoint = endpoint

    async def read(self, file: RepoFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        url = huggingface_hub.hf_hub_url(
            self._listing.repo,
            file.path,
            revision=self._listing.commit,
            endpoint=self._endpoint,
        )
        # Compressed, a range would not be of the file.
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            async with self._session.get(url, headers=headers) as response:
                skip = start - _first_byte(response, file, start)
                left = end - start
                async for piece in response.content.iter_any():
                    if skip:
                        dropped = min(skip, len(piece))
                        piece, skip = piece[dropped:], skip - dropped
                    if piece:
                        yield piece[:left]
                        left -= len(piece[:left])
                    if not left:
                        return
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise SupplierFailed(
                DownloadFailed(f"{file.path}: the hub cannot be read: {reason}")
            ) from error


def hub_session() -> aiohttp.ClientSession:
    """HTTP as the hub wants it: the user's token, the environment's proxy and certificates."""
    wait_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    return aiohttp.ClientSession(
        headers=build_hf_headers(library_name="exo"),
        trust_env=True,
        auto_decompress=False,
        read_bufsize=1 << 20,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=wait_s, sock_read=wait_s),
    )


def _first_byte(response: aiohttp.ClientResponse, file: RepoFile, asked: int) -> int:
    """Where in the file the body begins.

    Raises:
        SupplierFailed: the answer is a refusal, or of another file.
    """
    if response.status not in (200, 206):
        host = response.url.host or "the hub"
        raise SupplierFailed(
            refusal(response.status, f"{file.path} of {host}"),
            rest_s=_retry_after(response.headers),
            final=response.status in (401, 403, 404, 410),
        )
    if response.status == 200:
        begins, size = 0, response.content_length  # a server or proxy without ranges
    else:
        said = response.headers.get("Content-Range", "")
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", said)
        if found is None or int(found[1]) != asked:
            raise SupplierFailed(
                DownloadFailed(f"{file.path}: asked for byte {asked}, the hub sent {said!r}")
            )
        begins, size = int(found[1]), int(found[2])
    if size not in (None, file.size):
        raise SupplierFailed(
            DownloadFailed(f"{file.path} has {size} bytes on the hub, expected {file.size}"),
            final=True,
        )
    return begins


def refusal(status: int, what: str) -> ExoError:
    """What an HTTP status of the hub means for the user."""
    if status == 401:
        return AccessDenied(
            f"{what}: the hub wants to know who you are, or there is no such repo; check the name, "
            "then `hf auth login` or set HF_TOKEN"
        )
    if status == 403:
        return AccessDenied(
            f"{what} is gated: ask for access on its page of the hub, then `hf auth login` or set "
            "HF_TOKEN"
        )
    if status in (404, 410):
        return ModelNotFound(f"{what} is not on the hub; check the name and the revision")
    if status == 429:
        return DownloadFailed(
            f"{what}: the hub limits your rate; log in (`hf auth login`) or wait a few minutes"
        )
    return DownloadFailed(f"{what}: the hub answered {status}; try again later")


async def _look_up(repo: str, revision: str, endpoint: str | None) -> Listing:
    """What the repo holds at a revision, by the hub.

    Raises:
        SourceUnreachable: no answer from the hub.
        AccessDenied, ModelNotFound, DownloadFailed: its answer is a refusal.
    """
    for attempt in range(1, _LOOK_UPS + 1):
        rest_s = 0.3 * 2**attempt
        try:
            return await asyncio.to_thread(_list_repo, repo, revision, endpoint)
        except hub_errors.RevisionNotFoundError as error:
            raise ModelNotFound(
                f"{repo} has no revision {revision!r} on the hub", param="model"
            ) from error
        except hub_errors.GatedRepoError as error:
            raise refusal(403, repo) from error
        except hub_errors.RepositoryNotFoundError as error:
            raise refusal(error.response.status_code, repo) from error
        except hub_errors.HfHubHTTPError as error:
            status = error.response.status_code
            failure: ExoError = refusal(status, repo)
            if status != 429 and status < 500:
                raise failure from error
            rest_s = max(rest_s, _retry_after(error.response.headers))
        except hub_errors.OfflineModeIsEnabled as error:
            raise SourceUnreachable("the hub is not asked: HF_HUB_OFFLINE is set") from error
        except (httpx2.TransportError, OSError) as error:
            url = endpoint or constants.ENDPOINT
            failure = SourceUnreachable(
                f"the hub ({url}) cannot be reached: {error}; check the network, HTTPS_PROXY and "
                "HF_ENDPOINT"
            )
            if attempt > 1:  # a mirror may be waiting for its turn
                raise failure from error
        if attempt == _LOOK_UPS:
            raise failure
        logger.info("%s; again in %.1f s", failure.message, rest_s)
        await asyncio.sleep(rest_s)
    raise AssertionError("the loop returns or raises")


def _list_repo(repo: str, revision: str, endpoint: str | None) -> Listing:
    api = huggingface_hub.HfApi(endpoint=endpoint, library_name="exo")
    commit = api.repo_info(repo, revision=revision).sha
    if not commit:
        raise DownloadFailed(f"the hub names no commit for {repo}@{revision}")
    files = []
    for entry in api.list_repo_tree(repo, recursive=True, revision=commit):
        if isinstance(entry, hf_api.RepoFile):
            sha256, size = (entry.lfs.sha256, entry.lfs.size) if entry.lfs else (None, entry.size)
            files.append(RepoFile(entry.path, size, entry.blob_id, sha256, entry.xet_hash))
    return Listing(repo, commit, tuple(files))


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds a server asks to be left alone (RFC 9110, 10.2.3), at most two minutes."""
    said = headers.get("Retry-After", "").strip()
    if said.isdigit():
        return min(float(said), 120.0)
    try:
        date = email.utils.parsedate_to_datetime(said)
    except ValueError:
        return 0.0
    return min(max(0.0, date.timestamp() - time.time()), 120.0)


@contextlib.asynccontextmanager
async def _locked(
    cache: RepoCache, files: Sequence[RepoFile], on_progress: OnProgress
) -> AsyncIterator[None]:
    """Nobody else fetches these files; in one order, so that two processes do not wait for each
    other."""
    with contextlib.ExitStack() as stack:
        for file in sorted(files, key=lambda file: file.digest):
            lock: FileLock = cache.lock(file)
            while True:
                try:
                    lock.acquire(timeout=0)
                    break
                except Timeout:
                    on_progress(Progress("waiting", f"for another process to fetch {file.path}"))
                    await asyncio.sleep(_PROGRESS_S)
            stack.callback(lock.release)
        yield


def _check_disk(cache: RepoCache, missing: Sequence[RepoFile]) -> None:
    cache.folder.mkdir(parents=True, exist_ok=True)
    wanted = sum(file.size for file in missing) - sum(
        part.stat().st_blocks * 512
        for file in missing
        if (part := cache.blob(file).with_name(f"{file.digest}.exo-part")).is_file()
    )
    free = shutil.disk_usage(cache.folder).free
    if wanted + KEEP_FREE > free:
        raise DiskFull(
            f"{cache.repo} needs {wanted / 1e9:.1f} GB more of disk and {cache.folder} has "
            f"{free / 1e9:.1f} GB free; free some space or set HF_HOME to another disk"
        )


class _Report:
    """Turns what arrives into progress, a few times a second."""

    def __init__(self, repo: str, files: Sequence[RepoFile], on_progress: OnProgress) -> None:
        self._repo = repo
        self._total = sum(file.size for file in files)
        self._done = dict.fromkeys((file.path for file in files), 0)
        self._by_source = {"hub": 0, "peer": 0, "disk": 0}
        self._on_progress = on_progress
        self._sent = 0.0

    def arrived(self, event: Arrived) -> None:
        file = event.file
        self._done[file.path] += event.count
        self._by_source[event.kind] += event.count
        if event.kind == "disk" and not event.trouble:
            return  # all files say so before the first one moves
        now = time.monotonic()
        whole = self._done[file.path] == file.size
        if event.trouble or whole or now - self._sent > _PROGRESS_S:
            self._sent = now
            self.send("downloading", file, event.trouble)

    def send(self, phase: str, file: RepoFile | None = None, warning: str = "") -> None:
        done = sum(self._done.values())
        self._on_progress(
            Progress(
                phase,
                self._repo,
                done,
                self._total,
                file=file.path if file else "",
                file_done=self._done[file.path] if file else 0,
                file_total=file.size if file else 0,
                warning=warning,
                by_source=tuple(self._by_source.items()),
            )
        )
