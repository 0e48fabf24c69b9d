"""The plans that serve, as far as this node knows, and which models are to be served at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from exo.networking.calls.messages import ModelState
from exo.shard import RingPlan


class PublishedPlans:
    """One plan a model at most, the one with the largest epoch. `on_change` is called after every
    change.

    Whether a model is wanted is remembered with the epoch at which that was decided: the later
    decision holds, of two at one epoch the unloading, so that nodes that hear each other agree
    whatever they missed.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._by_model: dict[str, RingPlan] = {}
        self._decided: dict[str, tuple[int, bool]] = {}  # model -> epoch, whether it was unloaded
        self.max_epoch = 0

    def __iter__(self) -> Iterator[RingPlan]:
        return iter(list(self._by_model.values()))

    def of(self, model_id: str) -> RingPlan | None:
        return self._by_model.get(model_id)

    @property
    def wanted(self) -> list[str]:
        """Models that are to be served: those whose plan was lost too."""
        return [model_id for model_id, (_, unloaded) in self._decided.items() if not unloaded]

    def states(self) -> tuple[ModelState, ...]:
        """What this node knows of every model."""
        return tuple(
            ModelState(model_id, epoch, plan.hash if plan else "", not unloaded)
            for model_id, (epoch, unloaded) in self._decided.items()
            for plan in [self.of(model_id)]
        )

    def learn(self, state: ModelState) -> None:
        """What another node knows of whether a model is wanted."""
        self._decide(state.model_id, state.epoch, not state.wanted)

    def _decide(self, model_id: str, epoch: int, unloaded: bool) -> None:
        self.saw_epoch(epoch)
        if (epoch, unloaded) > self._decided.get(model_id, (-1, False)):
            self._decided[model_id] = epoch, unloaded
            plan = self.of(model_id)
            if unloaded and plan is not None and plan.epoch <= epoch:
                self.remove(plan.hash)

    def is_over(self, plan: RingPlan) -> bool:
        """True if a later plan of the model serves, or it was unloaded since."""
        known = self.of(plan.model_id)
        epoch, unloaded = self._decided.get(plan.model_id, (-1, False))
        if known is not None and (known.epoch, known.hash) >= (plan.epoch, plan.hash):
            return True
        return unloaded and plan.epoch <= epoch

    def add(self, plan: RingPlan) -> RingPlan | None:
        """Keep the later of this plan and the known one; returns the other, None if there is none.

        Two planners that did not see each other may give one epoch twice: the hash decides, the
        same way on every node.
        """
        self.saw_epoch(plan.epoch)
        known = self._by_model.get(plan.model_id)
        if known is not None and (known.epoch, known.hash) > (plan.epoch, plan.hash):
            return plan
        self._by_model[plan.model_id] = plan
        self._decide(plan.model_id, plan.epoch, unloaded=False)
        self._on_change()
        return known if known is None or known.hash != plan.hash else None

    def remove(self, plan_hash: str) -> None:
        """It serves no longer; an unknown one is fine."""
        for model_id, plan in list(self._by_model.items()):
            if plan.hash == plan_hash:
                del self._by_model[model_id]
                self._on_change()

    def forget(self, model_id: str) -> None:
        """It was unloaded: its plan is over and no other is to be made by itself."""
        epoch, _ = self._decided.get(model_id, (self.max_epoch, False))
        self._decide(model_id, epoch, unloaded=True)

    def remove_with(self, node_id: str) -> None:
        """Every plan the node is a member of."""
        for plan in self:
            if node_id in plan.node_ids:
                self.remove(plan.hash)

    def saw_epoch(self, epoch: int) -> None:
        self.max_epoch = max(self.max_epoch, epoch)
