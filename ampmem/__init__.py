"""ampmem: where did my GPU memory go, and why did AMP not halve it?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ampmem.version import __version__

if TYPE_CHECKING:
    from ampmem import errors
    from ampmem.api import (
        CheckResult,
        Comparison,
        Difference,
        Profile,
        Ranks,
        Recording,
        Summary,
        check,
        compare,
        diff,
        load,
        profile,
        ranks,
    )
    from ampmem.integrations.training import log_to
    from ampmem.watched_block import Watch, WatchedSummary, watch

__all__ = [
    "CheckResult",
    "Comparison",
    "Difference",
    "Profile",
    "Ranks",
    "Recording",
    "Summary",
    "Watch",
    "WatchedSummary",
    "__version__",
    "check",
    "compare",
    "diff",
    "errors",
    "load",
    "log_to",
    "profile",
    "ranks",
    "watch",
]


_ELSEWHERE = {
    "log_to": "ampmem.integrations.training",
    **dict.fromkeys(("Watch", "WatchedSummary", "watch"), "ampmem.watched_block"),
}
"""The module of each public name that is not in ``ampmem.api``."""


def __getattr__(name: str) -> object:
    """A public name, imported when first used, so that ``import ampmem`` costs nothing."""
    if name == "errors":
        return import_module("ampmem.errors")
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "ampmem.api")), name)
    raise AttributeError(f"module 'ampmem' has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """Add the magics ``%%ampmem`` and ``%ampmem`` to the shell (``%load_ext ampmem``)."""
    import_module("ampmem.integrations.notebook.extension").load_extension(shell)


def unload_ipython_extension(shell: object) -> None:
    """Remove the magics from the shell (``%unload_ext ampmem``)."""
    import_module("ampmem.integrations.notebook.extension").unload_extension(shell)


def __dir__() -> list[str]:
    """All names, including public ones that are not imported yet, for completion."""
    return sorted({*globals(), *__all__})
