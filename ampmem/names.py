"""Texts of a recording that those who read it know by their form."""

from __future__ import annotations

from dataclasses import dataclass

_OF = " of "


@dataclass(frozen=True, slots=True, kw_only=True)
class StateName:
    """What a tensor of optimizer state is called: the optimizer's key, and its parameter, empty where it has none."""

    state: str
    parameter: str

    def __str__(self) -> str:
        """As recordings have it: ``exp_avg of blocks.0.weight``."""
        return f"{self.state}{_OF}{self.parameter}" if self.parameter else self.state

    @classmethod
    def read(cls, text: str) -> StateName:
        """The name that a recording has as ``text``."""
        before, of, after = text.rpartition(_OF)
        return cls(state=before, parameter=after) if of else cls(state=text, parameter="")


def not_modelled(what: str) -> str:
    """The note of a simulated run that ``what`` is in none of its numbers."""
    return f"not modelled: {what}"


UNTIMED = "the snapshot has no times: events are a microsecond apart"
"""The note of a recording in which no duration means anything."""

_WARNING = "warning: "


def warning(what: str) -> str:
    """The note that ``what`` makes the numbers doubtful: it is shown before them."""
    return f"{_WARNING}{what}"


def is_warning(note: str) -> bool:
    """Whether ``note`` is one of those."""
    return note.startswith(_WARNING)


def said_in(warning: str) -> str:
    """What a note that is a warning says."""
    return warning.removeprefix(_WARNING)
