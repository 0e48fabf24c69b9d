"""The models on this machine: finds a model's files, or brings them from the first source that
can."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from exo.download.hub_cache import RepoFile, cache_folder
from exo.download.progress import OnProgress, Progress
from exo.download.sharing import Sharing
from exo.download.source import LocalDirectory, ModelsFolders, ModelSource
from exo.download.transfer import storage_error
from exo.errors import (
    DownloadFailed,
    InvalidRequest,
    ModelNotFound,
    ModelUnsupported,
    SourceUnreachable,
)
from exo.models.card import DUMMY, OLLAMA, ModelCard, registry, resolve
from exo.models.file_parts import Parts
from exo.models.tensor_table import expert_bytes
from exo.tasks import on_own_thread

_LOOK_AGAIN_S = 0.5


def default_sources(
    models_dir: Path,
    sharing: Sharing | None = None,
    folders: Sequence[Path] = (),
) -> list[ModelSource]:
    """Every source, in the order they are asked. `sharing`: what a node shares with its peers;
    `folders`: the user's own, with a directory for each model."""
    # They import the store's own parts.
    from exo.download.gguf_file import GGUFFile
    from exo.download.hub import Hub
    from exo.download.lm_studio import LMStudio
    from exo.download.wheel import Wheel

    return [
        LocalDirectory(),
        ModelsFolders(folders),
        GGUFFile(models_dir, folders),
        LMStudio(),
        Hub(sharing=sharing),
        Wheel(models_dir),
    ]


