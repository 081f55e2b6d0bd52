"""What reporters share: what they are given, and what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ampmem.analysis.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One recording, ready to be shown. ``title`` is the script and its arguments, ``file`` where the recording is."""

    title: str
    summary: Summary
    notes: tuple[str, ...]
    file: str = ""


class Reporter(Protocol):
    """Turns reports into text."""

    def render(self, reports: Sequence[Report]) -> str:
        """All of ``reports`` as one text, without a newline at its end."""
        ...
