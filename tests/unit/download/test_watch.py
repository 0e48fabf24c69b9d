"""Every phase of long work, hung on purpose: after ten seconds it is said, in the end given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from virtual_time import VirtualTimeLoop

from exo.download.progress import Progress
from exo.download.watch import DEADLINES_S, QUIET_S, watched
from exo.errors import Stalled
from exo.models.description import ModelDescription
from exo.networking.calls.messages import Prepared
from exo.orchestration.config import ServingRules
from exo.orchestration.files.activity import Activity
from exo.orchestration.files.model_files import ModelFiles
from exo.orchestration.planning.planner import Planner
from exo.orchestration.serving.rings import Rings
from exo.shard import RingMember, RingPlan, Shard


def run(work: Coroutine[Any, Any, Any]) -> float:
    """Seconds it took, of virtual time."""
    loop = VirtualTimeLoop()
    try:
        began = loop.time()
        loop.run_until_complete(work)
        return loop.time() - began
    finally:
        loop.close()


async def never(*_: Any) -> Any:
    await asyncio.get_running_loop().create_future()


class HungStore:
    """Goes as far as a phase, and no further."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.cancelled: list[str] = []

    async def ensure(self, model_id: str, on_progress: Any, **_: Any) -> Path:
        on_progress(Progress(self.phase, model_id, 5, 10))
        if self.phase == "waiting":
            while True:  # says so again and again
                await asyncio.sleep(0.5)
                on_progress(Progress(self.phase, model_id, 5, 10))
        await never()
        raise AssertionError

    def cancel(self, model_id: str) -> bool:
        self.cancelled.append(model_id)
        return True


@pytest.mark.parametrize("phase", ["checking", "waiting", "downloading", "verifying", "converting"])
def test_a_phase_of_bringing_files(phase: str, caplog: pytest.LogCaptureFixture) -> None:
    store, activity, said = HungStore(phase), Activity("n"), []
    files = ModelFiles("n", store, None, activity)  # type: ignore[arg-type]
    with pytest.raises(Stalled, match=f"{phase} m stalled: nothing for"):
        run(files.describe("m", said.append))
    warnings = [progress.warning for progress in said if progress.warning]
    assert warnings[0].startswith("nothing for 10 s")
    assert any(record.levelno == logging.WARNING for record in caplog.records)
    assert activity.of("m").phase == "failed" and "given up" in activity.of("m").warning
    assert store.cancelled == ["m"]


def test_an_engine_that_does_not_answer_about_files() -> None:
    class Here(HungStore):
        async def ensure(self, model_id: str, on_progress: Any, **_: Any) -> Path:
            return Path("/")

    class Engine:
        describe = never

    said: list[Progress] = []
    files = ModelFiles("n", Here(""), Engine(), Activity("n"))  # type: ignore[arg-type]
    with pytest.raises(Stalled, match="checking m by the engine"):
        run(files.describe("m", said.append))
    assert "waits for an answer about the model's files" in said[0].warning


PLAN = RingPlan("m", 1, "n", "files", (RingMember("n", Shard("m", 0, 8, 8)),))
DESCRIBED = ModelDescription("m", "sim", "files", (1,) * 8, 0, 0, 64)


def test_loading() -> None:
    class Engine:
        load = never

    rings = Rings("n", Engine(), ServingRules(1.0), never, list, never)  # type: ignore[arg-type]
    said: list[Progress] = []

    async def load() -> None:
        await watched(
            lambda moves: rings.join(PLAN, DESCRIBED, Path("/"), moves),
            said.append,
            Progress("loading", "m[0:8]/8"),
        )

    with pytest.raises(Stalled, match=r"loading m\[0:8\]/8 stalled.*waits for the engine"):
        run(load())
    assert "nothing for 10 s, waits for the engine to load it" in said[0].warning


def test_warming() -> None:
    class Member:
        async def prepare(self, *_: Any) -> Prepared:
            return Prepared(DESCRIBED, 10**9)

        async def load_shard(self, *_: Any) -> None: ...

        async def retire(self, *_: Any) -> None: ...

        warm_up = never

    said: list[Progress] = []

    async def make() -> None:
        planner = Planner("n", lambda: {"n": Member()}, list, lambda: 1)  # type: ignore[dict-item]
        await planner.ensure("m", said.append)

    with pytest.raises(Stalled, match=r"warming m stalled.*waits for the first token"):
        run(make())
    assert next(p.warning for p in said if p.warning).startswith("nothing for 10 s")


def test_what_moves_is_left_alone_and_a_long_sleep_is_no_stall() -> None:
    said: list[Progress] = []

    async def work(heard: Callable[[Progress], None]) -> str:
        for i in range(200):
            await asyncio.sleep(QUIET_S - 1.5)
            heard(Progress("downloading", "m", i))
        # A laptop that was closed for an hour: the clock jumps, once.
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop._jumping.now += 3600
        await asyncio.sleep(1)
        return "done"

    async def all_of_it() -> None:
        assert await watched(work, said.append, Progress("downloading", "m")) == "done"

    assert run(all_of_it()) > 3600 > DEADLINES_S["downloading"]
    assert not any(progress.warning for progress in said)
