"""Where a model's layers go, by what nodes say of the model and of themselves."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from exo.errors import ModelTooLarge, ModelUnsupported, PlanMismatch
from exo.models.description import ModelDescription
from exo.networking.calls.messages import Prepared
from exo.orchestration.planning.resting import is_slow
from exo.topology.fit import LEAST_EXPERTS
from exo.topology.partitioning import ModelSizes, Partition
from exo.topology.placement import PartitionRule, place

logger = logging.getLogger(__name__)

EXPERT_SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, LEAST_EXPERTS)
"""Of a mixture that fits nowhere whole, how much of its experts is to be in memory."""


class Placer:
    """`resting` are the nodes that get layers only if nothing fits without them, or is slower, and
    why; `serving` gives those that serve a model now."""

    def __init__(
        self,
        rule: PartitionRule,
        resting: Callable[[], Mapping[str, str]],
        serving: Callable[[str], Sequence[str]],
    ) -> None:
        self._rule = rule
        self._resting = resting
        self._serving = serving

    def partition(
        self, prepared: dict[str, Prepared], left_out: dict[str, str], expert_share: float = 1.0
    ) -> tuple[ModelDescription, Partition]:
        """Where the layers go. Who gets none is noted in `left_out`.

        Raises:
            ModelTooLarge, ModelUnsupported: there is no placement that fits.
        """
        resting = {node: why for node, why in self._resting().items() if node in prepared}
        steady = {node: one for node, one in prepared.items() if node not in resting}
        if resting and steady:
            try:
                placed = self._over(steady, without := left_out | resting, expert_share)
            except (ModelTooLarge, ModelUnsupported):
                logger.info("nothing fits without %s", ", ".join(resting))
            else:
                if all(map(is_slow, resting.values())):
                    whole = self._over(prepared, with_slow := dict(left_out), expert_share)
                    if 0 < whole[1].predicted_step_s < placed[1].predicted_step_s:
                        logger.info("answers are faster with %s, slow as it is", ", ".join(resting))
                        left_out.update(with_slow)
                        return whole
                left_out.update(without)
                return placed
        return self._over(prepared, left_out, expert_share)

    def partition_in_part(
        self, prepared: dict[str, Prepared], left_out: dict[str, str]
    ) -> tuple[ModelDescription, Partition] | None:
        """The same of a mixture with as much of its experts in memory as fits, the rest on disk;
        None if it does not fit so either."""
        why = "it holds the experts of a mixture all or not at all, and they do not fit"
        able = {node: one for node, one in prepared.items() if one.description.expert_bytes}
        unable = dict.fromkeys(prepared.keys() - able.keys(), why)
        for share in EXPERT_SHARES if able else ():
            try:
                found, partition = self.partition(able, without := left_out | unable, share)
            except (ModelTooLarge, ModelUnsupported):
                continue
            # A step may ask for all experts of a layer at once.
            if all(share * member.shard.layer_count >= 1 for member in partition.members):
                left_out.update(without)
                return found, partition
        return None

    def partition_as_fits(
        self, prepared: dict[str, Prepared], left_out: dict[str, str]
    ) -> tuple[ModelDescription, Partition]:
        """Whole, else in part. Raises as `partition`."""
        try:
            return self.partition(prepared, left_out)
        except (ModelTooLarge, ModelUnsupported):
            if (placed := self.partition_in_part(prepared, left_out)) is None:
                raise
            return placed

    def fits(self, prepared: dict[str, Prepared]) -> bool:
        try:
            self.partition(prepared, {})
        except (ModelTooLarge, ModelUnsupported):
            return False
        return True

    def _over(
        self, prepared: dict[str, Prepared], left_out: dict[str, str], expert_share: float
    ) -> tuple[ModelDescription, Partition]:
        """The same for these nodes. Those that hold other files are noted in `left_out`."""
        found, memory = _one_checkpoint(prepared, left_out)
        sizes = ModelSizes(
            found.sizes_with(expert_share),
            found.first_bytes,
            found.last_bytes,
            found.cuts,
            found.kv_bytes,
            found.shared_bytes,
            found.unread_bytes,
        )
        paces = {node_id: one.pace for node_id, one in prepared.items()}
        serving = self._serving(found.model_id)
        try:
            placed = place(self._rule, found.model_id, memory, sizes, paces, serving)
        except ModelTooLarge as error:
            if found.cuts is None:
                raise
            raise ModelUnsupported(
                f"{found.model_id} ({found.model_type}) cannot be split over nodes as it would "
                f"have to be: {found.uncuttable}; {error.message}"
            ) from error
        members = tuple(
            replace(member, shard=replace(member.shard, expert_share=expert_share))
            for member in placed.members
        )
        # How often the disk is asked for experts, nobody knows.
        seconds = placed.predicted_step_s if expert_share == 1 else 0.0
        return found, replace(placed, members=members, predicted_step_s=seconds)


def _one_checkpoint(
    prepared: dict[str, Prepared], left_out: dict[str, str]
) -> tuple[ModelDescription, dict[str, int]]:
    """The files most memory holds; nodes with others of the same name are left out. Where engines
    need more or less for the same files, what most of it is."""
    weight: dict[str, int] = defaultdict(int)
    for found in prepared.values():
        weight[found.description.checkpoint] += found.memory_bytes
    chosen = max(sorted(weight), key=lambda checkpoint: weight[checkpoint])
    memory = {}
    descriptions = []
    for node_id, found in prepared.items():
        if found.description.checkpoint == chosen:
            memory[node_id] = found.memory_bytes
            descriptions.append(found.description)
        else:
            left_out[node_id] = "it holds other files under this model's name"
    if not descriptions:
        raise PlanMismatch("no node holds the chosen checkpoint")
    return max(descriptions, key=lambda found: sum(found.layer_bytes)), memory
