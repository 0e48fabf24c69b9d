"""Whatever the network did to three to five nodes: once it is quiet they agree on one plan.

Real membership, keepers and planners on a virtual clock (see simulated_nodes.py).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from simulated_nodes import Net, SimNode, net_gb
from virtual_time import VirtualTimeLoop

from exo.download.progress import unheard
from exo.errors import ExoError

NAMES = "abcde"
QUIET_S = 10.0
"""How soon after the last trouble all must agree: a lost node is known after 1.4 s, a contradiction
believed after 2, a plan made in a few, and what failed is tried again after 1, 2 and 4 s."""

SETTLES_S = 4.0
"""How soon who has rested has layers again: a second later a better plan is looked for than the
one that left it out, and it takes its time to make."""


class Troubles(RuleBasedStateMachine):
    """Any troubles, in any order; `teardown` ends them and looks."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.instances = 0
        self.asking: list[asyncio.Task[Any]] = []
        self.was_asked = False

    @initialize(count=st.integers(3, 5), seed=st.integers(0, 2**16))
    def begin(self, count: int, seed: int) -> None:
        self.names = NAMES[:count]
        self.net = Net(random.Random(seed))
        for name in self.names:
            self._start(name)
        self.run(6.0)
        self.ask(0)
        self.run(5.0)

    def _start(self, name: str) -> None:
        self.instances += 1

        async def start() -> None:
            node = SimNode(self.net, name, str(self.instances), net_gb(name))
            self.net.nodes[name] = node
            node.start()

        self.loop.run_until_complete(start())

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 2.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.run(seconds)

    @rule(index=st.integers(0, 4))
    def ask(self, index: int) -> None:
        """Somebody wants the model at a node."""
        alive = sorted(self.net.nodes)
        if not alive:
            return
        node = self.net.nodes[alive[index % len(alive)]]
        self.was_asked = True

        async def ask() -> None:
            try:
                async with asyncio.timeout(30):
                    await node.ensure_plan("m", "", unheard)
            except (ExoError, TimeoutError):
                pass

        task = self.loop.create_task(ask())
        self.asking.append(task)

    @rule(source=st.sampled_from(NAMES), to=st.sampled_from(NAMES), both=st.booleans())
    def lose(self, source: str, to: str, both: bool) -> None:
        self.net.cut.add((source, to))
        if both:
            self.net.cut.add((to, source))

    @rule(source=st.sampled_from(NAMES), to=st.sampled_from(NAMES))
    def slow_down(self, source: str, to: str) -> None:
        self.net.slow.add((source, to))

    @rule(share=st.sampled_from([0.0, 0.05, 0.3]))
    def drop_some(self, share: float) -> None:
        self.net.loss = share

    @rule(name=st.sampled_from(NAMES))
    def reset(self, name: str) -> None:
        self.net.reset(name)

    @rule(name=st.sampled_from(NAMES))
    def compute_slowly(self, name: str) -> None:
        if name in self.net.nodes:
            self.net.nodes[name].slowdown = 12.0

    @rule()
    def heal(self) -> None:
        for node in self.net.nodes.values():
            node.slowdown = 1.0
        self.net.cut.clear()
        self.net.slow.clear()
        self.net.loss = 0.0

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        if name in self.net.nodes:
            self.loop.run_until_complete(self.net.kill(name))

    @rule(name=st.sampled_from(NAMES))
    def come_back(self, name: str) -> None:
        if name in self.names and name not in self.net.nodes:
            self._start(name)

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            self.loop.close()
            return
        try:
            self.heal()
            self.run(QUIET_S - SETTLES_S)
            left_out = self.loop.run_until_complete(self._resting())
            self.run(SETTLES_S)
            self.check(left_out)
            if left_out:
                self.run(max(0.0, self.loop.run_until_complete(self._longest_rest_s())) + QUIET_S)
                self.check(set())
        finally:
            self.loop.run_until_complete(self._stop())
            self.loop.close()

    async def _longest_rest_s(self) -> float:
        """Until nobody is left out for being lost again and again."""
        return max((n.keeper.resting.rest_s for n in self.net.nodes.values()), default=0.0)

    async def _resting(self) -> set[str]:
        """Whom any node may have left out: who plans changes."""
        return {name for n in self.net.nodes.values() for name in n.keeper.resting.reasons()}

    async def _stop(self) -> None:
        for node in self.net.nodes.values():
            await node.stop()
        for task in self.asking:
            if not task.done():
                task.cancel()
        ends = await asyncio.gather(*self.asking, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def check(self, left_out: set[str]) -> None:
        """`left_out`: who may have no layers."""
        alive = set(self.net.nodes)
        for name, node in self.net.nodes.items():
            assert set(node.members()) == alive, f"{name} sees {set(node.members())}"
        plans = {name: node.keeper.published.of("m") for name, node in self.net.nodes.items()}
        wanted = any("m" in n.keeper.published.wanted for n in self.net.nodes.values())
        hashes = {plan.hash if plan else "" for plan in plans.values()}
        assert len(hashes) <= 1, {n: (p and (p.hash, p.node_ids)) for n, p in plans.items()}
        if alive and wanted:
            plan = next(iter(plans.values()))
            assert plan is not None, "a model that is wanted is served by nobody"
            assert alive - left_out <= set(plan.node_ids) <= alive, (plan.node_ids, alive)
        for name, node in self.net.nodes.items():
            known = plans[name]
            own = {known.hash} if known is not None and name in known.node_ids else set()
            assert node.rings.holding == own, f"{name} holds {node.rings.holding}"


Troubles.TestCase.settings = settings(max_examples=75, stateful_step_count=25, deadline=None)
TestTroubles = Troubles.TestCase
