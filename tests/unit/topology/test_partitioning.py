import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo.errors import ModelTooLarge
from exo.topology.capabilities import GB
from exo.topology.partitioning import (
    ACTIVATION_RESERVE,
    ModelSizes,
    Partition,
    RingMemoryWeightedPartitioningStrategy,
    largest_remainder,
)

UNKNOWN = ModelSizes((0,) * 32)


def place(memory: dict[str, int], sizes: ModelSizes) -> Partition:
    return RingMemoryWeightedPartitioningStrategy().partition("m", memory, sizes)


def counts(partition: Partition) -> list[int]:
    return [member.shard.layer_count for member in partition.members]


@given(st.lists(st.integers(1, 512), min_size=1, max_size=64), st.integers(1, 200))
def test_every_layer_exactly_once_whatever_the_memories(memories: list[int], n: int) -> None:
    memory = {f"n{i:02}": m * GB for i, m in enumerate(memories)}
    partition = place(memory, ModelSizes((0,) * n))
    covered = [
        layer for m in partition.members for layer in range(m.shard.start_layer, m.shard.end_layer)
    ]
    assert covered == list(range(n))
    assert len(partition.members) == min(n, len(memories))
    assert len(partition.members) + len(partition.left_out) == len(memories)


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=16),
    st.lists(st.integers(1, 4000), min_size=1, max_size=48),
    st.integers(0, 4000),
    st.integers(0, 4000),
)
def test_no_node_holds_more_than_it_can(
    memories: list[int], layers: list[int], first: int, last: int
) -> None:
    sizes = ModelSizes(tuple(m * 10**6 for m in layers), first * 10**6, last * 10**6)
    memory = {f"n{i:02}": m * GB for i, m in enumerate(memories)}
    try:
        partition = place(memory, sizes)
    except ModelTooLarge as error:
        assert "GB" in error.message and "n00" in error.message
        return
    for member in partition.members:
        shard = member.shard
        held = sum(sizes.layers[shard.start_layer : shard.end_layer])
        held += sizes.first * shard.is_first + sizes.last * shard.is_last
        assert held <= memory[member.node_id] * (1 - ACTIVATION_RESERVE)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64), st.integers(1, 300))
def test_largest_remainder_gives_everything_and_is_within_one_of_the_share(
    weights: list[int], total: int
) -> None:
    given_out = largest_remainder(weights, total)
    assert sum(given_out) == total
    assert min(given_out) >= (1 if len(weights) <= total else 0)
    if len(weights) <= total and min(weights) * total >= sum(weights) > 0:
        for count, weight in zip(given_out, weights, strict=True):
            assert abs(count - weight * total / sum(weights)) < 1


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_order_does_not_depend_on_who_was_heard_first(order: list[str]) -> None:
    memory = {"a": 8 * GB, "b": 16 * GB, "c": 8 * GB, "d": 4 * GB}
    partition = place({node: memory[node] for node in order}, UNKNOWN)
    assert [m.node_id for m in partition.members] == ["b", "a", "c", "d"]


@pytest.mark.parametrize(
    ("memories", "n_layers", "expected"),
    [
        ([100, 1, 1], 16, [14, 1, 1]),  # old exo: three partitions, two shards, an IndexError
        ([16, 16], 32, [16, 16]),
        ([24, 8], 32, [24, 8]),
        ([10, 10, 10], 32, [11, 11, 10]),
        ([1], 7, [7]),
    ],
)
def test_shares_follow_memory(memories: list[int], n_layers: int, expected: list[int]) -> None:
    memory = {f"n{i}": m * GB for i, m in enumerate(memories)}
    assert counts(place(memory, ModelSizes((0,) * n_layers))) == expected


def test_a_node_too_small_for_one_layer_is_left_out_and_said_so() -> None:
    partition = place({"big": 20 * GB, "tiny": GB // 2}, ModelSizes((GB,) * 16))
    assert [m.node_id for m in partition.members] == ["big"]
    assert partition.left_out[0][0] == "tiny"
    assert "one layer needs 1.00 GB" in partition.left_out[0][1]


def test_a_share_that_does_not_fit_goes_to_who_has_room() -> None:
    # By memory the small node would get 2 layers, which with the head are more than it holds.
    sizes = ModelSizes((GB,) * 10, last=GB)
    partition = place({"large": 20 * GB, "small": int(2.5 * GB)}, sizes)
    assert counts(partition) == [9, 1]


def test_a_model_too_large_is_refused_with_shares_and_shortfall() -> None:
    with pytest.raises(ModelTooLarge) as refused:
        place({"a": 10 * GB, "b": 5 * GB}, ModelSizes((GB,) * 40, GB, GB))
    assert "28.50 GB short" in refused.value.message
    assert "a can take 9.00 GB" in refused.value.message
    assert "b can take 4.50 GB" in refused.value.message


def test_cuts_are_kept_to() -> None:
    sizes = ModelSizes((GB,) * 8, cuts=frozenset({2}))
    assert counts(place({"a": 20 * GB, "b": 20 * GB}, sizes)) in ([2, 6], [8])
    uncuttable = ModelSizes((GB,) * 8, cuts=frozenset())
    assert counts(place({"a": 20 * GB, "b": 20 * GB}, uncuttable)) == [8]
    with pytest.raises(ModelTooLarge):
        place({"a": 5 * GB, "b": 5 * GB}, uncuttable)


def test_an_embedding_that_is_the_head_is_held_once() -> None:
    tied = ModelSizes((GB,) * 8, first=4 * GB, last=4 * GB, shared=4 * GB)
    assert len(place({"a": 14 * GB}, tied).members) == 1
    with pytest.raises(ModelTooLarge):
        place({"a": 14 * GB}, ModelSizes((GB,) * 8, first=4 * GB, last=4 * GB))
