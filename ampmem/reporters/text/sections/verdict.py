"""The verdict, as the first lines of a text."""

from __future__ import annotations

from ampmem.analysis.answer import Verdict
from ampmem.reporters.text.answer import Wording, wording
from ampmem.reporters.text.common.layout import Layout
from ampmem.reporters.text.common.plain_text import wrapped


def verdict_lines(verdict: Verdict, layout: Layout) -> list[str]:
    """How much and why, which stands out; then what else there is to say."""
    return wording_lines(wording(verdict), layout)


def wording_lines(said: Wording, layout: Layout) -> list[str]:
    """The same of what is in words already."""
    first = f"{said.headline}: {said.why}." if said.why else f"{said.headline}."
    lines = list(map(layout.strong, wrapped(first, layout.width, indent="")))
    return [*lines, *(wrapped(" ".join(said.more), layout.width, indent="") if said.more else [])]
