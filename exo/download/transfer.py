"""Files fetched in ranges, several at once, from whoever has them; verified before they are named.

Work is cut into spans. Each supplier has workers that take the next span of any open file. A span
that fails goes back, and all workers of that supplier rest a while. A supplier that fails several
times with nothing in between is given up; when nobody is left for a file, the last failure is the
error.

Some files are open at a time, in the order they are given. Writing and hashing are done on threads
of the transfer's own, by calls that never wait for one another: a file is hashed whenever more of
it has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from exo.download.hub_cache import RepoFile
from exo.download.partial_file import PartialFile, Wanted
from exo.download.supplier import Patience, Rules, Supplier, SupplierFailed
from exo.errors import DiskFull, DownloadFailed, ExoError
from exo.models.file_parts import BLOCK

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SPAN = 16 * BLOCK
"""Bytes of one request. Larger costs fewer round trips; smaller spreads better over suppliers."""

OPEN_FILES = 8
"""Files at a time: as many as the hub is asked for at once. Each costs its lock's descriptor."""

_THREADS = 4  # that write and hash


@dataclass(frozen=True)
class Arrived:
    """`count` more bytes of a file are here, from a kind of supplier ("disk": they were here
    before); negative where bytes are thrown away. `trouble` says what failed and is tried again."""

    file: RepoFile
    kind: str
    count: int
    trouble: str = ""


@dataclass(eq=False)
class _Work:
    file: RepoFile
    partial: PartialFile
    suppliers: list[_Serving]  # who may bring it, most trusted last
    spans: list[tuple[int, int]]  # not taken yet
    refused: Counter[_Serving] = field(default_factory=Counter)
    """How many spans from the first on are not for a supplier by the rules as they are now: a large
    file has too many to look at all of them at every change."""
    sources: set[_Serving] = field(default_factory=set)
    liars: list[_Serving] = field(default_factory=list)  # who sent a whole file of wrong bytes
    came: Counter[str] = field(default_factory=Counter)  # bytes by kind of supplier
    error: ExoError | None = None  # the last failure
    came_more: asyncio.Event = field(default_factory=asyncio.Event)  # there is more to hash

    def take(self, index: int, end: int) -> tuple[int, int]:
        """A span, as far as `end`, off the list."""
        start, whole = self.spans.pop(index)
        if end < whole:
            self.spans.insert(index, (end, whole))
        for serving, count in self.refused.items():
            # Of a rest nobody knows whether it is refused.
            self.refused[serving] = min(count, index) if end < whole else count - (index < count)
        return start, end

    def put_back(self, spans: list[tuple[int, int]]) -> None:
        self.refused.clear()
        self.spans = spans + self.spans


@dataclass(eq=False)
class _Serving:
    """A supplier at work."""

    supplier: Supplier
    patience: Patience
    failures: int = 0
    rests_until: float = 0.0

    def failed(self, failure: SupplierFailed) -> bool:
        """Rest; False if there were too many failures in a row."""
        now = time.monotonic()
        if now >= self.rests_until:  # else another worker met the same trouble
            self.failures += 1
            rest_s = self.patience.first_rest_s * 2 ** (self.failures - 1)
            rest_s = min(rest_s, self.patience.longest_rest_s)
            self.rests_until = now + max(rest_s, failure.rest_s)
        return self.failures < self.patience.attempts


Claim = Callable[[Wanted], contextlib.AbstractAsyncContextManager[bool]]
"""While it is entered nobody else fetches the file; gives False if what is wanted of it is here by
now."""


