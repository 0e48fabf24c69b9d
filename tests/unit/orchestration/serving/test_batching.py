"""Whatever arrives, leaves, fails and runs out, every answer is what it would be alone, everybody
is served, and no page is lost.

The scheduler is real and so are the engines, DummyEngine, whose next token depends on every token
of the sequence; the ring between them is made up and takes its time on a virtual clock.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_time import VirtualTimeLoop

from exo.errors import CacheMiss, EngineFailed, ExoError, Overloaded, PromptTooLong
from exo.inference.batch import PAGE_TOKENS, CacheRoom, ForwardBatch, Slice, StepOutput
from exo.inference.dummy.engine import _LETTERS, N_LAYERS, DummyEngine, Faults
from exo.inference.sampling import SamplingParams
from exo.networking.calls.messages import GenerationRequest, StepFailure
from exo.networking.rings.frames import MemberRoom, Release, Rooms, Step, StepResult
from exo.orchestration.config import ServingRules
from exo.orchestration.serving import sequence as serving
from exo.orchestration.serving.drafts.drafter import Drafter
from exo.orchestration.serving.ledger import Ledger
from exo.orchestration.serving.scheduler import Scheduler
from exo.shard import RingMember, RingPlan, Shard

GREEDY = SamplingParams(temperature=0)


def plan_of(members: int) -> RingPlan:
    cuts = [N_LAYERS * i // members for i in range(members + 1)]
    shards = [Shard("m", cuts[i], cuts[i + 1], N_LAYERS) for i in range(members)]
    return RingPlan(
        "m", 1, "n0", "files", tuple(RingMember(f"n{i}", s) for i, s in enumerate(shards))
    )


class RecurrentEngine(DummyEngine):
    """Goes on from where a sequence is, or from a moment it was asked to keep, only."""

    def __init__(self) -> None:
        super().__init__(Faults())
        self.kept: dict[tuple[Shard, str], set[int]] = {}

    def check(self, shard: Shard, name: str, start: int) -> None:
        now = len(self._caches.get((shard, name), []))
        if start > now:
            raise CacheMiss("made up")
        if start not in {0, now, *self.kept.get((shard, name), ())}:
            raise AssertionError(f"{name} is at {now} and was asked to go on from {start}")

    def compute(self, shard: Shard, batch: ForwardBatch, hidden_states: Any) -> Any:
        for part in batch.slices:
            self.check(shard, part.sequence_id, part.start)
        found = super().compute(shard, batch, hidden_states)
        for part in batch.slices:
            kept = self.kept.setdefault((shard, part.sequence_id), set())
            kept -= {moment for moment in kept if moment > part.start}
            kept |= {part.end} if part.keeps else set()
        return found

    def take_over(self, shard: Shard, part: Slice) -> None:
        self.check(shard, part.takes_over, part.start)
        super().take_over(shard, part)
        self.kept.pop((shard, part.sequence_id), None)

    def release_sequences(self, sequence_ids: Sequence[str]) -> None:
        super().release_sequences(sequence_ids)
        self.kept = {key: kept for key, kept in self.kept.items() if key[1] not in sequence_ids}


class Ring:
    """Frames go through the members in order; each step takes as long as it is large. `pages` is
    all that the members have: a book of our own, written by the frames, says if that is kept. With
    `states` the engines cannot cut back, and each state takes so many pages."""

    def __init__(
        self,
        members: int,
        pages: int,
        rng: random.Random,
        fails: float,
        paged: bool,
        states: int = 0,
    ):
        self.rng, self.pages, self.fails, self.paged = rng, pages, fails, paged
        self.states = states
        self.plan = plan_of(members)
        self.engines = [
            RecurrentEngine() if states else DummyEngine(Faults()) for _ in range(members)
        ]
        self.book = Ledger()
        self.book.learn([self.room()])
        self.most_used = 0
        self.steps: list[Step] = []
        self.queue: deque[tuple[float, Step | Release | Rooms]] = deque()
        self.busy_until = 0.0
        self.broken: list[ExoError] = []
        self.scheduler = Scheduler(
            self.plan,
            self.submit,
            lambda plan, error: self.broken.append(error),
            ServingRules(60, max_requests=1000),
        )

    def room(self) -> CacheRoom:
        return CacheRoom(self.pages, self.book.used, self.paged, self.states)

    def submit(self, frame: Step | Release | Rooms) -> None:
        loop = asyncio.get_running_loop()
        took = 0.0
        if isinstance(frame, Step):
            self.steps.append(frame)
            for part in frame.batch.slices:
                self.book.extend(
                    part.sequence_id,
                    part.start,
                    part.length,
                    part.takes_over,
                    moves=part.moves,
                    keeps=part.keeps,
                )
            self.most_used = max(self.most_used, self.book.used)
            took = 0.004 + 0.001 * len(frame.batch.token_ids)
        elif isinstance(frame, Release):
            for sequence_id in frame.sequence_ids:
                self.book.release(sequence_id)
        self.busy_until = max(self.busy_until, loop.time()) + took
        self.queue.append((self.busy_until, frame))
        loop.call_at(self.busy_until, self.run)

    def run(self) -> None:
        _, frame = self.queue.popleft()
        if isinstance(frame, Rooms):
            self.scheduler.on_result(Rooms((MemberRoom("n0", self.room()),)))
        elif isinstance(frame, Release):
            for engine in self.engines:
                engine._release(frame.sequence_ids)
        else:
            self.scheduler.on_result(result) if isinstance(
                result := self.compute(frame), StepResult
            ) else self.scheduler.on_failure(result)

    def compute(self, step: Step) -> StepResult | StepFailure:
        states = None
        for member, engine in zip(self.plan.members, self.engines, strict=True):
            try:
                if self.rng.random() < self.fails:
                    kind = self.rng.choice([CacheMiss, EngineFailed, Overloaded])
                    engine._release([part.sequence_id for part in step.batch.slices])
                    raise kind("made up")
                output = engine._step(member.shard, step.batch, states)
            except ExoError as error:
                return StepFailure(self.plan.hash, step.number, member.node_id, error)
            states = output.hidden_states
        return StepResult(step.number, output.tokens)

    def held(self) -> set[str]:
        return {key[1] for engine in self.engines for key in engine._caches}


def alone(prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What DummyEngine says."""
    history = list(prompt)
    for _ in range(tokens):
        history.append(_LETTERS[sum(history) * (len(history) + 7) % len(_LETTERS)])
    return history[len(prompt) :]


