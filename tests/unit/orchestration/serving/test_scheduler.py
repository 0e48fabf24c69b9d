"""The scheduler's decisions, against a ring of our own: a function from step to result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from cluster import until

from exo.errors import (
    CacheMiss,
    EngineFailed,
    ExoError,
    Overloaded,
    PeerUnavailable,
    PlanMismatch,
    Stalled,
    StepTimeout,
)
from exo.inference.batch import CacheRoom
from exo.inference.sampling import SampledToken, SamplingParams
from exo.networking.calls.messages import GenerationRequest, StepFailure
from exo.networking.rings.frames import MemberRoom, Release, Rooms, Step, StepResult
from exo.orchestration.config import ServingRules
from exo.orchestration.serving import sequence as serving
from exo.orchestration.serving.pace import PREFILL_CHUNK, RING_PREFILL_CHUNK
from exo.orchestration.serving.scheduler import Scheduler
from exo.shard import RingMember, RingPlan, Shard

PLAN = RingPlan("m", 1, "a", "files", (RingMember("a", Shard("m", 0, 4, 4)),))
GREEDY = SamplingParams(temperature=0)


class Ring:
    """Answers each step with the tokens `choose` gives; remembers what it was sent."""

    def __init__(
        self,
        choose: Callable[[Step], list[int] | ExoError | None],
        timeout_s: float = 5,
        plan: RingPlan = PLAN,
        room: CacheRoom = CacheRoom(10_000, 0, False),  # noqa: B008 - a value
        max_requests: int = 100,
    ):
        self.steps: list[Step] = []
        self.released: list[str] = []
        self.broken: list[ExoError] = []
        self._choose = choose
        self._room = Rooms((MemberRoom("a", room),))
        self.scheduler = Scheduler(
            plan,
            self.submit,
            lambda plan, error: self.broken.append(error),
            ServingRules(timeout_s, max_requests=max_requests),
        )

    def submit(self, frame: Step | Release | Rooms) -> None:
        if isinstance(frame, Rooms):
            asyncio.get_running_loop().call_soon(self.scheduler.on_result, self._room)
            return
        if isinstance(frame, Release):
            self.released += frame.sequence_ids
            return
        self.steps.append(frame)
        asyncio.get_running_loop().call_soon(self.answer, frame)

    def answer(self, step: Step) -> None:
        chosen = self._choose(step)
        if isinstance(chosen, ExoError):
            self.scheduler.on_failure(StepFailure(PLAN.hash, step.number, "a", chosen))
        elif chosen is not None:
            sampling = [part for part in step.batch.slices if part.sampling]
            tokens = (
                SampledToken(token).of_sequence(part.sequence_id)
                for token, part in zip(chosen, sampling, strict=False)
            )
            self.scheduler.on_result(StepResult(step.number, tuple(tokens)))

    async def tokens(
        self,
        name: str,
        prompt: int | tuple[int, ...],
        max_tokens: int,
        eos: int = 99,
        client: str = "",
    ) -> list[int]:
        tokens = tuple(range(prompt)) if isinstance(prompt, int) else prompt
        request = GenerationRequest(name, tokens, GREEDY, max_tokens, frozenset({eos}), client)
        found = []
        async for event in self.scheduler.generate(request):
            if event.token is not None:
                found.append(event.token.token_id)
        return found


def ones(step: Step) -> list[int]:
    return [1] * len(step.batch.slices)


async def test_a_prompt_is_prefilled_in_chunks_and_then_decoded_token_by_token() -> None:
    ring = Ring(ones)
    assert await ring.tokens("s", 2 * PREFILL_CHUNK + 10, 3) == [1, 1, 1]
    spans = [
        (p.start, p.length, p.sampling is not None) for s in ring.steps for p in s.batch.slices
    ]
    c = PREFILL_CHUNK
    assert spans == [
        (0, c, False),
        (c, c, False),
        (2 * c, 10, True),
        (2 * c + 10, 1, True),
        (2 * c + 11, 1, True),
    ]
    assert ring.released == []  # kept, for who begins alike
    ring.scheduler.close()


async def test_company_does_not_change_how_a_sequence_is_cut() -> None:
    alone, together = Ring(ones), Ring(ones)
    await alone.tokens("s", 700, 4)
    await asyncio.gather(
        together.tokens("s", 700, 4), together.tokens("t", 30, 9), together.tokens("u", 300, 2)
    )

    def cut(ring: Ring) -> list[tuple[int, int]]:
        parts = (p for step in ring.steps for p in step.batch.slices if p.sequence_id == "s")
        return [(p.start, p.length) for p in parts]

    assert cut(alone) == cut(together)
    assert max(len(step.batch.slices) for step in together.steps) > 1
    alone.scheduler.close()
    together.scheduler.close()


TWO = RingPlan(
    "m",
    1,
    "a",
    "files",
    (RingMember("a", Shard("m", 0, 2, 4)), RingMember("b", Shard("m", 2, 4, 4))),
)


async def test_two_members_work_on_two_chunks_of_a_prompt_at_once() -> None:
    ring = Ring(lambda step: None, plan=TWO)
    c = RING_PREFILL_CHUNK
    answer = asyncio.ensure_future(ring.tokens("s", 3 * c + 5, 2))
    await until(lambda: len(ring.steps) == 2, "two steps are in flight")
    for number in (1, 2, 3):
        ring.scheduler.on_result(StepResult(number, ()))
        await until(lambda n=number: len(ring.steps) == min(n + 2, 4), "the next chunk")
    assert [(p.start, p.length) for s in ring.steps for p in s.batch.slices] == [
        (0, c),
        (c, c),
        (2 * c, c),
        (3 * c, 5),
    ]
    ring.scheduler.on_result(StepResult(4, (SampledToken(7, sequence_id="s"),)))
    await until(lambda: len(ring.steps) == 5, "the first token is decoded, alone")
    ring.scheduler.on_result(StepResult(5, (SampledToken(8, sequence_id="s"),)))
    assert await answer == [7, 8]
    ring.scheduler.close()


async def test_decoding_sequences_are_shared_out_over_the_members() -> None:
    ring = Ring(ones, plan=TWO)
    await asyncio.gather(*(ring.tokens(name, 5, 40) for name in "abcde"))
    # Their prompts come one after the other: look at those in the middle.
    sizes = [len(step.batch.slices) for step in ring.steps[20:60]]
    assert set(sizes) == {2, 3}
    pairs = zip(ring.steps[20:60], ring.steps[21:61], strict=True)
    for step, following in pairs:
        both = [part.sequence_id for one in (step, following) for part in one.batch.slices]
        assert sorted(both) == [*"abcde"]
    ring.scheduler.close()


async def test_what_comes_back_from_an_earlier_attempt_is_ignored() -> None:
    ring = Ring(lambda step: None, plan=TWO)
    answer = asyncio.ensure_future(ring.tokens("s", RING_PREFILL_CHUNK + 5, 1))
    await until(lambda: len(ring.steps) == 2, "both chunks are in flight")
    for number in (1, 2):
        ring.scheduler.on_failure(StepFailure(TWO.hash, number, "b", CacheMiss("gone")))
    await until(lambda: len(ring.steps) == 4, "both chunks go again")
    assert [s.batch.slices[0].start for s in ring.steps] == [0, RING_PREFILL_CHUNK] * 2
    ring.scheduler.on_result(StepResult(2, (SampledToken(6, sequence_id="s"),)))
    ring.scheduler.on_result(StepResult(3, ()))
    ring.scheduler.on_result(StepResult(4, (SampledToken(7, sequence_id="s"),)))
    assert await answer == [7]
    ring.scheduler.close()


async def test_an_end_token_ends_and_is_not_given_out() -> None:
    ring = Ring(lambda step: [99] if step.number == 3 else [7])
    assert await ring.tokens("s", 5, 10) == [7, 7]
    ring.scheduler.close()


async def test_a_cache_miss_is_answered_by_prefilling_again() -> None:
    ring = Ring(lambda step: CacheMiss("gone") if step.number == 3 else [7])
    assert await ring.tokens("s", 5, 4) == [7, 7, 7, 7]
    again = ring.steps[3].batch.slices[0]
    assert (again.start, again.length) == (0, 7)
    always = Ring(lambda step: CacheMiss("gone"))
    with pytest.raises(CacheMiss):
        await always.tokens("s", 5, 4)
    ring.scheduler.close()
    always.scheduler.close()


async def test_a_failed_step_fails_its_sequences_and_the_next_request_runs() -> None:
    ring = Ring(lambda step: EngineFailed("x") if step.number == 2 else [7])
    with pytest.raises(EngineFailed):
        await ring.tokens("s", 5, 4)
    assert await ring.tokens("t", 5, 2) == [7, 7]
    assert ring.released == ["s", "t"]
    ring.scheduler.close()


async def test_silence_is_an_error_after_the_deadline() -> None:
    ring = Ring(lambda step: None, timeout_s=0.05)
    with pytest.raises(StepTimeout, match="did not come back"):
        await ring.tokens("s", 5, 4)
    ring.scheduler.close()


async def test_a_broken_ring_fails_everything_at_once_and_takes_nothing_new() -> None:
    ring = Ring(lambda step: None)
    running = [asyncio.ensure_future(ring.tokens(name, 5, 4)) for name in "st"]
    await until(lambda: ring.steps, "a step is under way")
    error = PeerUnavailable("b is gone")
    ring.scheduler.on_failure(StepFailure(PLAN.hash, 1, "b", error, ring_broken=True))
    for task in running:
        with pytest.raises(PeerUnavailable):
            await task
    assert ring.broken == [error]
    with pytest.raises(PlanMismatch, match="b is gone"):
        await ring.tokens("u", 5, 4)
    await asyncio.wait_for(ring.scheduler.drained(), 1)
    ring.scheduler.close()


async def test_a_scheduler_that_dies_tells_its_clients() -> None:
    ring = Ring(ones)
    ring.scheduler._submit = lambda frame: 1 / 0 if isinstance(frame, Step) else None  # type: ignore[assignment,return-value]
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        await ring.tokens("s", 5, 4)
    assert len(ring.broken) == 1
    ring.scheduler.close()


async def test_a_client_that_goes_away_is_released() -> None:
    ring = Ring(ones)
    events = ring.scheduler.generate(GenerationRequest("s", (1, 2), GREEDY, 1000))
    await anext(events)
    await events.aclose()
    assert ring.released == ["s"]
    assert ring.scheduler.sequence_count == 0
    ring.scheduler.close()


async def test_a_full_queue_refuses() -> None:
    ring = Ring(lambda step: None, max_requests=2)
    first = asyncio.ensure_future(ring.tokens("s", 5, 4))
    second = asyncio.ensure_future(ring.tokens("t", 5, 4))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await ring.tokens("u", 5, 4)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    ring.scheduler.close()


async def test_an_answer_that_takes_too_long_is_ended_and_released() -> None:
    ring = Ring(lambda step: [7] if step.number < 5 else None)
    request = GenerationRequest("s", (1, 2), GREEDY, 1000, timeout_s=0.05)
    with pytest.raises(Stalled, match="had not ended after"):
        async for _ in ring.scheduler.generate(request):
            pass
    assert ring.released == ["s"]
    assert ring.scheduler.sequence_count == 0
    ring.scheduler.close()


async def test_who_does_not_read_is_given_up_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "MAX_UNREAD", 20)
    ring = Ring(ones)
    sleeps = ring.scheduler.generate(GenerationRequest("s", (1, 2), GREEDY, 1000))
    await anext(sleeps)
    assert len(await ring.tokens("t", 5, 200)) == 200
    assert not any(
        part.sequence_id == "s" for step in ring.steps[-100:] for part in step.batch.slices
    )
    with pytest.raises(Stalled, match="20 tokens of the answer were not read"):
        async for _ in sleeps:
            pass
    assert "s" in ring.released
    ring.scheduler.close()
