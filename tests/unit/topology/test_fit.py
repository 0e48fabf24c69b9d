"""Where a model fits, by its size."""

from exo.models.card import registry
from exo.topology.fit import fit

GB = 10**9


def test_fit() -> None:
    assert fit(4 * GB, 5 * GB, 9 * GB) == ("here", 0)
    assert fit(5 * GB, 5 * GB, 9 * GB) == ("cluster", 0), "a model takes more than its weights"
    assert fit(10 * GB, 5 * GB, 9 * GB) == ("no", int(2.5 * GB))
    assert fit(0, 5 * GB, 9 * GB) == (None, 0)


def test_the_registry_says_how_large_its_models_are() -> None:
    assert all(card.size_bytes > 10**7 for card in registry().values())