class Guesser:
    """Guesses as prompt lookup makes them on text that repeats itself, which these engines' does
    not: some right, some wrong, some none."""

    def __init__(self, tokens: Sequence[int], rng: random.Random) -> None:
        self._tokens, self._rng = tokens, rng
        self.drafted = self.right = 0

    def draft(self, worth: float, limit: int) -> list[int]:
        if self._rng.random() < 0.5 or limit < 1:
            return []
        guesses = alone(tuple(self._tokens), min(limit, self._rng.randrange(1, 12)))
        if self._rng.random() < 0.7:
            guesses[self._rng.randrange(len(guesses))] = 1
        return guesses

    def verified(self, right: int, drafted: int) -> None:
        assert 0 <= right <= drafted


class SmallEngine(DummyEngine):
    """Takes its time, fails now and then, and now and then guesses wrong."""

    def __init__(self, rng: random.Random, fails: float) -> None:
        super().__init__(Faults())
        self._rng, self._fails = rng, fails

    def begin_forward(self, shard: Shard, batch: ForwardBatch, states: Any, on_done: Any) -> None:
        loop = asyncio.get_running_loop()
        try:
            if self._rng.random() < self._fails:
                self._release([part.sequence_id for part in batch.slices])
                raise EngineFailed("made up")
            outcome = self._step(shard, batch, states)
        except ExoError as error:
            loop.call_later(0.001, on_done, error)
            return
        tokens = (
            msgspec.structs.replace(token, token_id=1) if self._rng.random() < 0.2 else token
            for token in outcome.tokens
        )
        # Now and then it takes longer than anybody waits.
        took = self._rng.choice([0.001, 0.001, 0.001, 0.01, 3])
        loop.call_later(took, on_done, StepOutput(tokens=tuple(tokens)))

    def begin_release(self, sequence_ids: Any, on_done: Any) -> None:
        self._release(tuple(sequence_ids))
        on_done(None)


@pytest.fixture(autouse=True)
def guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    made = cached_property(lambda sequence: Guesser(sequence.tokens, rng))
    made.__set_name__(serving.Sequence, "lookup")
    monkeypatch.setattr(serving.Sequence, "lookup", made)


