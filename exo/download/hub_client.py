"""The hub itself: ranges of a repo's files over HTTP, and what its refusals mean.

huggingface_hub knows where the hub is and who the user is (HF_ENDPOINT, HF_TOKEN, `hf auth login`,
HF_HUB_OFFLINE). Proxies and certificates are the environment's (HTTPS_PROXY, SSL_CERT_FILE).
"""

from __future__ import annotations

import email.utils
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping

import aiohttp
import huggingface_hub
from huggingface_hub import constants

from exo.download.hub_cache import Listing, RepoFile
from exo.download.supplier import Supplier, SupplierFailed
from exo.errors import (
    AccessDenied,
    DownloadFailed,
    ExoError,
    ModelNotFound,
    SourceUnreachable,
)

logger = logging.getLogger(__name__)


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
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # late: slow

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
            rest_s=retry_after(response.headers),
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


def not_asked() -> SourceUnreachable:
    """HF_HUB_OFFLINE forbids it."""
    return SourceUnreachable("the hub is not asked: HF_HUB_OFFLINE is set")


def unreachable(endpoint: str | None, error: Exception) -> SourceUnreachable:
    """The hub, or the one at `endpoint`, did not answer."""
    return SourceUnreachable(
        f"the hub ({endpoint or constants.ENDPOINT}) cannot be reached: {error}; check the "
        "network, HTTPS_PROXY and HF_ENDPOINT"
    )


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


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds a server asks to be left alone (RFC 9110, 10.2.3), at most two minutes."""
    said = headers.get("Retry-After", "").strip()
    if said.isdigit():
        return min(float(said), 120.0)
    try:
        date = email.utils.parsedate_to_datetime(said)
    except ValueError:
        return 0.0
    return min(max(0.0, date.timestamp() - time.time()), 120.0)
