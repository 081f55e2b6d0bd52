"""Summaries as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.reporters.base import Report


class JsonReporter:
    """One report as an object, several as an array of objects."""

    def render(self, reports: Sequence[Report]) -> str:
        """JSON that :func:`~ampmem.analysis.summary.summary_schema` describes, with warnings and notes."""
        texts = [report.summary.to_json() for report in reports]
        return texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]"
