"""Findings as sentences, each with what shows it and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.findings import Finding
from ampmem.reporters.text.plain_text import wrapped

_INDENT = " " * 9


def render_findings(findings: Sequence[Finding]) -> str:
    """All of ``findings``; empty when there are none."""
    if not findings:
        return ""
    lines = ["findings"]
    for finding in findings:
        lines += ["", *wrapped(f"{finding.severity:<9}{finding.code}: {finding.message}", indent=_INDENT)]
        lines += [f"{_INDENT}{line}" for text in finding.evidence for line in wrapped(f"- {text}", width=90)]
        lines += [f"{_INDENT}{line}" for line in wrapped(f"to change: {finding.change}", width=90)]
    return "\n".join(lines)
