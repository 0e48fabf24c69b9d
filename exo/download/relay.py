"""The hub for a peer that cannot reach it: one node of a cluster with a way out is enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import huggingface_hub

from exo.download.hub_cache import Listing, RepoCache
from exo.download.hub_client import HubSupplier, hub_session
from exo.download.sharing import Sharing, check_names
from exo.download.supplier import SupplierFailed
from exo.errors import ModelNotFound


async def listing_for_peer(
    sharing: Sharing, repo: str, revision: str, *, ask_hub: bool
) -> Listing | None:
    """What this node knows a repo to hold, or with `ask_hub` what the hub says.

    Raises:
        ExoError: the hub cannot be asked or refuses.
    """
    known = await asyncio.to_thread(sharing.listing, repo, revision)
    if known is not None or not ask_hub:
        return known
    from exo.download.hub_listing import look_up

    check_names(repo, [])
    found = await look_up(repo, revision, None)
    # For `relayed`. What the revision means on this machine stays as it is.
    await asyncio.to_thread(RepoCache(repo).save, found, found.commit)
    return found


async def relayed(repo: str, digest: str, start: int, end: int) -> AsyncGenerator[bytes, None]:
    """The bytes [start, end) of a file from the hub, in pieces; nothing of it is kept.

    Raises:
        ModelNotFound: no listing here has the file, or the hub is not to be asked.
        ExoError: the hub cannot be read.
    """
    check_names(repo, [digest])
    if huggingface_hub.is_offline_mode():
        raise ModelNotFound("the hub is not asked: HF_HUB_OFFLINE is set")
    for listing in await asyncio.to_thread(RepoCache(repo).listings):
        for file in listing.files:
            if file.digest == digest:
                async with hub_session() as session:
                    try:
                        pieces = HubSupplier(session, listing, None).read(file, start, end)
                        async for piece in pieces:
                            yield piece
                    except SupplierFailed as failure:
                        raise failure.error from failure
                return
    raise ModelNotFound(f"no listing of {repo} on this node has {digest}")
