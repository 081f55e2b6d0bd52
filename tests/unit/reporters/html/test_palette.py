"""Colours that are told apart, by people with and without a colour-vision deficiency."""

import numpy as np
import pytest
from support.colours import difference, least_difference

from ampmem.analysis.timeline.categories import PRECISION_COPIES, Category
from ampmem.reporters.html.palette import FILLS, LAYERS

LEAST = 12.7


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (58, 24, 15), 19.4535),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_is_that_of_its_published_test_data(
    one: tuple[float, ...], two: tuple[float, ...], expected: float
) -> None:
    assert float(difference(np.array(one), np.array(two))) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_two_colours_look_alike_in_any_vision(theme: str) -> None:
    least, where = least_difference(sorted({getattr(fill, theme) for fill in (*FILLS.values(), *LAYERS.values())}))
    assert least >= LEAST, where


def test_what_shares_a_colour_differs_by_hatching() -> None:
    fills = [*FILLS.values(), *LAYERS.values()]
    for theme in ("light", "dark"):
        assert len({(getattr(fill, theme), fill.pattern) for fill in fills}) == len(fills)
    for one, two in ((Category.PARAMETERS, Category.UNTRAINED), PRECISION_COPIES):
        assert FILLS[one].light == FILLS[two].light, "what is of one kind has one colour"
