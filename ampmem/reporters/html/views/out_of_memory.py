"""What a run died of that ran out of memory, for the page."""

from __future__ import annotations

from collections.abc import Iterator

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.findings.base import Remedy, remedies
from ampmem.analysis.ops import user_frames
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category
from ampmem.reporters.html.data import CompositionView, FactView, LargeTensorView, OutOfMemoryView, RemedyView, SizeRow
from ampmem.reporters.text.answer import capital
from ampmem.reporters.text.common.shortage import asked, asked_by, device, free_blocks, lacking, to_come
from ampmem.reporters.text.out_of_memory import MADE_LATER, being_moved, headline, largest_rows, next_lines
from ampmem.units import format_bytes

LARGEST_ROWS = 8
FRAMES = 12
"""How many frames of the script are shown, the innermost ones."""


def out_of_memory_view(oom: FailedRequest | None, summary: Summary, analysis: Analysis) -> OutOfMemoryView | None:
    """The words and numbers of ``ampmem show``, with what the findings say to change; ``None`` if no request failed."""
    if oom is None:
        return None
    lines = next_lines(oom)
    rows = [SizeRow(key=str(category), bytes=size) for category, size in oom.alive.items() if size]
    return OutOfMemoryView(
        headline=headline(oom),
        position=analysis.timeline.position(analysis.recording.ooms[-1].time_ns),
        later=oom.later,
        available=_available(oom),
        used=oom.reserved if oom.by_the_limit or oom.device_total is None else oom.device_total - oom.device_free,
        segment=oom.segment,
        block=f"{asked(oom)}" + (f": {format_bytes(oom.lacking)} lacking" if oom.lacking else ""),
        largest=tuple(
            LargeTensorView(bytes=size, count=count, kind=kind, category=category, name=name)
            for size, count, kind, category, name in largest_rows(oom.largest, LARGEST_ROWS)
        ),
        commands=oom.next_commands,
        hint="; ".join(line for line in lines if line not in oom.next_commands),
        facts=tuple(_facts(oom, being_moved(summary.parameters, oom))),
        frames=tuple(user_frames(oom.stack)[-FRAMES:]),
        remedies=tuple(map(_remedy, remedies(oom, summary.findings))),
        alive=CompositionView(
            rows=tuple(sorted(rows, key=lambda row: -row.bytes)),
            temporaries_by_phase=oom.temporaries_by_phase,
            communication_by_part={},
            total=sum(oom.alive.values()),
        ),
    )


def _available(oom: FailedRequest) -> int | None:
    if not oom.recorded:
        return None
    return oom.allowed if oom.by_the_limit else oom.device_total


def _remedy(remedy: Remedy) -> RemedyView:
    finding = remedy.finding
    return RemedyView(
        change=remedy.change,
        why=capital(remedy.why),
        bytes=remedy.bytes,
        evidence=() if finding is None else finding.evidence,
        code="" if finding is None else finding.code,
        jump="" if finding is None else finding.section,
    )


def _facts(oom: FailedRequest, moved: str) -> Iterator[FactView]:
    yield FactView(label="Asked", text=asked(oom))
    if oom.lacking:
        yield FactView(label="Lacking", text=lacking(oom))
    if by := asked_by(oom):
        yield FactView(label="By", text=by)
    yield FactView(label="Device", text=device(oom))
    yield FactView(label="Cached", text=f"{format_bytes(oom.cached)}: {oom.explanation}")
    yield FactView(label="Largest free blocks", text=free_blocks(oom))
    if moved:
        yield FactView(label="Parameters", text=moved)
    if oom.later and oom.alive[Category.OTHER]:
        yield FactView(label="Other", text=MADE_LATER)
    if coming := to_come(oom):
        yield FactView(label="Still to come", text=coming)
    if oom.residual_bytes:
        text = f"{format_bytes(oom.residual_bytes)} between the categories and the allocator"
        yield FactView(label="Residual", text=text)