def prompts(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """As clients have them: the same system prompt, a chat that goes on, something else."""
    systems = [[rng.randrange(200) for _ in range(rng.choice([5, 70, 150]))] for _ in range(2)]
    found: list[tuple[int, ...]] = []
    for _ in range(count):
        kind = rng.random()
        if found and kind < 0.4:
            before = rng.choice(found)
            said = alone(before, rng.randrange(12)) if rng.random() < 0.7 else []
            found.append((*before, *said, *(rng.randrange(200) for _ in range(rng.randrange(30)))))
        elif kind < 0.8:
            new = [rng.randrange(200) for _ in range(rng.randrange(1, 90))]
            found.append((*rng.choice(systems), *new))
        else:
            found.append(tuple(rng.randrange(200) for _ in range(rng.randrange(1, 400))))
    return [prompt[:420] for prompt in found]


async def client(ring: Ring, name: str, prompt: tuple[int, ...], rng: random.Random) -> str:
    await asyncio.sleep(rng.choice([0, 0, rng.uniform(0, 3)]))
    wanted = rng.randrange(1, rng.choice([60, 60, 300]))
    leaves_after = rng.choice([999, 999, rng.randrange(20)])
    request = GenerationRequest(name, prompt, GREEDY, wanted, client=rng.choice("ab"))
    expected, found = alone(prompt, wanted), []
    events = ring.scheduler.generate(request)
    try:
        async for event in events:
            if event.token is not None:
                found.append(event.token.token_id)
            if len(found) >= leaves_after:
                assert found == expected[: len(found)]
                return "left"
            end = event.finish_reason
    except (EngineFailed, CacheMiss, Overloaded) as error:
        assert ring.fails, error
        assert found == expected[: len(found)]
        return "failed"
    except PromptTooLong:
        assert len(prompt) + 1 > (ring.pages - ring.states) * PAGE_TOKENS
        return "too long"
    finally:
        await events.aclose()
    assert found == expected[: len(found)]
    if len(found) < wanted:  # alone with all pages, and still there are too few
        assert len(prompt) + len(found) + 1 > (ring.pages - ring.states - 2) * PAGE_TOKENS
    assert end == "length"
    return "done"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    members=st.integers(1, 3),
    pages=st.sampled_from([8, 12, 20, 200]),
    fails=st.sampled_from([0.0, 0.0, 0.03]),
    paged=st.booleans(),
    states=st.sampled_from([0, 0, 1, 3]),
    drafts=st.booleans(),
)
def test_every_answer_is_what_it_would_be_alone(
    seed: int, members: int, pages: int, fails: float, paged: bool, states: int, drafts: bool
) -> None:
    rng = random.Random(seed)
    small = SmallEngine(rng, fails)

    async def all_of_them() -> None:
        ring = Ring(members, pages, rng, fails, paged, states)
        if drafts:
            shard = Shard("small", 0, N_LAYERS, N_LAYERS)
            ring.scheduler.draft_with(partial(Drafter, small, shard, 258))
        many = prompts(rng, rng.randrange(1, 25))
        answers = [client(ring, f"s{i}", prompt, rng) for i, prompt in enumerate(many)]
        ends = await asyncio.wait_for(asyncio.gather(*answers), 600)  # nobody starves
        if not fails:
            assert "failed" not in ends
        assert not ring.broken
        await asyncio.sleep(30)
        load = ring.scheduler.load
        assert (load.running, load.waiting) == (0, 0)
        assert ring.most_used <= pages
        assert load.cache.used == load.cache.kept == ring.book.used
        assert ring.held() <= set(ring.book._tables), "an engine holds what the head has forgotten"
        assert not small._caches and not small._histories, "it guesses for nobody"
        await asyncio.sleep(2 * 3600)
        ring.scheduler.close()

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(all_of_them())
    finally:
        loop.close()


def on_virtual_time(what: object) -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(what)  # type: ignore[arg-type]
    finally:
        loop.close()


async def text(
    ring: Ring, name: str, prompt: tuple[int, ...], tokens: int
) -> tuple[list[int], int]:
    request = GenerationRequest(name, prompt, GREEDY, tokens)
    events = [event async for event in ring.scheduler.generate(request)]
    told = [event for event in events if event.token]
    return [e.token.token_id for e in told if e.token], told[0].cached_tokens


A_CHAT = tuple(i * 37 % 200 for i in range(300))


@pytest.mark.parametrize("members", [1, 2])
def test_a_chats_next_turn_computes_what_is_new(members: int) -> None:
    async def chat() -> None:
        ring = Ring(members, 100, random.Random(0), 0, True)
        said, cached = await text(ring, "s", A_CHAT, 20)
        assert (said, cached) == (alone(A_CHAT, 20), 0)
        before = len(ring.steps)
        more = (*A_CHAT, *said, 1, 2, 3)
        again, cached = await text(ring, "t", more, 5)
        assert again == alone(more, 5)
        assert cached == 300 + 19, "all but the token that was sampled last"
        first = ring.steps[before].batch.slices[0]
        assert (first.start, first.length, first.takes_over) == (319, 4, "s")
        ring.scheduler.close()

    on_virtual_time(chat())


