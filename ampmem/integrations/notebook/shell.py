"""What is used of IPython, and nothing else of it: its documented names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ampmem.output import Bundle


class Events(Protocol):
    """``shell.events``."""

    def register(self, event: str, function: Callable[..., Any]) -> None:
        """From now on call ``function`` at every ``event``."""

    def unregister(self, event: str, function: Callable[..., Any]) -> None:
        """No longer."""


class Magics(Protocol):
    """``shell.magics_manager``; :attr:`magics` has the functions of each kind by name."""

    magics: dict[str, dict[str, Any]]


class Shell(Protocol):
    """An ``InteractiveShell``: a kernel's, or that of a terminal."""

    user_ns: dict[str, Any]
    events: Events
    magics_manager: Magics
    input_transformers_cleanup: list[Callable[[list[str]], list[str]]]

    def register_magic_function(self, function: Callable[..., Any], magic_kind: str, magic_name: str) -> None:
        """``function`` is a magic from now on."""

    def transform_cell(self, raw_cell: str) -> str:
        """The Python that a cell with magics stands for."""


def shell_error(message: str) -> Exception:
    """What IPython shows as one line, without a traceback."""
    from IPython.core.error import UsageError

    return UsageError(message)


def display(bundle: Bundle) -> None:
    """Show ``bundle`` under the cell that runs."""
    from IPython.display import display as show

    show(bundle, raw=True)  # type: ignore[no-untyped-call]
