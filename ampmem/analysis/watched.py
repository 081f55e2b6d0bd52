"""The summary of a watched run: its peak, its growth, how it ended, and commands that tell more."""

from __future__ import annotations

import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.jsonable import NOT_IN_JSON, Json, like, schema_of, text_of
from ampmem.analysis.out_of_memory import FailedRequest, batch_varied, gpu_called
from ampmem.analysis.summary import summary_of
from ampmem.analysis.timeline.categories import CODES, Category
from ampmem.errors import AmpmemError, NothingRecorded, UsageError
from ampmem.growth import Growth, growth_of
from ampmem.recording import read
from ampmem.recording.bounds import NAME
from ampmem.recording.watched import (
    EVERYTHING_ELSE,
    IDLE_PARAMETERS,
    Ending,
    Full,
    Grown,
    HeldMemory,
    Row,
    WatchedHeader,
    WatchedRun,
    Why,
)
from ampmem.recording.watched_file import extract

FORMAT = "ampmem.watch/1"
_USUAL = 200
"""The number of steps before the end that count as usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPart:
    """A full recording in a watched run: the bytes of each category at its peak, and its findings about growth."""

    number: int
    why: Why
    first: int
    last: int
    peak: int | None
    categories: dict[str, int]
    lines: dict[str, int]
    """Bytes at the peak by the script's line (``FILE:LINE``) that allocated them; other bytes have no line."""
    growth: tuple[str, ...] = ()
    ended_by: FailedRequest | None = None
    """The failed request that ended the run during this recording."""
    unreadable: str = ""
    """Why the recording cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBefore:
    """The bytes of one category or line when memory ran out, and at the peak of the last full recording.

    ``count`` is the number of blocks; 0 if unknown.
    """

    what: str
    then: int
    before: int | None
    count: int
    line: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """How memory ran out, compared with the steps before; sizes in bytes.

    ``usual_batch`` is the most frequent batch of the steps before, and ``usual_peak`` the median of their peaks.
    """

    step: int
    phase: str
    asked: int | None
    free: int | None
    total: int | None
    reserved: int | None
    line: str
    batch: str
    usual_batch: str
    usual_peak: int | None
    held: tuple[HeldBefore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSummary:
    """The summary of a watched run; sizes in bytes. ``steps`` counts all steps, ``rows`` those whose row was kept."""

    format: str
    file: str
    run: WatchedHeader
    running: bool
    """Whether the run is still writing."""
    steps: int
    rows: int
    highest: Row | None
    """The step with the highest peak; ``None`` before the first."""
    last: Row | None
    """The last step; ``None`` before the first."""
    steps_per_second: float | None
    """Steps per second, over the last 20 steps; ``None`` with fewer than two."""
    usual_batch: str = field(metadata=NOT_IN_JSON)
    """The most frequent batch of the last steps; empty if unknown."""
    growth: Growth | None
    """The growth of the memory alive at the end of each step; ``None`` without evidence of growth."""
    grown: tuple[Grown, ...]
    """The holders of the growth, as looked for once growth was seen."""
    full: tuple[FullPart, ...]
    """The full recordings that were kept, with what they say of the peak."""
    ending: Ending | None
    """How the run ended; ``None`` while it runs and if it was killed."""
    shortage: Shortage | None
    """How memory ran out; ``None`` if it did not."""
    notes: tuple[str, ...]
    commands: tuple[str, ...]
    """Commands that tell more."""

    def to_json(self) -> str:
        """The summary as JSON text, as ``ampmem show --json`` prints it."""
        return text_of(self)


def watched_schema() -> dict[str, Json]:
    """The JSON Schema of :meth:`WatchedSummary.to_json`."""
    return schema_of(WatchedSummary, title=FORMAT, description="A watched run, as ampmem show --json prints it.")


def watched_run(
    run: WatchedRun, named: Path | None = None, *, known: dict[int, FullPart] | None = None
) -> WatchedSummary:
    """The summary of ``run``; ``named`` is the file's name in commands.

    ``known`` has the full recordings that were summed up before, by number, and gets the new ones. Raises
    :class:`~ampmem.errors.RecordingError` if one cannot be unpacked.
    """
    known = {} if known is None else known
    for each in run.full:
        if each.number not in known:
            known[each.number] = _part(run, each)
    full = tuple(known[each.number] for each in run.full)
    rows, ending = run.rows, run.ending
    highest = max(rows, key=lambda row: row.peak, default=None)
    notes = list(run.notes)
    notes += [each.unreadable for each in full if each.unreadable]
    if ending is None and not run.running:
        notes.append("the run was killed, or its machine went down: the file has no end")
    shortage = _shortage(rows, ending, full) if ending is not None and ending.out_of_memory else None
    recent, speed = rows[-_RECENT:], None
    if len(recent) > 1 and recent[-1].time_ns > recent[0].time_ns:
        speed = (recent[-1].step - recent[0].step) * 1e9 / (recent[-1].time_ns - recent[0].time_ns)
    return WatchedSummary(
        format=FORMAT,
        file=str(named or run.path),
        run=run.header,
        running=run.running,
        steps=rows[-1].step + 1 - rows[0].step if rows else 0,
        rows=len(rows),
        highest=highest,
        last=rows[-1] if rows else None,
        steps_per_second=speed,
        usual_batch=_usual_batch(rows[-_USUAL:]),
        growth=growth_of([row.step for row in rows], [row.alive for row in rows]),
        grown=run.grown,
        full=full,
        ending=ending,
        shortage=shortage,
        notes=tuple(notes),
        commands=_commands(run, named or run.path, shortage),
    )


_RECENT = 20


def full_recording(run: WatchedRun, number: int, into: Path) -> Full:
    """Write the full recording ``number`` to ``into``. Raises ``RecordingError`` if there is no such recording."""
    full = next((full for full in run.full if full.number == number), None)
    if full is None:
        there = ", ".join(str(full.number) for full in run.full) or "none"
        raise UsageError(f"{run.path} has no full recording {number}; it has: {there}")
    extract(run, full, into)
    return full


def _part(run: WatchedRun, full: Full) -> FullPart:
    known = like(FullPart, full, peak=None, categories={}, lines={})
    with tempfile.TemporaryDirectory(prefix="ampmem-") as folder:
        path = Path(folder) / "full.ampmem"
        extract(run, full, path)
        try:
            analysis = analyse(read(path))
            summary = summary_of(analysis)
        except NothingRecorded:
            return known
        except AmpmemError as error:
            return replace(known, unreadable=str(error).replace(str(path), f"full recording {full.number}"))
    grown = [(found.message, *found.evidence) for found in summary.findings if found.code == "steady-growth"]
    return replace(
        known,
        peak=summary.peak.said,
        categories={str(category): size for category, size in summary.peak.categories.items() if size},
        lines=_lines(analysis),
        growth=grown[0] if grown else (),
        ended_by=summary.ended_by,
    )


_CATEGORIES = {
    "parameters": (Category.PARAMETERS, Category.UNTRAINED),
    "gradients": (Category.GRADIENTS,),
    "optimizer state": (Category.OPTIMIZER_STATE,),
    "buffers": (Category.BUFFERS,),
}
"""The groups that the recorder knows by identity, with the same categories of a full recording."""
_BY_IDENTITY = frozenset(chain.from_iterable(_CATEGORIES.values()))
_MOST_LINES = 50


def _lines(analysis: Analysis) -> dict[str, int]:
    """The largest sums of blocks at the peak by line of the script, without the categories known by identity."""
    lifetimes, texts = analysis.lifetimes, analysis.recording.texts
    by_identity = np.isin(analysis.classes.category, [CODES[category] for category in _BY_IDENTITY])
    rest = lifetimes.alive_at(analysis.peaks[analysis.top]) & ~by_identity
    line_at = {stack: _line_of(texts[stack].splitlines()) for stack in np.unique(lifetimes.stack[rest]).tolist()}
    found: Counter[str] = Counter()
    sizes = np.maximum(lifetimes.block_bytes, lifetimes.bytes)
    for stack, size in zip(lifetimes.stack[rest].tolist(), sizes[rest].tolist(), strict=True):
        found[line_at[stack]] += size
    found.pop("", None)
    return dict(found.most_common(_MOST_LINES))


def _line_of(stack: Sequence[str]) -> str:
    """``FILE:LINE`` of the innermost call outside torch and libraries; empty if there is none."""
    own = [line for line in stack if "/site-packages/" not in line and "/torch/" not in line]
    return own[-1].rpartition(" ")[0] if own else ""


def _as_ending(ending: Ending, failed: FailedRequest) -> Ending:
    """``ending`` completed from ``failed``, for a run that ran out of memory during a full recording."""
    return replace(
        ending,
        asked=failed.asked,
        free=failed.device_free,
        total=failed.device_total,
        reserved=failed.reserved,
        phase=failed.phase,
        line=_line_of(failed.stack),
        held=tuple(
            HeldMemory(what=category.replace("_", " "), bytes=size, count=0)
            for category, size in failed.alive.items()
            if size
        ),
    )


def _bytes_in_last_full(held: HeldMemory, full: FullPart | None, others: Sequence[HeldMemory]) -> int | None:
    """The bytes of ``held`` at the peak of the last full recording; ``None`` if that does not tell.

    What the lines among ``others`` allocated is not among everything else.
    """
    if full is None or not full.categories:
        return None
    if held.line:
        return full.lines.get(held.what, 0) if full.lines else None
    if not held.count:  # from a full recording, whose words are the categories
        return full.categories.get(held.what.replace(" ", "_"), 0)
    if held.what in _CATEGORIES:
        return sum(full.categories.get(key, 0) for key in _CATEGORIES[held.what])
    if held.what == IDLE_PARAMETERS:
        # Without the parameters that nothing trains in models that ran.
        ran = sum(each.bytes for each in others if each.what == "parameters")
        frozen = max(ran - full.categories.get("parameters", 0), 0)
        return max(full.categories.get("untrained", 0) - frozen, 0)
    if held.what != EVERYTHING_ELSE:  # a holder
        return None
    rest = sum(size for key, size in full.categories.items() if key not in _BY_IDENTITY)
    return max(rest - sum(full.lines.get(each.what, 0) for each in others if each.line), 0)


def _shortage(rows: Sequence[Row], ending: Ending, full: Sequence[FullPart]) -> Shortage:
    recent = rows[-_USUAL:]
    peaks = sorted(row.peak for row in recent)
    inside = full[-1].ended_by if full and ending.asked is None else None
    if inside is not None:
        full, ending = full[:-1], _as_ending(ending, inside)
    last = full[-1] if full else None
    held = tuple(
        like(HeldBefore, each, then=each.bytes, before=_bytes_in_last_full(each, last, ending.held))
        for each in ending.held
    )
    usual_peak = peaks[len(peaks) // 2] if peaks else None
    return like(Shortage, ending, usual_batch=_usual_batch(recent), usual_peak=usual_peak, held=held)


def _usual_batch(rows: Sequence[Row]) -> str:
    """The most frequent batch of ``rows``; empty without rows."""
    return next((batch for batch, _ in Counter(row.batch for row in rows).most_common(1)), "")


def _commands(run: WatchedRun, file: Path, shortage: Shortage | None) -> tuple[str, ...]:
    """The commands to run next, without those of a script whose arguments nobody would copy."""
    header = run.header
    script = header.script.split(" ", 1) if header.script.startswith("-m ") else [header.script]
    lines = []
    if shortage is not None and header.limit and (len(script) == 2 or script[0].endswith(".py")):
        gpu = gpu_called(header.device, header.source, header.limit)
        varied = batch_varied(header.arguments)
        if varied is not None:
            lines.append(["ampmem", "fit", "--gpu", gpu, *script, *varied])
        steps = ["--steps", str(shortage.step + 1)] if shortage.step >= 2 else []
        lines.append(["ampmem", "advise", "--gpu", gpu, *steps, *script, *header.arguments])
        skip = ["--skip", str(shortage.step)] if shortage.step else []
        lines.append(["ampmem", "profile", *skip, "--steps", "1", *script, *header.arguments])
    lines += [["ampmem", "show", str(file), "--full", str(full.number)] for full in run.full[-1:]]
    return tuple(line for line in map(shlex.join, lines) if len(line) <= NAME)