def test_where_a_state_cannot_be_cut_back_a_chat_goes_on_from_near_its_prompts_end() -> None:
    async def chat() -> None:
        ring = Ring(2, 100, random.Random(0), 0, True, states=3)
        await text(ring, "first", (1, 2), 1)  # what the members hold is known now
        said, _ = await text(ring, "s", A_CHAT, 20)
        kept = [part.end for step in ring.steps for part in step.batch.slices if part.keeps]
        assert kept == [256]
        forgotten = (*A_CHAT[:290], *said, 1, 2, 3)  # what began the answer is no longer there
        again, cached = await text(ring, "t", forgotten, 5)
        assert (again, cached) == (alone(forgotten, 5), 256)
        whole = (*A_CHAT, *said, 1, 2, 3)
        assert await text(ring, "u", whole, 5) == (alone(whole, 5), 319)
        again, cached = await text(ring, "v", A_CHAT, 5)
        assert (again, cached) == (alone(A_CHAT, 5), 256), "another answer to the same"
        ring.scheduler.close()

    on_virtual_time(chat())


def test_where_a_state_cannot_be_cut_back_it_is_kept_after_what_many_begin_with() -> None:
    async def burst() -> None:
        ring = Ring(1, 300, random.Random(0), 0, True, states=3)
        await text(ring, "first", (1, 2), 1)
        system = A_CHAT[:200]
        many = [(*system, *range(i, i + 100)) for i in range(4)]
        answers = await asyncio.gather(
            *(text(ring, f"s{i}", prompt, 1) for i, prompt in enumerate(many))
        )
        # The first began before there was anybody to share with.
        assert [cached for _, cached in answers] == [0, 0, 192, 192]
        late = (*system, *range(50, 150))
        assert await text(ring, "late", late, 1) == (alone(late, 1), 192)
        ring.scheduler.close()

    on_virtual_time(burst())


def test_who_comes_with_the_same_beginning_waits_for_it_to_be_computed_once() -> None:
    async def burst() -> None:
        ring = Ring(1, 200, random.Random(0), 0, True)
        many = [(*A_CHAT, 5, i) for i in range(6)]
        await asyncio.gather(*(text(ring, f"s{i}", prompt, 1) for i, prompt in enumerate(many)))
        computed = sum(len(step.batch.token_ids) for step in ring.steps)
        assert computed == 302 + 5
        ring.scheduler.close()

    on_virtual_time(burst())


def test_one_clients_many_requests_do_not_keep_anothers_one_waiting() -> None:
    async def both() -> None:
        ring = Ring(1, 12, random.Random(0), 0, True)
        order: list[str] = []

        async def one(name: str, client: str) -> None:
            prompt = (ord(client), *range(int(name[1:]), 150))
            request = GenerationRequest(name, prompt, GREEDY, 10, client=client)
            async for _ in ring.scheduler.generate(request):
                pass
            order.append(client)

        greedy = [asyncio.ensure_future(one(f"s{i}", "a")) for i in range(30)]
        await asyncio.sleep(0.1)
        await one("t1", "b")
        assert len(order) < 12
        await asyncio.gather(*greedy)
        ring.scheduler.close()

    on_virtual_time(both())


def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    async def refused() -> None:
        ring = Ring(1, 4, random.Random(0), 0, True)
        await text(ring, "s", A_CHAT[:50], 2)
        with pytest.raises(
            PromptTooLong, match="has 256 tokens, and the KV cache of m has room fo"
        ):
            await text(ring, "t", A_CHAT[:256], 2)
        ring.scheduler.close()

    on_virtual_time(refused())


def test_while_others_decode_a_prompt_comes_in_small_pieces() -> None:
    async def beside() -> None:
        ring = Ring(1, 200, random.Random(0), 0, True)
        runs = asyncio.ensure_future(text(ring, "s", (1, 2, 3), 1000))
        await asyncio.sleep(0.5)
        await text(ring, "t", A_CHAT, 1)  # how long its tokens take is known now
        before = len(ring.steps)
        await text(ring, "u", tuple(reversed(A_CHAT)), 1)
        pieces = [
            part.length
            for step in ring.steps[before:]
            for part in step.batch.slices
            if part.sequence_id == "u"
        ]
        assert not runs.done() and max(pieces) <= 32
        runs.cancel()
        ring.scheduler.close()

    on_virtual_time(beside())


def test_what_nobody_comes_back_to_is_given_back(tmp_path: Path) -> None:
    async def kept() -> None:
        ring = Ring(1, 100, random.Random(0), 0, True)
        await text(ring, "s", A_CHAT, 5)
        assert ring.held() == {"s"}
        await asyncio.sleep(2 * 3600)
        assert not ring.held()
        ring.scheduler.close()

    on_virtual_time(kept())
