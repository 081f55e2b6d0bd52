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

__all__ = [
    "CheckResult",
    "Comparison",
    "Difference",
    "Profile",
    "Ranks",
    "Recording",
    "Summary",
    "__version__",
    "check",
    "compare",
    "diff",
    "errors",
    "load",
    "log_to",
    "profile",
    "ranks",
]


def __getattr__(name: str) -> object:
    """The public names, imported when first used, so that ``import ampmem`` costs nothing."""
    if name == "errors":
        return import_module("ampmem.errors")
    if name in __all__:
        module = "ampmem.integrations.training" if name == "log_to" else "ampmem.api"
        return getattr(import_module(module), name)
    raise AttributeError(f"module 'ampmem' has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """``%load_ext ampmem``: the magics ``%%ampmem`` and ``%ampmem``."""
    import_module("ampmem.integrations.notebook.extension").load(shell)


def unload_ipython_extension(shell: object) -> None:
    """``%unload_ext ampmem``."""
    import_module("ampmem.integrations.notebook.extension").unload(shell)


def __dir__() -> list[str]:
    """What there is, with the names that are not imported yet: for completion."""
    return sorted({*globals(), *__all__})
