"""What a reporter is given and what it is, and the one that renders summaries as JSON."""

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


class JsonReporter:
    """One report as an object, several as an array of objects."""

    def render(self, reports: Sequence[Report]) -> str:
        """JSON that :func:`~ampmem.analysis.summary.summary_schema` describes, with warnings and notes."""
        texts = [report.summary.to_json() for report in reports]
        return texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]"
