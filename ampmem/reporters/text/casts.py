"""The cast ledger as tables."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.casts import Casts, CopyCount, ParameterCasts, StepCasts
from ampmem.analysis.summary import Summary
from ampmem.reporters.text.plain_text import ABSENT, shorten, table
from ampmem.units import format_bytes, format_count

PARAMETERS = 20
"""Parameters that are shown."""


def render_casts(summary: Summary) -> str:
    """The copies of each step, who holds them, and those of each parameter."""
    casts = summary.casts
    if not casts.copies:
        return "cast copies: none"
    return "\n\n".join([_caption(casts), _made(casts.steps), _held(casts.steps), _parameters(casts.by_parameter)])


def _caption(casts: Casts) -> str:
    return (
        f"cast copies: {format_count(casts.copies)} made, {format_bytes(casts.bytes)}; "
        f"{format_count(casts.cache_hits)} uses served by the cache; at most {format_bytes(casts.peak_bytes)} at once"
    )


def _made(steps: Sequence[StepCasts]) -> str:
    rows = [
        [
            str(step.index),
            phase,
            format_count(made.copies),
            format_bytes(made.bytes),
            format_count(made.cache_hits),
        ]
        for step in steps
        for phase, made in step.phases.items()
    ]
    return table(rows, ["step", "made in", "copies", "bytes", "cache hits"], ["right", "left"] + ["right"] * 3)


def _held(steps: Sequence[StepCasts]) -> str:
    rows = []
    for step in steps:
        held = step.after_forward
        holders = [ABSENT] * 4 if held is None else [_count(held.cache), _count(held.autograd), _count(held.both)]
        if held is not None:
            holders.append(_count(held.neither))
        rows.append([str(step.index), *holders, format_bytes(step.peak_bytes), _count(step.surviving)])
    headers = ["step", "held by the\ncache", "by\nautograd", "by\nboth", "by\nneither", "peak", "alive at\nits end"]
    text = table(rows, headers, ["right"] * len(headers))
    return f"who holds them at the end of forward\n\n{text}{_kinds(steps)}"


def _kinds(steps: Sequence[StepCasts]) -> str:
    """What the ledger knows of copies that are not simply a parameter's."""
    kinds = {
        "made again in backward (recomputation)": [step.recomputed for step in steps],
        "of views of parameters, which are never cached": [step.views for step in steps],
        "of what is no parameter, not counted above": [step.others for step in steps],
    }
    lines = []
    for words, counts in kinds.items():
        together = CopyCount(copies=sum(c.copies for c in counts), bytes=sum(c.bytes for c in counts))
        if together.copies:
            lines.append(f"\ncopies {words}: {_count(together)}")
    return "\n" + "".join(lines) if lines else ""


def _count(count: CopyCount) -> str:
    return f"{format_count(count.copies)}: {format_bytes(count.bytes)}" if count.copies else "0"


def _parameters(parameters: Sequence[ParameterCasts]) -> str:
    rows = [
        [
            shorten(item.name, 44),
            *map(format_count, (item.copies, item.cache_hits)),
            *map(format_count, (item.held_by_cache, item.held_by_autograd, item.held_by_both)),
            format_bytes(item.bytes),
        ]
        for item in parameters[:PARAMETERS]
    ]
    headers = ["parameter", "copies", "cache\nhits", "in cache\nonly", "autograd\nonly", "both", "bytes"]
    left_out = len(parameters) - len(rows)
    more = f"\n… and {format_count(left_out)} parameters with fewer bytes" if left_out else ""
    return table(rows, headers, ["left"] + ["right"] * 6) + more
