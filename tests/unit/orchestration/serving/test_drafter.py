"""What a small model guesses for whom, against an engine of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

from cluster import until

from exo.errors import EngineFailed, ExoError
from exo.inference.batch import ForwardBatch, Slice, StepOutput
from exo.inference.engine import InferenceEngine
from exo.inference.sampling import SampledToken, SamplingParams
from exo.orchestration.serving.drafts import drafter as module
from exo.orchestration.serving.drafts.drafter import CHUNK_TOKENS, FIRST, NEAR_TOKENS, Drafter
from exo.orchestration.serving.pace import Pace
from exo.shard import Shard

SMALL = Shard("small", 0, 4, 4)
HOW = Slice("", 0, 1, SamplingParams(temperature=0), 1)


class Engine:
    """After a token comes the next number. Checks that what it is fed fits what it holds."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}
        self.steps: list[ForwardBatch] = []
        self.fails = self.hangs = False

    def begin_forward(
        self,
        shard: Shard,
        batch: ForwardBatch,
        hidden_states: None,
        on_done: Callable[[StepOutput | ExoError], None],
    ) -> None:
        assert (shard, hidden_states) == (SMALL, None)
        self.steps.append(batch)
        if self.hangs:
            return
        if self.fails:
            on_done(EngineFailed("made up"))
            return
        found = []
        for part, rows in batch:
            held = self.held.setdefault(part.sequence_id, [])
            assert part.start <= len(held)
            held[part.start :] = batch.token_ids[rows].tolist()
            if part.sampling is not None:
                found.append(SampledToken(held[-1] + 1).of_sequence(part.sequence_id))
        on_done(StepOutput(tokens=tuple(found)))

    def begin_release(self, ids: Iterable[str], on_done: Callable[[None], None]) -> None:
        for name in ids:
            self.held.pop(name, None)
        on_done(None)


class World:
    def __init__(self) -> None:
        self.engine, self.pace, self.went_on = Engine(), Pace(1), 0
        engine = cast(InferenceEngine, self.engine)
        self.drafter = Drafter(engine, SMALL, 10_000, self.pace, self.on_guessed)

    def on_guessed(self) -> None:
        self.went_on += 1

    async def guess(self, name: str, tokens: list[int], count: int = 3, most: int = 99) -> Any:
        """None where nothing is on its way."""
        found: list[list[int]] = []
        if not self.drafter.guess(name, tokens, HOW, most, found.append):
            return None
        self.drafter.go_on(count)
        await until(lambda: found, "guesses")
        return found[0]


async def test_a_prompt_is_read_meanwhile_and_only_what_is_new_after_it() -> None:
    world = World()
    tokens = list(range(CHUNK_TOKENS + 2 * NEAR_TOKENS))
    assert await world.guess("s", tokens) is None
    await until(lambda: len(world.engine.steps) == 2, "the prompt is read")
    await until(lambda: not world.drafter._known["s"].is_fed, "it is done")
    assert await world.guess("s", tokens) == [320, 321, 322]
    tokens += [320, 7]
    assert await world.guess("s", tokens) == [8, 9, 10]
    assert world.engine.held["s draft"] == [*tokens, 8, 9]
    fed = [len(step.token_ids) for step in world.engine.steps]
    assert fed == [CHUNK_TOKENS, 63, 1, 1, 1, 1, 1, 1]
    assert world.went_on == 2
    world.drafter.forget("s")
    assert not world.engine.held


async def test_sequences_that_wait_together_are_guessed_for_together() -> None:
    world = World()
    found: dict[str, list[int]] = {}
    for name, most in (("a", 9), ("b", 1), ("c", 9)):
        tokens = [10 * ord(name)]
        assert world.drafter.guess(name, tokens, HOW, most, lambda g, n=name: found.update({n: g}))
    assert not world.drafter.guess("a", [970], HOW, 9, lambda guess: None), "it waits already"
    world.drafter.go_on(2)
    world.drafter.forget("c")
    await until(lambda: len(found) == 2, "guesses")
    assert found == {"a": [971, 972], "b": [981]}
    assert [len(step.slices) for step in world.engine.steps] == [3, 1]


async def test_who_cannot_be_guessed_for_goes_on_without() -> None:
    world = World()
    world.engine.fails = True
    tokens = [1, 2]
    assert await world.guess("s", tokens) == []
    world.engine.fails = False
    assert await world.guess("s", tokens) is None, "it rests"
    world.drafter._not_before = 0
    tokens.append(9_998)
    assert await world.guess("s", tokens) == [9_999], "10,000 is no token of the large one"
    tokens[2] = 3
    found: list[list[int]] = []
    assert world.drafter.guess("s", tokens, HOW, 9, found.append)
    world.drafter.go_on(2)
    tokens.append(4)  # it did not wait, as when it began again
    await until(lambda: found, "an answer")
    assert found == [[]]


async def test_nobody_waits_long(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    world = World()
    world.engine.hangs = True
    tokens = [1, 2]
    assert await world.guess("s", tokens) == []
    assert await world.guess("s", tokens) is None, "the step is still on its way"
    assert await world.guess("t", [3, 4]) is None, "nor does anybody else wait for it"
    assert world.went_on == 1


def test_it_is_asked_as_long_as_it_pays() -> None:
    async def tried() -> None:
        world = World()
        assert world.drafter.worth(1) == FIRST
        for decoded in (1, 2, 1, 2):
            world.pace.took(0.1 + 0.001 * decoded, decoded, 0)
        world.drafter._guess_s = 0.005
        assert world.drafter.worth(1) >= 3
        for _ in range(100):
            world.drafter.verified(2, 2)
        assert world.drafter.worth(1) == module.MOST
        world.drafter._guess_s = 0.2
        assert world.drafter.worth(1) == 0
        world.drafter._guess_s = 0.005
        for _ in range(100):
            world.drafter.verified(0, 2)
        assert world.drafter.worth(1) == 0
        for _ in range(300):
            world.drafter.worth(1)
        assert world.drafter.worth(1) > 0, "it is tried again now and then"

    asyncio.run(tried())
