"""The categories of memory, in stacking order; an allocation has exactly one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias


class Category(StrEnum):
    """The category of an allocation; the values are the keys of the summary."""

    PARAMETERS = "parameters"
    UNTRAINED = "untrained"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    MASTER_COPIES = "master_copies"
    CAST_COPIES = "cast_copies"
    ACTIVATIONS = "activations"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"
    COMMUNICATION = "communication"
    KEPT_PREDICTIONS = "kept_predictions"
    OTHER = "other"


CATEGORIES: tuple[Category, ...] = tuple(Category)
"""Category codes are indices into this tuple."""

CODES: Mapping[Category, int] = {category: code for code, category in enumerate(CATEGORIES)}

PRECISION_COPIES = (Category.MASTER_COPIES, Category.CAST_COPIES)
"""The copies of parameters in another precision, which users ask about as one group."""

Breakdown: TypeAlias = Mapping[Category, int]
"""Live bytes of every category at one instant."""
