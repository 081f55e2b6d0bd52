"""Findings as sentences: how large the matter is, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.findings.base import Finding
from ampmem.reporters.text.common.layout import Layout
from ampmem.reporters.text.common.plain_text import shorten, wrapped

_INDENT = " " * 9
_LABEL = 20


_SAID = "out-of-memory"
"""The finding that has a section of its own."""


def render_findings(
    findings: Sequence[Finding], layout: Layout, *, evidence: bool = False, title: str = "findings"
) -> str:
    """All of ``findings`` below ``title``, with what shows each where that is asked for; empty when there are none."""
    return render_labelled([(finding, ()) for finding in findings], layout, evidence=evidence, title=title)


def render_labelled(
    found: Sequence[tuple[Finding, Sequence[str]]], layout: Layout, *, evidence: bool = False, title: str = "findings"
) -> str:
    """Findings, each with the labels of the recordings that it is about, where there are several."""
    texts = [
        "\n".join(_finding(finding, labels, layout, evidence=evidence))
        for finding, labels in found
        if finding.code != _SAID
    ]
    if not texts:
        return ""
    return "\n".join([layout.strong(title), "\n\n".join(texts)])


def _finding(finding: Finding, labels: Sequence[str], layout: Layout, *, evidence: bool) -> list[str]:
    of = f" ({', '.join(shorten(label, _LABEL) for label in labels)})" if labels else ""
    said = f"{finding.severity:<{len(_INDENT)}}{finding.code}{of}: {finding.message}"
    first, *others = wrapped(said, layout.width, indent=_INDENT)
    lines = [first.replace(finding.severity, _styled(finding, layout), 1), *others]
    texts = [change_of(finding)]
    if evidence:
        texts = [*(f"- {text}" for text in finding.evidence), *texts]
    room = layout.width - len(_INDENT)
    return [*lines, *(f"{_INDENT}{line}" for text in texts for line in wrapped(text, room))]


def change_of(finding: Finding) -> str:
    """What to change and what that takes off; where nothing was computed, only a hint."""
    return f"to change, for {finding.saves}: {finding.change}" if finding.saves else f"hint: {finding.change}"


def _styled(finding: Finding, layout: Layout) -> str:
    match finding.severity:
        case "warning":
            return layout.alarm(finding.severity)
        case "advice":
            return layout.advice(finding.severity)
        case _:
            return layout.strong(finding.severity)
