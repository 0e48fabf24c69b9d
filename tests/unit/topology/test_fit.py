"""Where a model fits, by its size."""

from exo.models.card import registry
from exo.topology.fit import Free, best, fit

GB = 10**9
FREE = Free(5 * GB, 9 * GB, 6 * GB)


def test_fit() -> None:
    assert fit(4 * GB, FREE) == ("here", 0)
    assert fit(5 * GB, FREE) == ("cluster", 0), "a model takes more than its weights"
    assert fit(10 * GB, FREE) == ("no", int(2.5 * GB))
    assert fit(0, FREE) == (None, 0)


def test_a_mixture_may_have_experts_on_disk_where_the_engine_can() -> None:
    assert fit(10 * GB, FREE, 9 * GB) == ("part", 0)
    assert fit(10 * GB, FREE, 4 * GB) == ("no", int(2.5 * GB)), "too much else"
    assert fit(10 * GB, Free(5 * GB, 9 * GB, 0), 9 * GB)[0] == "no"
    assert fit(7 * GB, FREE, 6 * GB) == ("cluster", 0)


def test_the_registry_says_how_large_its_models_are() -> None:
    cards = registry().values()
    assert all(card.size_bytes > 10**7 for card in cards)
    assert all(card.expert_bytes < card.size_bytes for card in cards)
    mixtures = {card.model_id for card in cards if card.expert_bytes}
    named = {one for one in registry() if "-a3b" in one or "-a10b" in one or "-a22b" in one}
    assert named < mixtures


def test_the_best_of_several_sizes_fits_here_or_else_the_cluster() -> None:
    sizes = {"large": 30 * GB, "middle": 12 * GB, "small": 6 * GB}
    assert best(sizes, Free(8 * GB, 16 * GB, 0)) == "small"
    assert best(sizes, Free(2 * GB, 16 * GB, 0)) == "middle"
    assert best(sizes, Free(2 * GB, 4 * GB, 0)) is None
    assert best({}, Free(8 * GB, 8 * GB, 0)) is None
