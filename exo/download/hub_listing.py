"""What a repo on the hub holds. Imported late: what it needs of huggingface_hub takes a third of a
second, and a model that is here needs no hub."""

from __future__ import annotations

import asyncio
import logging

import httpx2
import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_api

from exo.download.hub_cache import Listing, RepoFile
from exo.download.hub_client import not_asked, refusal, retry_after, unreachable
from exo.errors import DownloadFailed, ExoError, ModelNotFound
from exo.tasks import on_own_thread

logger = logging.getLogger(__name__)

_LOOK_UPS = 4  # attempts to list a repo


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
            rest_s = max(rest_s, retry_after(error.response.headers))
        except hub_errors.OfflineModeIsEnabled as error:
            raise not_asked() from error
        except (httpx2.TransportError, OSError) as error:
            failure = unreachable(endpoint, error)
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
