"""Which node runs which layers: contiguous shards in proportion to free memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from exo.errors import ModelTooLarge
from exo.shard import RingMember, Shard
from exo.topology.capabilities import GB

ACTIVATION_RESERVE = 0.10
"""Share of a node's free memory kept for activations and the runtime. Higher refuses models that
would fit; lower risks swapping while a long prompt is prefilled."""

_UNREACHED = float("inf")
_LEFT_OUT_PENALTY = 1e9


@dataclass(frozen=True)
class ModelSizes:
    """Bytes a node needs for parts of a model; all zero when the sizes are not known.

    `layers[i]` is layer i with the KV cache reserved for it, `first` what only the first shard
    holds (the embedding), `last` what only the last one does (final norm, head).
    `cuts` are the layer indices at which the model may be cut; None means at every one.
    """

    layers: tuple[int, ...]
    first: int = 0
    last: int = 0
    cuts: frozenset[int] | None = None
    kv_reserve: int = 0
    """Of each layer's bytes, those reserved for the KV cache."""
    shared: int = 0
    """Of `first` and of `last` what a node with both holds once: an embedding that is the head."""
    unread: tuple[int, ...] = ()
    """Of each layer's bytes, what decoding a token leaves unread; empty: nothing."""

    @property
    def total(self) -> int:
        return sum(self.layers) + self.first + self.last - self.shared


@dataclass(frozen=True)
class Partition:
    """The result: members in ring order, and why other nodes are not among them.
    `predicted_step_s`: seconds from one token to the next; 0 where nothing was predicted."""

    members: tuple[RingMember, ...]
    left_out: tuple[tuple[str, str], ...] = field(default=())
    predicted_step_s: float = 0.0


class RingMemoryWeightedPartitioningStrategy:
    """Shards proportional to memory, by largest remainder, never more than a node holds.

    The order is stable: most memory first, ties by node id. Where the proportional shares do not
    fit, the nearest shares that do are taken (least squared distance in layers). A node that
    cannot hold a single layer of its own is left out.
    """

    def partition(
        self,
        model_id: str,
        available_bytes: dict[str, int],
        sizes: ModelSizes,
        weights: Mapping[str, float] | None = None,
    ) -> Partition:
        """Place the layers of `sizes` on nodes with `available_bytes` of free memory each, in
        proportion to `weights` if they are given.

        Raises:
            ModelTooLarge: no placement fits; the message has each node's share and the shortfall.
        """
        if not available_bytes:
            raise ModelTooLarge(f"no live node can hold {model_id}: the cluster is empty")
        usable = {n: int(b * (1 - ACTIVATION_RESERVE)) for n, b in available_bytes.items()}
        order = sorted(usable, key=lambda node: (-usable[node], node))
        smallest = min(sizes.layers)
        small = [node for node in order if usable[node] < smallest]
        fitting = [node for node in order if usable[node] >= smallest]
        shares = [int(weights[node]) if weights else usable[node] for node in fitting]
        counts = _counts([usable[node] for node in fitting], shares, sizes) if fitting else None
        if counts is None:
            raise ModelTooLarge(_refusal(model_id, usable, sizes))
        n_layers = len(sizes.layers)
        left_out = [(node, _too_small(usable[node], smallest)) for node in small]
        members = []
        start = 0
        for node, count in zip(fitting, counts, strict=True):
            if count:
                members.append(RingMember(node, Shard(model_id, start, start + count, n_layers)))
                start += count
            else:
                left_out.append((node, _not_needed(len(fitting), n_layers)))
        return Partition(tuple(members), tuple(left_out))


def _counts(usable: list[int], shares: list[int], sizes: ModelSizes) -> list[int] | None:
    """Layers for each node in order, near `shares`, or None where nothing fits."""
    n_layers = len(sizes.layers)
    target = largest_remainder(shares, n_layers)
    before = [0, *accumulate(sizes.layers)]

    def fits(node: int, start: int, end: int) -> bool:
        need = before[end] - before[start]
        need += sizes.first if start == 0 else 0
        need += sizes.last if end == n_layers else 0
        need -= sizes.shared if end - start == n_layers else 0
        return need <= usable[node]

    def may_cut(layer: int) -> bool:
        return layer == n_layers or sizes.cuts is None or layer in sizes.cuts

    bounds = [0, *accumulate(target)]
    if all(
        fits(node, start, end) and may_cut(end)
        for node, (start, end) in enumerate(pairwise(bounds))
        if end > start
    ):
        return target
    return _nearest_fit(target, n_layers, fits, may_cut)


def _nearest_fit(
    target: list[int],
    n_layers: int,
    fits: Callable[[int, int, int], bool],
    may_cut: Callable[[int], bool],
) -> list[int] | None:
    """Dynamic programme over (nodes placed, layers placed): least squared distance to `target`."""
    cost = [0.0] + [_UNREACHED] * n_layers
    choices: list[list[int]] = []
    for node, wanted in enumerate(target):
        following = [c + (_LEFT_OUT_PENALTY if wanted else 0.0) for c in cost]
        taken = [0] * (n_layers + 1)
        for start in range(n_layers):
            if cost[start] == _UNREACHED:
                continue
            for end in range(start + 1, n_layers + 1):
                if not fits(node, start, end):
                    break  # more layers only need more
                distance = cost[start] + (end - start - wanted) ** 2
                if may_cut(end) and distance < following[end]:
                    following[end] = distance
                    taken[end] = end - start
        cost = following
        choices.append(taken)
    if cost[n_layers] == _UNREACHED:
        return None
    counts = []
    end = n_layers
    for taken in reversed(choices):
        counts.append(taken[end])
        end -= taken[end]
    return counts[::-1]


def largest_remainder(weights: list[int], total: int) -> list[int]:
    """`total` divided in proportion to `weights`, each at least 1 where there are enough.

    Hamilton's method: floors first, then one more each in order of the largest remainder; ties go
    to the earlier. Where there are more weights than units, the earliest get one each.
    """
    if len(weights) >= total:
        return [1] * total + [0] * (len(weights) - total)
    whole = sum(weights) or len(weights)
    parts = weights if sum(weights) else [1] * len(weights)
    counts = [part * total // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(parts[i] * total % whole), i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    for index, count in enumerate(counts):
        if count == 0:
            counts[counts.index(max(counts))] -= 1
            counts[index] = 1
    return counts


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"


def _too_small(usable: int, smallest: int) -> str:
    return f"too little free memory: one layer needs {_gb(smallest)}, {_gb(usable)} can be used"


def _not_needed(nodes: int, layers: int) -> str:
    if nodes > layers:
        return f"more nodes ({nodes}) than layers ({layers})"
    return "its free memory does not hold the layers that would be left for it"


def _refusal(model_id: str, usable: dict[str, int], sizes: ModelSizes) -> str:
    shares = ", ".join(f"{node} can take {_gb(b)}" for node, b in sorted(usable.items()))
    missing = sizes.total - sum(usable.values())
    why = (
        f"{_gb(missing)} short"
        if missing > 0
        else f"no way to cut {len(sizes.layers)} layers to fit these nodes "
        f"(the largest layer needs {_gb(max(sizes.layers))})"
    )
    return (
        f"{model_id} needs {_gb(sizes.total)} and the cluster has too little free memory: {why}; "
        f"{shares}. Add a node, free memory, or choose a smaller model or quantization"
    )
