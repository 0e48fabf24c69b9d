"""An answer whose rings end under it: what its client gets, against rings of our own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

import pytest
from virtual_time import VirtualTimeLoop

from exo.errors import EngineFailed, ExoError, ModelTooLarge, PeerUnavailable
from exo.inference.sampling import SampledToken, SamplingParams
from exo.networking.calls.messages import GenerationEvent, GenerationRequest
from exo.orchestration.serving.continuation import generate_on_any_ring
from exo.shard import RingMember, RingPlan, Shard

REJOIN_WAIT_S = 10.0
REQUEST = GenerationRequest("s", (5, 6), SamplingParams(), 10, timeout_s=1000)


class Cluster:
    """Rings that end after as many tokens as `lives` says; "none" is a ring that cannot be had."""

    def __init__(self, lives: list[int | ExoError]) -> None:
        self._lives = lives
        self._epoch = 0
        self.asked: list[GenerationRequest] = []
        self.waits: list[float] = []

    async def ring(self, dead_hash: str) -> RingPlan:
        if isinstance(self._lives[0], ModelTooLarge):
            raise self._lives.pop(0)
        self._epoch += 1
        members = (RingMember("a", Shard("m", 0, 4, 4)),)
        plan = RingPlan("m", self._epoch, "a", "files", members)
        assert plan.hash != dead_hash
        return plan

    async def at_head(
        self, plan: RingPlan, request: GenerationRequest
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.asked.append(request)
        life = self._lives.pop(0)
        if isinstance(life, ExoError):
            raise life
        for number in range(life):
            token = 100 + len(request.generated) + number
            is_last = token == 109
            yield GenerationEvent(SampledToken(token), "length" if is_last else "")
            if is_last:
                return
        raise PeerUnavailable("b is gone")


def now() -> float:
    return asyncio.get_running_loop().time()


def answer_of(cluster: Cluster, *, was_lost: bool = False) -> list[int]:
    async def tokens() -> list[int]:
        lost_at = now() if was_lost else -math.inf
        events = generate_on_any_ring(
            REQUEST,
            cluster.ring,
            cluster.at_head,
            REJOIN_WAIT_S,
            lambda: lost_at,
            lambda: cluster.waits.append(now() - lost_at),
        )
        return [event.token.token_id async for event in events if event.token]

    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(tokens())
    finally:
        loop.close()


def test_the_next_ring_goes_on_where_the_last_one_ended() -> None:
    cluster = Cluster([3, 0, 4, ModelTooLarge("b is away"), 99])
    assert answer_of(cluster) == list(range(100, 110))
    assert [len(request.generated) for request in cluster.asked] == [0, 3, 3, 7]
    assert len({request.sequence_id for request in cluster.asked}) == 4
    assert cluster.asked[-1].timeout_s < 1000


def test_who_has_not_begun_tries_a_few_rings() -> None:
    gone = PeerUnavailable("b is gone")
    assert len(answer_of(Cluster([gone, gone, gone, 99]))) == 10
    with pytest.raises(PeerUnavailable):
        answer_of(Cluster([gone] * 10))
    with pytest.raises(ModelTooLarge):
        answer_of(Cluster([ModelTooLarge("too large")]))


def test_a_ring_that_cannot_be_had_again_is_waited_for_but_not_for_ever() -> None:
    many: list[int | ExoError] = [ModelTooLarge("b is away") for _ in range(100)]
    cluster = Cluster([3, *many])
    with pytest.raises(ModelTooLarge, match=r"gone.* 10 s .* of 3 tokens: b is away"):
        answer_of(cluster)
    assert 100 - len(cluster._lives) > REJOIN_WAIT_S / 2


def test_who_has_not_begun_waits_for_a_node_lost_a_moment_ago() -> None:
    away: list[int | ExoError] = [ModelTooLarge("b is away") for _ in range(100)]
    cluster = Cluster([*away[:5], 99])
    assert answer_of(cluster, was_lost=True) == list(range(100, 110))
    assert len(cluster.waits) == 5
    cluster = Cluster(away)
    with pytest.raises(ModelTooLarge, match=r"^b is away$"):
        answer_of(cluster, was_lost=True)
    assert REJOIN_WAIT_S - 2 < cluster.waits[-1] <= REJOIN_WAIT_S
    gone = PeerUnavailable("b is gone")
    assert len(answer_of(Cluster([gone] * 8 + [99]), was_lost=True)) == 10


def test_an_engine_that_fails_ends_the_answer() -> None:
    with pytest.raises(EngineFailed):
        answer_of(Cluster([3, EngineFailed("x")]))
