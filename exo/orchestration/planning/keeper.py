"""Keeps what is served what it should be: compares, whenever anything is heard and now and then.

Every beat says which plans a node serves and in which it has a place (`PlansSaid`). So every node
can see, whatever messages were lost, that a plan is missing here, that another is dead because a
member has no place in it any more, that a place is left over, and, if it is the planner, that a
model is served without some live node. None of this depends on an event that may be missed; events
only make it sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from exo.download.progress import OnProgress, unheard
from exo.errors import ExoError, NodeLeft, PeerUnavailable, PlanMismatch
from exo.networking.calls.messages import PlansSaid
from exo.orchestration.planning.planner import Member, Planner
from exo.orchestration.planning.published import PublishedPlans
from exo.orchestration.planning.resting import Resting, is_slow, slow_among
from exo.shard import RingPlan
from exo.tasks import TaskOwner
from exo.topology.partitioning import Partition
from exo.topology.placement import PartitionRule, is_slower

logger = logging.getLogger(__name__)

PLAN_ATTEMPTS = 4
"""How often a request asks for another plan because the one it was given had just ended."""

DOUBT_BEATS = 4
"""A contradiction that stands for so many beats is none of messages that crossed. Fewer mends
sooner; too few would end plans that were published a moment ago."""

FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
"""Before a plan that could not be made, or that leaves out a live node, is tried again; doubled
each time. A node that just came back may not be able to say what it can take yet. Where all that
are left out would only slow answers, the longest at once."""

ALONE_S = 10.0
"""A node that serves alone has nobody to be compared with: it stays slow for so long before others
take over. Shorter would move models whenever somebody uses the machine for a moment."""


class Places(Protocol):
    """What is asked of the rings this node is a member of."""

    @property
    def plans(self) -> list[RingPlan]: ...

    @property
    def holding(self) -> frozenset[str]:
        """Hashes of the plans in which this node's place works."""

    def is_busy(self, plan_hash: str) -> bool:
        """Whether sequences run on a plan that this node heads."""

    def end(self, plan_hash: str, error: ExoError) -> None:
        """The plan can serve no longer: its sequences fail, its members are told by its head."""

    async def retire(self, plan_hash: str, reason: str) -> None: ...

    async def unload_unused(self, model_id: str) -> None: ...


@dataclass
class _Fitted:
    """Whom a model's plan was last fitted to, and when it is worth another look."""

    alive: frozenset[str]
    plan_hash: str
    tries: int
    look_again: float  # the event loop's clock