class _Fetching:
    """A model being brought, and everybody who waits for it or for their turn."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._listeners: list[OnProgress] = []

    @contextlib.contextmanager
    def heard_by(self, listener: OnProgress) -> Iterator[None]:
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def tell(self, progress: Progress) -> None:
        for listener in list(self._listeners):
            listener(progress)


class ModelStore:
    """One per node; several processes may share its directory."""

    def __init__(self, models_dir: Path, sources: Sequence[ModelSource]) -> None:
        self._models_dir = models_dir
        self._sources = sources
        self._closed = False
        self._fetching: dict[str, _Fetching] = {}

    def find(self, model_id: str, parts: Parts | None = None) -> Path | None:
        """The model's directory if it is here already; touches no network. `parts` is what
        must be here of its weight files; None: all.

        Raises:
            ModelNotFound: no model can have that name.
        """
        card = resolve(model_id)
        return self._models_dir if card is DUMMY else self._find(card, parts)

    def _find(self, card: ModelCard, parts: Parts | None) -> Path | None:
        """A whole model before a part of one, whichever source it is from."""
        whole = next((path for s in self._sources if (path := s.find(card)) is not None), None)
        if whole is not None or parts is None:
            return whole
        found = (source.find_part(card, parts) for source in self._sources)
        return next((path for path in found if path is not None), None)

    def available(self) -> list[ModelCard]:
        """Models that are here or can be fetched: the registry's, then what else sources list."""
        known = [
            card
            for card in registry().values()
            if any(s.can_fetch(card) or s.find(card) for s in self._sources)
        ]
        found = {card.repo: card for s in reversed(self._sources) for card in s.listed()}
        repos = {card.repo for card in known}
        return known + [card for repo, card in found.items() if repo not in repos]

    def with_experts(self, card: ModelCard) -> ModelCard:
        """The card with what the files here say of a mixture's experts, where it does not itself;
        reads headers."""
        if card.expert_bytes:
            return card
        is_file = card.path is not None and card.path.suffix == ".gguf"
        path = card.path if is_file else self._find(card, {})
        try:
            return replace(card, expert_bytes=expert_bytes(path) if path else 0)
        except ModelUnsupported:
            return card  # who loads it is told why

    async def ensure(
        self,
        model_id: str,
        on_progress: OnProgress,
        *,
        parts: Parts | None = None,
        renew: bool = False,
    ) -> Path:
        """The model's directory, fetched first if need be; `on_progress` is called from a thread.
        `parts` as for `find`. `renew` looks for a newer revision even if it is here.

        Raises:
            ModelNotFound: no source has it.
            DownloadFailed: a source has it and failed.
        """
        on_progress(Progress("checking", model_id))
        found = await asyncio.to_thread(self.find, model_id, parts)
        if found is not None and not renew:
            return found
        card = resolve(model_id)
        fetching = self._fetching.setdefault(model_id, _Fetching())
        with fetching.heard_by(on_progress):
            async with fetching.turn:
                return await on_own_thread(self._fetch, card, parts, fetching.tell, renew)

    def lies_here(self, model_id: str) -> bool:
        """Whether `ensure` needs nothing but this machine, though `find` may not know it yet.

        Raises:
            ModelNotFound: no model can have that name.
        """
        card = resolve(model_id)
        return any(source.is_local and source.can_fetch(card) for source in self._sources)

    def left_out(self, model_id: str) -> dict[str, list[RepoFile]]:
        """Files that the model's source has and exo does not want, by the reason; touches no
        network."""
        card = resolve(model_id)
        found = (source.left_out(card) for source in self._sources)
        return next((files for files in found if files), {})

    def size(self, path: Path) -> int:
        """Bytes of disk that a model's directory takes."""
        own = [self._models_dir.resolve(), cache_folder().resolve()]
        found = (
            file.stat()
            for file in path.rglob("*")
            # A GGUF file of the user's is not the store's.
            if file.is_file()
            and (file.suffix != ".gguf" or any(map(file.resolve().is_relative_to, own)))
        )
        # Of an absent weight file only the header takes any.
        return sum(min(stat.st_size, 512 * stat.st_blocks) for stat in found)

    def remove(self, model_id: str) -> int:
        """Delete a model's files; the bytes freed.

        Raises:
            ModelNotFound: it is not here.
            InvalidRequest: its files are the user's own.
        """
        card = resolve(model_id)
        here = self.find(model_id, {})
        freed = self.size(here) if here is not None else 0
        if card.path is not None and card.path.is_dir():
            raise InvalidRequest(f"{card.path} is a directory of your own; delete it yourself")
        if not sum(source.remove(card) for source in self._sources):
            raise ModelNotFound(f"{model_id} is not on this machine", param="model")
        return freed

    def cancel(self, model_id: str) -> bool:
        """Stop a fetch of this model; False if there is none.

        Raises:
            ModelNotFound: no model can have that name.
        """
        card = resolve(model_id)
        return sum(source.cancel(card) for source in self._sources) > 0

    def close(self) -> None:
        """Stop fetches that are under way."""
        self._closed = True
        for source in self._sources:
            source.close()

    def _fetch(
        self,
        card: ModelCard,
        parts: Parts | None,
        on_progress: OnProgress,
        renew: bool,
    ) -> Path:
        try:
            self._models_dir.mkdir(parents=True, exist_ok=True)
            with self._claimed(card, on_progress):
                if renew:
                    for source in self._sources:
                        if (found := source.find(card)) is not None:
                            return self._renewed(source, card, found, on_progress)
                # Another process may have fetched it while this one waited.
                elif (found := self._find(card, parts)) is not None:
                    return found
                return self._fetch_from_first(card, parts, on_progress)
        except OSError as error:
            raise storage_error(error, "EXO_HOME") from error

    @contextlib.contextmanager
    def _claimed(self, card: ModelCard, on_progress: OnProgress) -> Iterator[None]:
        """Meanwhile no other process brings this model from a source."""
        # Not the name itself, which may be longer than a file's.
        name = hashlib.sha256(card.model_id.encode()).hexdigest()[:16]
        lock = FileLock(self._models_dir / f".{name}.lock")
        while True:
            try:
                lock.acquire(timeout=_LOOK_AGAIN_S)
                break
            except Timeout:
                if self._closed:
                    raise DownloadFailed(f"the download of {card.model_id} was stopped") from None
                other = f"for another process to bring {card.model_id}"
                on_progress(Progress("waiting", other))
        try:
            yield
        finally:
            lock.release()

    def _renewed(
        self, source: ModelSource, card: ModelCard, here: Path, on_progress: OnProgress
    ) -> Path:
        """What is here, or what its source has now; never another source's files."""
        if not source.renews or not source.can_fetch(card):
            return here
        try:
            return source.fetch(card, on_progress)
        except SourceUnreachable as error:
            on_progress(Progress("checking", card.model_id, warning=error.message))
            return here

    def _fetch_from_first(
        self, card: ModelCard, parts: Parts | None, on_progress: OnProgress
    ) -> Path:
        """From the first source that can be asked and has it."""
        refused: SourceUnreachable | ModelNotFound | None = None
        for source in self._sources:
            if source.can_fetch(card):
                try:
                    if parts is None:
                        return source.fetch(card, on_progress)
                    return source.fetch_part(card, parts, on_progress)
                except (SourceUnreachable, ModelNotFound) as error:
                    refused = refused or error
                    on_progress(Progress("checking", card.model_id, warning=error.message))
        if refused is not None:
            raise refused
        repo = card.repo or card.model_id
        if repo.startswith(OLLAMA):
            theirs = repo.removeprefix(OLLAMA)
            raise ModelNotFound(
                f"Ollama keeps no {theirs} on this machine; bring it with `ollama pull {theirs}`",
                param="model",
            )
        raise ModelNotFound(
            f"{card.model_id} is not on this machine and the hub is not asked (HF_HUB_OFFLINE); "
            f"bring it with `hf download {repo}` where there is a network, or name a local "
            "directory",
            param="model",
        )
