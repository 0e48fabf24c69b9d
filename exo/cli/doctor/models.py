"""Model files here, and the way to the hub."""

from __future__ import annotations

import email.utils
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub import constants

from exo.cli.doctor.finding import Finding
from exo.download.hub_cache import cache_folder
from exo.download.partial_file import new_digest

HUB_TIMEOUT_S = 5.0
CLOCK_S = 120.0
"""Certificates and caches mind more than that."""

_BLOCK = 2**20


def hub() -> Iterator[Finding]:
    """Whether the hub answers, and whether this machine's clock is right."""
    url = constants.ENDPOINT
    if huggingface_hub.is_offline_mode():
        text = "the hub is not asked: HF_HUB_OFFLINE is set"
        yield Finding("hub", "note", text, "unset HF_HUB_OFFLINE to fetch models")
        return
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    through = " through the proxy of HTTPS_PROXY" if proxy else ""
    try:
        began = time.monotonic()
        response = httpx2.head(url, timeout=HUB_TIMEOUT_S, follow_redirects=True)
    except (httpx2.HTTPError, OSError) as error:
        text = f"{url} does not answer{through}: {error}"
        mend = "check the network, HTTPS_PROXY, HF_ENDPOINT; a node with a way out is enough"
        yield Finding("hub", "note", text, mend)
        return
    took_ms = 1000 * (time.monotonic() - began)
    yield Finding("hub", "ok", f"{url} answers in {took_ms:.0f} ms{through}")
    if said := response.headers.get("Date"):
        off = time.time() - email.utils.parsedate_to_datetime(said).timestamp()
        if abs(off) > CLOCK_S:
            text = f"this machine's clock is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}"
            yield Finding("clock", "wrong", text, "set it by NTP: sudo timedatectl set-ntp true")


def damaged(folder: Path | None = None) -> Iterator[Finding]:
    """Files of the model cache whose content is not what their name says. Reads all of them."""
    folder = folder or cache_folder()
    # What is here in part has a suffix, and no digest to compare with.
    blobs = sorted(file for file in folder.glob("models--*/blobs/*") if not file.suffix)
    wrong = 0
    for blob in blobs:
        if not blob.is_file() or (digest := _digest(blob)) in (None, blob.name):
            continue
        wrong += 1
        repo = blob.parts[-3].removeprefix("models--").replace("--", "/")
        text = f"{blob} is damaged: its digest is {digest}"
        yield Finding("files", "wrong", text, f"rm '{blob}' && exo download {repo}")
    if not wrong:
        yield Finding("files", "ok", f"{len(blobs)} files of the model cache are whole")


def _digest(blob: Path) -> str | None:
    """Of the kind that its name is: sha256, or git's sha1; None for another name."""
    if len(blob.name) not in (40, 64):
        return None
    digest = new_digest(blob.stat().st_size, is_sha256=len(blob.name) == 64)
    with blob.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
