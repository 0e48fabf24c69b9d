"""Models on the hub by words of their names. Imported late, like hub_listing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx2
import huggingface_hub
from huggingface_hub import errors as hub_errors

from exo.download.hub_client import not_asked, refusal, unreachable
from exo.tasks import on_own_thread

FOUND = 30
"""The most downloaded ones of those that match."""

READABLE = {"safetensors", "gguf", "mlx"}
"""Tags of repos that hold files which exo reads."""

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class FoundRepo:
    """`size` in bytes of its weights, 0 if the hub does not say; of several quantizations, too."""

    repo: str
    downloads: int
    size: int
    is_gguf: bool


async def search(words: str, endpoint: str | None = None) -> list[FoundRepo]:
    """Repos whose names hold the words, the most downloaded first.

    Raises:
        SourceUnreachable: no answer from the hub, or it is not to be asked.
        DownloadFailed: its answer is a refusal.
    """
    try:
        return await on_own_thread(_search, words, endpoint)
    except hub_errors.OfflineModeIsEnabled as error:
        raise not_asked() from error
    except hub_errors.HfHubHTTPError as error:
        raise refusal(error.response.status_code, "the search") from error
    except (httpx2.TransportError, OSError) as error:
        raise unreachable(endpoint, error) from error


def _search(words: str, endpoint: str | None) -> list[FoundRepo]:
    api = huggingface_hub.HfApi(endpoint=endpoint, library_name="exo")
    found = api.list_models(
        search=words, sort="downloads", limit=FOUND, expand=["downloads", "safetensors", "tags"]
    )
    return [
        FoundRepo(
            model.id,
            model.downloads or 0,
            _size(model.safetensors.parameters) if model.safetensors else 0,
            "gguf" in (model.tags or ()),
        )
        for model in found
        if READABLE & set(model.tags or ())
    ]


def _size(parameters: Mapping[str, int]) -> int:
    """Bytes of so many numbers by dtype, as the headers of safetensors name them."""
    return sum(count * _BYTES.get(dtype, 1) for dtype, count in parameters.items())
