"""Tools' calls: what of their arguments is read."""

import pytest

from exo.models.markup.tools import arguments_of


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"x": 1}', {"x": 1}),
        ('{"x": ', {}),
        ("[1]", {}),
        ('{"x": ' * 100_000, {}),  # as a small model goes on
    ],
)
def test_a_call_that_is_cut_has_no_arguments(text: str, found: dict[str, object]) -> None:
    assert arguments_of(text) == found
