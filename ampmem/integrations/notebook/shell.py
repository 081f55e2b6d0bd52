"""The parts of IPython that are used: documented names only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ampmem.output import Bundle


class Events(Protocol):
    """``shell.events``."""

    def register(self, event: str, function: Callable[..., Any]) -> None:
        """Call ``function`` at every ``event`` from now on."""

    def unregister(self, event: str, function: Callable[..., Any]) -> None:
        """Stop calling ``function`` at ``event``."""


class Magics(Protocol):
    """``shell.magics_manager``; :attr:`magics` has the functions of each kind by name."""

    magics: dict[str, dict[str, Any]]


class Shell(Protocol):
    """An ``InteractiveShell`` of a kernel or a terminal."""

    user_ns: dict[str, Any]
    events: Events
    magics_manager: Magics
    input_transformers_cleanup: list[Callable[[list[str]], list[str]]]

    def register_magic_function(self, function: Callable[..., Any], magic_kind: str, magic_name: str) -> None:
        """Register ``function`` as a magic."""

    def transform_cell(self, raw_cell: str) -> str:
        """The Python code for a cell with magics."""


def shell_error(message: str) -> Exception:
    """An error that IPython shows as one line, without a traceback."""
    from IPython.core.error import UsageError

    return UsageError(message)


def display(bundle: Bundle) -> None:
    """Show ``bundle`` below the running cell."""
    from IPython.display import display as show

    show(bundle, raw=True)  # type: ignore[no-untyped-call]