class PlanKeeper:
    """One per node. `members` gives every live node by id, this one too; `planner_id` who plans
    now; `seen_epoch` the largest epoch of which peers spoke; `beat_s` the time between two
    beats with a peer that is watched; `ask_soon` has a peer say anew what it knows; `draining`
    gives live nodes that are to have no part in plans; `slowdowns` how many times as long as usual
    nodes' steps take."""

    def __init__(
        self,
        node_id: str,
        members: Callable[[], Mapping[str, Member]],
        planner_id: Callable[[], str],
        seen_epoch: Callable[[], int],
        places: Places,
        on_change: Callable[[], None],
        beat_s: float,
        rule: PartitionRule = PartitionRule.MEMORY,
        ask_soon: Callable[[str], None] = lambda node_id: None,
        draining: Callable[[], frozenset[str]] = frozenset,
        slowdowns: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._node_id = node_id
        self._members = members
        self._draining = draining
        self._slowdowns = slowdowns
        self._ask_soon = ask_soon
        self._planner_id = planner_id
        self._seen_epoch = seen_epoch
        self._places = places
        self._beat_s = beat_s
        self.published = PublishedPlans(on_change)
        self.resting = Resting(lambda: self._now)
        self._rule = rule
        self._planner = Planner(
            node_id,
            members,
            lambda: self.published,
            self._next_epoch,
            rule,
            draining,
            self.resting.reasons,
        )
        self._said: dict[str, PlansSaid] = {}
        self._doubts: dict[tuple[str, str], float] = {}  # since when
        self._alive: tuple[frozenset[str], float] = (frozenset(), 0.0)  # since when
        self._fitted: dict[str, _Fitted] = {}
        self._fitting: dict[str, asyncio.Task[None]] = {}
        self._slow_since: dict[tuple[RingPlan, str], float] = {}
        self._look = asyncio.Event()
        self._tasks = TaskOwner(f"plans of {node_id}")

    def start(self) -> None:
        self._tasks.forever(self._keep, "keep")

    async def close(self) -> None:
        await self._tasks.close()
        await self._planner.close()

    def look_soon(self) -> None:
        """Something has changed; what it was does not matter."""
        self._look.set()

    @property
    def epoch(self) -> int:
        """The largest epoch of which this node knows."""
        return max(self.published.max_epoch, self._seen_epoch())

    def _next_epoch(self) -> int:
        self.published.saw_epoch(self.epoch + 1)
        return self.published.max_epoch

    # What is asked of it ------------------------------------------------------------------------

    async def ensure_plan(
        self,
        model_id: str,
        dead_hash: str,
        on_progress: OnProgress,
        *,
        make_room: bool = True,
        renew: bool = False,
    ) -> RingPlan:
        """A plan that serves: the published one unless it is `dead_hash`, else the planner's, which
        may unload idle models for it if `make_room`; with `renew` one that fits the nodes there are
        now. Raises what `Planner.ensure` raises."""
        for attempt in range(1, PLAN_ATTEMPTS + 1):
            self.published.remove(dead_hash)
            if (known := self.published.of(model_id)) is not None and not renew:
                return known
            planner_id = self._planner_id()
            try:
                if planner_id == self._node_id:
                    return await self._planner.ensure(
                        model_id, on_progress, make_room=make_room, renew=renew
                    )
                planner = self._members().get(planner_id)
                if planner is None:
                    raise PeerUnavailable(f"the planner {planner_id} is gone")
                plan = await planner.ensure_plan(
                    model_id, dead_hash, on_progress, make_room=make_room, renew=renew
                )
            except PeerUnavailable:
                # A planner that is gone is followed by another one.
                if attempt == PLAN_ATTEMPTS or self._planner_id() == planner_id:
                    raise
            else:
                self.take(plan)
                return plan
        raise AssertionError("the loop returns or raises")

    async def preview(self, model_id: str) -> Partition:
        """Raises what `Planner.preview` raises."""
        return await self._planner.preview(model_id)

    def check_not_stale(self, plan: RingPlan) -> None:
        """Raises PlanMismatch if a later plan of the model serves."""
        known = self.published.of(plan.model_id)
        if known is not None and plan.epoch < known.epoch:
            raise PlanMismatch(
                f"plan {plan.hash} of {plan.model_id} has epoch {plan.epoch}; node "
                f"{self._node_id} serves epoch {known.epoch}"
            )
        self.published.saw_epoch(plan.epoch)

    def take(self, plan: RingPlan) -> None:
        """The plan serves, unless a later one does; the other one's head lets it run out. Answers
        on a ring with a node that leaves, or is slow, do not wait for that: they go on elsewhere.
        """
        other = self.published.add(plan)
        if other is None or other.head_id != self._node_id:
            return
        slow = {node_id for node_id, why in plan.left_out if is_slow(why)}
        if gone := (self._draining() | slow) & set(other.node_ids) - set(plan.node_ids):
            why = f"node {', '.join(gone)} leaves the ring of {other.model_id}"
            self._places.end(other.hash, PeerUnavailable(why))
        else:
            retiring = self._places.retire(other.hash, "another plan serves")
            self._tasks.background(retiring, "retire")

    async def publish(self, plan: RingPlan) -> None:
        """The plan serves; shards that no plan needs any more are given back."""
        self.take(plan)
        await self._places.unload_unused(plan.model_id)

    async def retire(self, plan_hash: str, reason: str, unload_model: str) -> None:
        """No new sequences on this plan; with `unload_model` that model's memory is given back."""
        logger.info("plan %s is retired: %s", plan_hash, reason)
        if unload_model:  # before its plan is: what is wanted and has none gets another
            self.published.forget(unload_model)
        self.published.remove(plan_hash)
        await self._places.retire(plan_hash, reason)
        if unload_model:
            await self._places.unload_unused(unload_model)

    def lost(self, node_id: str, error: ExoError) -> None:
        """The node is gone, and with it the plans it was a member of."""
        self._said.pop(node_id, None)
        self.published.remove_with(node_id)
        if not isinstance(error, NodeLeft):
            self.resting.lost(node_id)
        self.look_soon()

    # What nodes say of plans --------------------------------------------------------------------

    def says(self, to: str) -> PlansSaid:
        """What this node says to a peer. Plans are sent whole for as long as it does not name them:
        it may have missed them."""
        heard = self._said.get(to)
        named = {state.plan_hash for state in heard.models} if heard is not None else None
        plans = [p for p in self.published if named is not None and p.hash not in named]
        return PlansSaid(self.published.states(), self._holds, tuple(plans))

    @property
    def _holds(self) -> frozenset[str]:
        return self._places.holding | self._planner.making

    @property
    def news(self) -> object:
        """Another value whenever all should hear what this node says."""
        return self.published.states(), self._holds

    def heard(self, node_id: str, said: PlansSaid) -> None:
        """What a peer says."""
        before = self._said.get(node_id)
        self._said[node_id] = said
        for state in said.models:
            self.published.learn(state)
        for plan in said.plans:
            if not self.published.is_over(plan) and not self._why_dead(plan):
                logger.info("%s tells of plan %s of %s", node_id, plan.hash, plan.model_id)
                self.take(plan)
        if before is None or (before.models, before.holds) != (said.models, said.holds):
            self.look_soon()

    # Desired against actual ---------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await self._look.wait()
            self._look.clear()
            try:
                self._compare()
            except ExoError as error:  # a member that was lost just now
                logger.info("plans are looked at again: %s", error.message)

    def _compare(self) -> None:
        alive = frozenset(self._members())
        if alive != self._alive[0]:
            self._alive = alive, self._now
        self._said = {node_id: said for node_id, said in self._said.items() if node_id in alive}
        doubts, doubtful = {}, []
        for plan in self.published:
            if why := self._why_dead(plan):
                doubts["plan", plan.hash] = why
                doubtful.append(plan)
        for plan in self._places.plans:
            if self._is_left_over(plan):
                doubts["place", plan.hash] = "nobody serves it any more"
                doubtful.append(plan)
        if doubts.keys() - self._doubts.keys():
            # In a crowd beats are rare, and what was said last is old.
            for plan in doubtful:
                for node_id in {plan.planner_id, *plan.node_ids} - {self._node_id}:
                    self._ask_soon(node_id)
        self._doubts = {key: self._doubts.get(key, self._now) for key in doubts}
        for key, since in self._doubts.items():
            if self._now - since >= DOUBT_BEATS * self._beat_s:
                self._end(key[1], doubts[key])
        if self._planner_id() == self._node_id:
            self._fit_to(alive)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _why_dead(self, plan: RingPlan) -> str:
        """Why a plan cannot serve, by what its members say; empty if it can for all that is known
        here."""
        alive = self._members()
        concerned = self._node_id in plan.node_ids or self._planner_id() == self._node_id
        for member in plan.node_ids:
            if member == self._node_id:
                if plan.hash not in self._places.holding:
                    return f"node {member} has no place in it any more"
            elif member in alive:
                said = self._said.get(member)
                if said is not None and plan.hash not in said.holds:
                    return f"node {member} has no place in it any more"
            elif concerned:
                return f"node {member} is gone"
        return ""

    def _is_left_over(self, plan: RingPlan) -> bool:
        """Whether this node's place in a plan is for nothing: it does not serve, is not being made
        and does not run out."""
        known = self.published.of(plan.model_id)
        if (known is not None and known.hash == plan.hash) or plan.hash in self._planner.making:
            return False
        if plan.head_id == self._node_id and self._places.is_busy(plan.hash):
            return False
        alive = self._members()
        for node_id in {plan.head_id, plan.planner_id} - {self._node_id}:
            if node_id in alive:
                said = self._said.get(node_id)
                if said is None or plan.hash in said.holds:
                    return False
        return True

    def _end(self, plan_hash: str, why: str) -> None:
        logger.warning("plan %s is over: %s", plan_hash, why)
        self.published.remove(plan_hash)
        self._places.end(plan_hash, PeerUnavailable(f"the ring broke: {why}"))

    def _fit_to(self, alive: frozenset[str]) -> None:
        """Have every wanted model served by all who live and stay, once those who live have been
        the same for a beat: nodes often come several at once."""
        since = self._alive[1]
        if self._now - since < self._beat_s:
            asyncio.get_running_loop().call_later(self._beat_s, self.look_soon)
            return
        self._rest_who_is_slow()
        staying = alive - self._draining()
        # Slowly rather than not at all.
        staying = staying - self.resting.reasons().keys() or staying
        for model_id in self.published.wanted if staying else ():
            if model_id not in self._fitting and not self._fits(model_id, staying):
                work = self._fit(model_id, staying)
                self._fitting[model_id] = self._tasks.background(work, f"fit {model_id}")

    def _rest_who_is_slow(self) -> None:
        slowdowns, resting = self._slowdowns(), self.resting.reasons()
        slow = {
            (plan, node_id): slowdown
            for plan in self.published
            for node_id, slowdown in slow_among(plan.node_ids, slowdowns).items()
            if node_id not in resting
        }
        self._slow_since = {key: self._slow_since.get(key, self._now) for key in slow}
        for (plan, node_id), slowdown in slow.items():
            patience_s = ALONE_S if len(plan.members) == 1 else 0.0
            if self._now - self._slow_since[plan, node_id] >= patience_s:
                self.resting.slow(node_id, slowdown)
                why = self.resting.reasons()[node_id]
                logger.warning("node %s of the ring of %s: %s", node_id, plan.model_id, why)

    def _fits(self, model_id: str, alive: frozenset[str]) -> bool:
        """Whether a model is served by all who live and stay, or was tried to be a moment ago."""
        plan, last = self.published.of(model_id), self._fitted.get(model_id)
        unwanted = self._draining() | self.resting.reasons().keys() - alive
        fitting = plan if plan is not None and unwanted.isdisjoint(plan.node_ids) else None
        has_all = fitting is not None and alive <= set(fitting.node_ids)
        is_whole = fitting is not None and fitting.expert_share == 1
        if has_all and is_whole and (len(alive) == 1 or self._rule is PartitionRule.MEMORY):
            return True  # whatever is measured anew, it would be the same
        if fitting is not None and alive <= {*fitting.node_ids, *dict(fitting.left_out)}:
            # It was made with them in view, a moment ago; what they measure changes slowly.
            reasons = (why for node, why in fitting.left_out if node in alive)
            rest_s = LONGEST_REST_S if all(map(is_slower, reasons)) else FIRST_REST_S
            fitted = _Fitted(alive, fitting.hash, 0, self._now + rest_s)
            if last is None or (last.alive, last.plan_hash) != (alive, fitting.hash):
                last = self._fitted[model_id] = fitted
        plan_hash = plan.hash if plan is not None else ""
        if last is None or (last.alive, last.plan_hash) != (alive, plan_hash):
            return False
        return self._now < last.look_again

    async def _fit(self, model_id: str, alive: frozenset[str]) -> None:
        last = self._fitted.get(model_id)
        tries = last.tries + 1 if last is not None and last.alive == alive else 0
        made: RingPlan | None = None
        try:
            made = await self._planner.ensure(model_id, unheard, renew=True)
        except ExoError as error:
            # Whoever asks for the model meanwhile gets this error, or a working plan.
            logger.warning("no new plan of %s yet: %s", model_id, error.message)
        finally:
            del self._fitting[model_id]
        plan = self.published.of(model_id)
        if plan is not None and made is not None:
            plan = made  # one that another planner published meanwhile is looked at without a rest
        rest_s = min(FIRST_REST_S * 2**tries, LONGEST_REST_S)
        self._fitted[model_id] = _Fitted(
            alive, plan.hash if plan else "", tries, self._now + rest_s
        )
