"""What must be said before any number of a run: that its sums are wrong."""

from __future__ import annotations

from ampmem.analysis.summary import Summary
from ampmem.reporters.text.plain_text import wrapped

_INDENT = " " * 9


def warnings(summary: Summary) -> tuple[str, ...]:
    """Why the numbers of this run prove nothing, a sentence each; empty where they add up."""
    found = []
    breach = summary.conservation.breach
    if breach is not None:
        found.append(
            f"{breach}. Some of the memory below has a wrong name, or none, and the static model proves nothing."
        )
    if summary.static_problem not in (None, breach):
        found.append(f"{summary.static_problem}.")
    return tuple(found)


def render_warnings(summary: Summary, of: str = "") -> str:
    """The :func:`warnings` as lines; ``of`` is which of several runs it is. Empty where there are none."""
    label = f"{of}: " if of else ""
    return "\n".join(line for text in warnings(summary) for line in wrapped(f"WARNING  {label}{text}", indent=_INDENT))
