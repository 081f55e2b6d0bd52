"""What a run died of that ran out of memory, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.allocator.out_of_memory import FailedRequest
from ampmem.analysis.findings import Finding
from ampmem.analysis.findings.remedies import Remedy, remedies
from ampmem.analysis.frames import user_frames
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.text.common.layout import PLAIN, Layout
from ampmem.reporters.text.common.plain_text import wrapped
from ampmem.reporters.text.sections.peak import render_categories
from ampmem.units import format_bytes

FRAMES = 5
"""How many frames of the script are shown, the innermost ones."""

_KEY = 12


def render_out_of_memory(summary: Summary, layout: Layout = PLAIN) -> str:
    """Who asked for how much, what there was, and what to change; empty when no request failed."""
    oom = summary.out_of_memory
    if oom is None:
        return ""
    lines = list(map(layout.alarm, wrapped(headline(oom), layout.width)))
    for key, texts in _rows(oom, summary.findings):
        shown = [line for text in texts for line in wrapped(text, layout.width - _KEY)]
        lines += [f"{key if i == 0 else '':<{_KEY}}{line}" for i, line in enumerate(shown)]
    parts = {Category.TEMPORARIES: {f"in {phase}": size for phase, size in oom.temporaries_by_phase.items()}}
    alive = render_categories(oom.alive, parts, summary.parameters.known_count, layout)
    return "\n".join([*lines, "", layout.strong("alive when the request failed"), "", alive])


def headline(oom: FailedRequest) -> str:
    """Where memory ran out, and whether the run ended with it."""
    end = "the run ended here" if oom.ended_the_run else "the script went on"
    others = f" ({oom.failures} requests failed; this is the last)" if oom.failures > 1 else ""
    return f"out of memory in {oom.where}: {end}{others}"


def in_short(oom: FailedRequest) -> str:
    """Where, who asked for how much, and what there was: one sentence that a verb comes before."""
    by, frames = asked_by(oom), user_frames(oom.stack)
    who = "".join([f" by {by}" if by else "", f" at {frames[-1]}" if frames else ""])
    end = "" if oom.ended_the_run else "; the script went on"
    return (
        f"{oom.where}: {asked(oom)} was asked for{who}; {format_bytes(sum(oom.alive.values()))} in tensors, "
        f"{format_bytes(oom.cached)} cached, {format_bytes(oom.device_free)} free: {oom.explanation}{end}"
    )


def asked(oom: FailedRequest) -> str:
    """How much was asked for."""
    wanted = f"a block of {format_bytes(oom.asked)}"
    return wanted if oom.asked == oom.segment else f"{wanted} in a new segment of {format_bytes(oom.segment)}"


def asked_by(oom: FailedRequest) -> str:
    """The op and the module; empty where neither is known."""
    if not oom.op and not oom.module:
        return ""
    return " in ".join(part for part in (oom.op or "an op that is not known", oom.module) if part)


def device(oom: FailedRequest) -> str:
    """Who had the device's memory."""
    others = "" if oom.outside is None else f", {format_bytes(oom.outside)} outside of its allocator"
    return (
        f"{format_bytes(oom.device_free)} of {format_bytes(oom.device_total)} were free; "
        f"{format_bytes(oom.reserved)} were reserved by this process{others}"
    )


def free_blocks(oom: FailedRequest) -> str:
    """The largest free blocks in what was cached."""
    free = oom.largest_free
    return (
        f"{format_bytes(free.usable)} that it could use, {format_bytes(free.other_streams)} of other streams, "
        f"{format_bytes(free.other_pools)} of other pools"
    )


def _rows(oom: FailedRequest, findings: Sequence[Finding]) -> list[tuple[str, Sequence[str]]]:
    rows: list[tuple[str, Sequence[str]]] = [
        ("asked", [asked(oom)]),
        ("by", [text for text in (asked_by(oom),) if text]),
        ("at", user_frames(oom.stack)[-FRAMES:]),
        ("device", [device(oom)]),
        ("cached", [f"{format_bytes(oom.cached)}: {oom.explanation}"]),
        ("free blocks", [f"largest: {free_blocks(oom)}"]),
        ("to change", [_change(remedy) for remedy in remedies(oom, findings)]),
    ]
    if oom.residual_bytes:
        rows.append(("residual", [f"{format_bytes(oom.residual_bytes)} between the categories and the allocator"]))
    return rows


def _change(remedy: Remedy) -> str:
    return f"- {remedy.change}" if remedy.bytes is None else f"- {format_bytes(remedy.bytes)}: {remedy.change}"
