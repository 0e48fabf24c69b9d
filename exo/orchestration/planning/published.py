"""The plans that serve, as far as this node knows, and the epochs it has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from exo.shard import RingPlan


class PublishedPlans:
    """One plan a model at most, the one with the largest epoch. `on_change` is called after every
    change. `served` remembers models whose plan was lost, so that they are planned anew."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._by_model: dict[str, RingPlan] = {}
        self.served: set[str] = set()
        self.max_epoch = 0

    def __iter__(self) -> Iterator[RingPlan]:
        return iter(list(self._by_model.values()))

    def of(self, model_id: str) -> RingPlan | None:
        return self._by_model.get(model_id)

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
        self.served.add(plan.model_id)
        self._on_change()
        return known if known is None or known.hash != plan.hash else None

    def remove(self, plan_hash: str) -> None:
        """It serves no longer; an unknown one is fine."""
        for model_id, plan in list(self._by_model.items()):
            if plan.hash == plan_hash:
                del self._by_model[model_id]
                self._on_change()

    def forget(self, model_id: str) -> None:
        """Its plan is over and no other is to be made by itself."""
        self.served.discard(model_id)
        if (plan := self.of(model_id)) is not None:
            self.remove(plan.hash)

    def remove_with(self, node_id: str) -> None:
        """Every plan the node is a member of."""
        for plan in self:
            if node_id in plan.node_ids:
                self.remove(plan.hash)

    def saw_epoch(self, epoch: int) -> None:
        self.max_epoch = max(self.max_epoch, epoch)
