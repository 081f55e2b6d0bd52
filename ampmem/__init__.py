"""ampmem: where did my GPU memory go, and why did AMP not halve it?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ampmem.version import __version__

if TYPE_CHECKING:
    from ampmem.api import Comparison, Profile, Ranks, Recording, Summary, compare, load, profile, ranks

__all__ = [
    "Comparison",
    "Profile",
    "Ranks",
    "Recording",
    "Summary",
    "__version__",
    "compare",
    "load",
    "profile",
    "ranks",
]


def __getattr__(name: str) -> object:
    """The public names, imported when first used, so that ``import ampmem`` costs nothing."""
    if name in __all__:
        return getattr(import_module("ampmem.api"), name)
    raise AttributeError(f"module 'ampmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is, with the names that are not imported yet: for completion."""
    return sorted({*globals(), *__all__})
