"""The hub itself: what a repo holds, and ranges of its files over HTTP.

huggingface_hub knows where the hub is, who the user is and what a repo holds (HF_ENDPOINT,
HF_TOKEN, `hf auth login`, HF_HUB_OFFLINE). Proxies and certificates are the environment's
(HTTPS_PROXY, SSL_CERT_FILE).
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping

import aiohttp
import httpx2
import huggingface_hub
from huggingface_hub import constants, hf_api
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from exo.download.hub_cache import Listing, RepoFile
from exo.download.transfer import Supplier, SupplierFailed
from exo.errors import AccessDenied, DownloadFailed, ExoError, ModelNotFound, SourceUnreachable
from exo.tasks import on_own_thread

logger = logging.getLogger(__name__)

_LOOK_UPS = 4  # attempts to list a repo


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


async def look_up(repo: str, revision: str, endpoint: str | None) -> Listing:
    """What the repo holds at a revision, by the hub.

    Raises:
        SourceUnreachable: no answer from the hub.
        AccessDenied, ModelNotFound, DownloadFailed: its answer is a refusal.
    """
    for attempt in range(1, _LOOK_UPS + 1):
        rest_s = 0.3 * 2**attempt
        try:
            return await on_own_thread(_list_repo, repo, revision, endpoint)
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
