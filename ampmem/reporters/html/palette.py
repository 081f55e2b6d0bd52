"""The names and colours of the categories, distinguishable under the three common colour-vision deficiencies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from ampmem.analysis.jsonable import like
from ampmem.analysis.timeline.categories import CATEGORIES, Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """The fill of a category's area; ``pattern`` is a plotly fill pattern, empty for a plain fill."""

    light: str
    dark: str
    pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryView:
    """One category, for the page."""

    key: str
    label: str
    light: str
    dark: str
    pattern: str


_WORKSPACE = {"light": "#7a2205", "dark": "#9c4627"}
_PRECISION_COPIES = {"light": "#66d5ff", "dark": "#8ddefe"}

# Categories of one hue differ by their hatching.
_OWN = {
    Category.PARAMETERS: Fill(light="#3958d1", dark="#5074e9"),
    Category.UNTRAINED: Fill(light="#3958d1", dark="#5074e9", pattern="/"),
    Category.GRADIENTS: Fill(light="#0d6d46", dark="#2f835f"),
    Category.OPTIMIZER_STATE: Fill(light="#532d74", dark="#884493"),
    Category.MASTER_COPIES: Fill(**_PRECISION_COPIES),
    Category.CAST_COPIES: Fill(**_PRECISION_COPIES, pattern="/"),
    Category.ACTIVATIONS: Fill(light="#ec6f00", dark="#ee7105"),
    Category.BUFFERS: Fill(light="#129684", dark="#19b19c"),
    Category.INPUTS: Fill(light="#d093bb", dark="#fba0be"),
    Category.TEMPORARIES: Fill(light="#f2e67e", dark="#e5dc83"),
    Category.WORKSPACE: Fill(**_WORKSPACE),
    Category.COMMUNICATION: Fill(light="#8787ff", dark="#a596d2"),
    Category.OTHER: Fill(light="#96b487", dark="#87a569"),
}
_HATCHINGS = ("x", "\\", "-", "|", "+")
_WITHOUT = [category for category in CATEGORIES if category not in _OWN]

FILLS: dict[Category, Fill] = _OWN | {
    category: Fill(**_WORKSPACE, pattern=pattern)
    for category, pattern in zip(_WITHOUT, cycle(_HATCHINGS), strict=False)
}
"""The fill of each category; a category that is not in ``_OWN`` is hatched in the hue of the workspace."""

LAYERS = {
    "rounding": Fill(light="#5a5e65", dark="#70757c", pattern="x"),
    "cached": Fill(light="#d7d7d8", dark="#44474b", pattern="/"),
}
"""The allocator's layers above the tensors, from the bottom of the stack to its top."""


def layer_views() -> tuple[CategoryView, ...]:
    """The allocator's layers above the categories, in stacking order."""
    return tuple(like(CategoryView, fill, key=key, label=key.capitalize()) for key, fill in LAYERS.items())


def category_views() -> tuple[CategoryView, ...]:
    """All categories in stacking order."""
    return tuple(like(CategoryView, FILLS[each], key=each.value, label=label(each)) for each in CATEGORIES)


def label(category: Category) -> str:
    """``Optimizer state`` for ``optimizer_state``."""
    return category.value.replace("_", " ").capitalize()