class Transfer:
    """Fetches files into their blobs. Used once.

    `suppliers`: the most trusted last. `on_arrived` hears of every piece, `on_here` of every
    file of which all is here that is wanted.
    """

    def __init__(
        self,
        suppliers: Sequence[Supplier],
        claim: Claim,
        on_arrived: Callable[[Arrived], None],
        on_here: Callable[[RepoFile], None],
        patience: Patience | None = None,
        rules: Rules | None = None,
    ) -> None:
        self._serving = [_Serving(s, s.patience or patience or Patience()) for s in suppliers]
        self._claim = claim
        self._on_arrived = on_arrived
        self._on_here = on_here
        self._rules = rules
        self._span = rules.span if rules else SPAN
        self._works: list[_Work] = []  # open
        self._left = 0  # files not here yet
        self._gave_up: ExoError | None = None  # why the last supplier was given up
        self._changed = asyncio.Condition()
        self._may_open = asyncio.Semaphore(OPEN_FILES)
        self._polling: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, "transfer")

    async def fetch(self, files: Sequence[tuple[Wanted, Path]]) -> None:
        """Fetch each file, or what is wanted of it, into its blob.

        Raises:
            ExoError: nobody can bring a file, or it has the wrong digest from everyone.
            DiskFull, DownloadFailed: this machine cannot store it.
        """
        self._left = len(files)
        try:
            here = [await self._off(wanted.here, blob) for wanted, blob in files]
            for (wanted, _), count in zip(files, here, strict=True):
                if count:
                    self._on_arrived(Arrived(wanted.file, "disk", count))
            async with asyncio.TaskGroup() as group:
                for (wanted, blob), count in zip(files, here, strict=True):
                    group.create_task(self._bring(wanted, blob, count))
                for serving in self._serving:
                    for _ in range(serving.supplier.workers):
                        group.create_task(self._serve(serving))
                if self._rules is not None and files:
                    self._polling = group.create_task(self._keep_polling(self._rules))
        except OSError as error:
            raise storage_error(error) from error
        except BaseExceptionGroup as failures:
            cause = first_cause(failures)
            if isinstance(cause, OSError):
                cause = storage_error(cause)
            raise cause from failures
        finally:
            self._threads.shutdown(wait=False)

    async def _off(self, call: Callable[..., Result], *args: Any) -> Result:
        """On a thread, so that the next piece is received meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def _bring(self, wanted: Wanted, blob: Path, counted: int) -> None:
        """One file, from claimed to here. `counted`: bytes on disk that were told of."""
        file = wanted.file
        async with self._may_open, self._claim(wanted) as is_missing:
            if is_missing:
                partial = await self._off(PartialFile, blob, wanted)
                try:
                    await self._fetch_one(file, partial, counted)
                finally:
                    partial.close()
                    # It got its name, or the model was removed.
                    with contextlib.suppress(FileNotFoundError):
                        await self._off(partial.save)
            else:
                self._on_arrived(Arrived(file, "disk", wanted.size - counted))
        self._on_here(file)
        async with self._changed:
            self._left -= 1
            self._changed.notify_all()
        if not self._left and self._polling is not None:
            self._polling.cancel()

    async def _fetch_one(self, file: RepoFile, partial: PartialFile, counted: int) -> None:
        suppliers = [one for one in self._serving if not one.supplier.given_up]
        work = _Work(file, partial, suppliers, _spans(partial, self._span))
        if partial.done_bytes != counted:  # another process was here meanwhile
            self._arrived(work, "disk", partial.done_bytes - counted)
        if not suppliers and work.spans:
            raise self._gave_up or DownloadFailed(f"nobody could bring {file.path}")
        if self._rules is not None:
            self._rules.begin(partial)
        async with self._changed:
            self._works.append(work)
            self._changed.notify_all()
        try:
            if partial.is_whole_wanted:
                await self._verify(work)
            else:
                await self._complete(work)
        finally:
            self._works.remove(work)
            if self._rules is not None:
                self._rules.end(partial)

    async def _keep_polling(self, rules: Rules) -> None:
        """Until it is cancelled with the last file."""
        while True:
            await rules.until_next_poll()
            await rules.poll()
            async with self._changed:
                for work in self._works:
                    work.refused.clear()
                for serving in self._serving:
                    if (error := rules.lost(serving.supplier)) is not None:
                        serving.supplier.given_up, self._gave_up = True, error
                        self._without(serving, self._works, error)
                self._changed.notify_all()

    async def _serve(self, serving: _Serving) -> None:
        """One worker of a supplier, until all files are here."""
        while True:
            await asyncio.sleep(max(0.0, serving.rests_until - time.monotonic()))
            async with self._changed:
                while (taken := self._take(serving)) is None:
                    if not self._left:
                        return
                    await self._changed.wait()
            work, start, end = taken
            reached, failure = await self._read(serving, work, start, end)
            async with self._changed:
                work.partial.on_its_way.discard((start, end))
                if reached < end:
                    work.put_back([(reached, end)])
                if failure is not None:
                    self._after(failure, serving, work)
                self._changed.notify_all()

    def _take(self, serving: _Serving) -> tuple[_Work, int, int] | None:
        """The next span that this supplier should bring; None while there is none."""
        for work in self._works:
            if serving not in work.suppliers or not work.spans:
                continue
            rules, who, alone = self._rules, serving.supplier, len(work.suppliers) == 1
            if rules is not None and not rules.may_at_all(who, work.file, alone=alone):
                continue
            for index in range(work.refused[serving], len(work.spans)):
                start, end = work.spans[index]
                if rules is not None:
                    end = rules.may(who, work.file, start, end, alone=alone)
                if end > start:
                    work.partial.on_its_way.add((start, end))
                    return work, *work.take(index, end)
                work.refused[serving] = index + 1
        return None

    async def _read(
        self, serving: _Serving, work: _Work, start: int, end: int
    ) -> tuple[int, SupplierFailed | None]:
        """Write what comes of a span that begins a block; how far it is whole, and why not to its
        end."""
        supplier, at, failure = serving.supplier, start, None
        # A whole file's digest tells anyway.
        at_end = supplier.checked_at_end and not work.partial.is_whole_wanted
        work.sources.add(serving)
        try:
            async with contextlib.aclosing(supplier.read(work.file, start, end)) as pieces:
                async for piece in pieces:
                    if at + len(piece) > end:
                        raise SupplierFailed(
                            DownloadFailed(f"{supplier.name} sent more than it was asked for")
                        )
                    await self._off(work.partial.write, at, piece)
                    if not at_end and work.partial.mark(at // BLOCK * BLOCK, at + len(piece)):
                        work.came_more.set()
                    at += len(piece)
                    serving.failures = 0
                    self._arrived(work, supplier.kind, len(piece))
            if at < end:
                raise SupplierFailed(
                    DownloadFailed(f"{supplier.name} broke off {work.file.path} at byte {at}")
                )
            if at_end:
                work.partial.mark(start, end)
                work.came_more.set()
            return end, None
        except SupplierFailed as raised:
            failure = raised
        whole = at if at == work.file.size else at // BLOCK * BLOCK
        whole = start if at_end else whole
        if whole < at:
            self._arrived(work, supplier.kind, whole - at)
        return whole, failure

    def _after(self, failure: SupplierFailed, serving: _Serving, work: _Work) -> None:
        """Decide what a failure means for its file and its supplier."""
        name, message = serving.supplier.name, failure.error.message
        logger.info("%s: %s", name, message)
        work.error = failure.error
        self._arrived(work, serving.supplier.kind, 0, message)
        if failure.final:
            self._without(serving, [work])
        elif not serving.failed(failure):
            serving.supplier.given_up, self._gave_up = True, failure.error
            self._without(serving, self._works, failure.error)

    def _arrived(self, work: _Work, kind: str, count: int, trouble: str = "") -> None:
        work.came[kind] += count
        self._on_arrived(Arrived(work.file, kind, count, trouble))

    def _without(
        self, serving: _Serving, works: list[_Work], error: ExoError | None = None
    ) -> None:
        """These files do not come from this supplier any more."""
        for work in works:
            if serving in work.suppliers:
                work.suppliers.remove(serving)
                work.refused.clear()  # who is alone may more
            if not work.suppliers:
                failed = error or work.error
                raise failed or DownloadFailed(f"nobody could bring {work.file.path}")

    async def _verify(self, work: _Work) -> None:
        """Hash the file while it comes; name it, or fetch it again from somebody else."""
        partial = work.partial
        while True:
            while not partial.is_hashed:
                if partial.wants_saving:
                    await self._off(partial.save)
                if await self._off(partial.hash_ahead):
                    self._arrived(work, "disk", 0)  # a sign of life: nothing may come meanwhile
                else:
                    await work.came_more.wait()
                    work.came_more.clear()
            if partial.digest == work.file.digest:
                await self._off(partial.finish)
                return
            async with self._changed:
                self._doubt(work, partial.digest)
                self._changed.notify_all()

    async def _complete(self, work: _Work) -> None:
        """Save what comes of a file of which only a part is wanted."""
        partial = work.partial
        while not partial.is_complete:
            await work.came_more.wait()
            work.came_more.clear()
            if partial.wants_saving:
                await self._off(partial.save)
        await self._off(partial.save)

    def _doubt(self, work: _Work, found: str) -> None:
        """A file has the wrong bytes. Who sent them is only known where one supplier sent all, so
        from now on it comes from one alone, the most trusted that has not lied; the last may try
        twice."""
        names = ", ".join(sorted(s.supplier.name for s in work.sources)) or "the disk"
        work.error = DownloadFailed(
            f"{work.file.path} from {names} has the digest {found[:16]}…, expected "
            f"{work.file.digest[:16]}…; what was fetched of it was discarded"
        )
        logger.warning("%s", work.error.message)
        for kind, count in list(work.came.items()):
            self._arrived(work, kind, -count, work.error.message)
        work.partial.clear()
        if len(work.sources) == 1:
            work.liars += work.sources
        honest = [s for s in work.suppliers if s not in work.liars]
        if honest:
            work.suppliers = honest[-1:] if work.sources else honest
        elif len(work.liars) > len(set(work.liars)):
            raise work.error
        work.sources, work.spans = set(), []
        work.put_back(_spans(work.partial, self._span))


def _spans(partial: PartialFile, span: int) -> list[tuple[int, int]]:
    """What is missing, cut where every node cuts it that wants more or less of the file."""
    return [
        (max(at, start), min(at + span, end))
        for start, end in partial.missing()
        for at in range(start // span * span, end, span)
    ]


def storage_error(error: OSError, setting: str = "HF_HOME") -> ExoError:
    """What a failure to write means for the user, who may move the folder by `setting`."""
    where = error.filename or "the model's folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the disk is full: {where}; free some space, what was fetched is kept")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DownloadFailed(
            f"{where} cannot be written: {error.strerror}; set {setting} to a folder of your own"
        )
    return DownloadFailed(f"{where} could not be written: {error}")


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first ExoError, else the first error of the system, else whatever came first."""
    for kind in (ExoError, OSError, BaseException):
        found: BaseException | None = failures.subgroup(kind)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is not None:
            return found
    return failures
