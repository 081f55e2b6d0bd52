"""A recording as a trace for Perfetto and ``chrome://tracing``, in the JSON trace event format.

Counters have the live bytes of each category, slices the steps and the phases. Times are microseconds since the
recording's first event. Source of the format: "Trace Event Format", Google, sections "Counter Events",
"Complete Events" and "Metadata Events".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from ampmem.analysis.analyse import Analysis
from ampmem.analysis.categories import CATEGORIES
from ampmem.events import Phase
from ampmem.reporters.base import open_output

Entry: TypeAlias = "dict[str, int | str | dict[str, int | str]]"

_PROCESS: Final = 1
_STEPS: Final = 1
_PHASES: Final = 2
_CHUNK: Final = 1 << 16
_TIMES: Final = ("ts", "dur")
"""Fields that hold nanoseconds here, and microseconds in the file."""


def write_perfetto(analysis: Analysis, path: Path, *, force: bool = False) -> None:
    """Raises :class:`~ampmem.errors.UsageError` when ``path`` cannot be written, or exists without ``force``."""
    start = _start(analysis)
    with open_output(path, force) as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for entry in _entries(analysis):
            stream.write(f"{separator}{_json(entry, start)}")
            separator = ",\n"
        stream.write("\n]}\n")


def _start(analysis: Analysis) -> int:
    times = (analysis.timeline.time_ns, analysis.recording.phases.time_ns)
    return min((int(column[0]) for column in times if len(column)), default=0)


def _json(entry: Entry, start: int) -> str:
    """``entry`` with its times exact to the nanosecond, which a float of today's date is not."""
    fields = []
    for key, value in entry.items():
        if key in _TIMES and isinstance(value, int):
            whole, rest = divmod(value - (start if key == "ts" else 0), 1000)
            fields.append(f'"{key}": {whole}.{rest:03d}')
        else:
            fields.append(f'"{key}": {json.dumps(value)}')
    return f"{{{', '.join(fields)}}}"


def _entries(analysis: Analysis) -> Iterator[Entry]:
    title = " ".join((analysis.recording.run.script, *analysis.recording.run.arguments))
    yield _label("process_name", 0, f"ampmem: {title}")
    yield _label("thread_name", _STEPS, "steps")
    yield _label("thread_name", _PHASES, "phases")
    yield from _step_slices(analysis)
    yield from _phase_slices(analysis)
    yield from _counters(analysis)


def _label(what: str, thread: int, name: str) -> Entry:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _slice(name: str, thread: int, start_ns: int, end_ns: int, step: int) -> Entry:
    return {
        "ph": "X",
        "name": name,
        "cat": "ampmem",
        "pid": _PROCESS,
        "tid": thread,
        "ts": start_ns,
        "dur": max(end_ns - start_ns, 0),
        "args": {"step": step},
    }


def _step_slices(analysis: Analysis) -> Iterator[Entry]:
    for step in analysis.recording.steps:
        yield _slice(f"step {step.index}", _STEPS, step.start_ns, step.end_ns, step.index)


def _phase_slices(analysis: Analysis) -> Iterator[Entry]:
    """Each phase lasts until the next one; the last one until the last event, or the last step's end."""
    phases, times = analysis.recording.phases, analysis.timeline.time_ns
    ends = [int(times[-1])] if len(times) else []
    ends += [step.end_ns for step in analysis.recording.steps[-1:]]
    starts = phases.time_ns.tolist()
    bounds = [*starts, max([*ends, *starts[-1:]], default=0)]
    rows = zip(pairwise(bounds), phases.phase.tolist(), phases.step.tolist(), strict=True)
    for (start_ns, end_ns), phase, step in rows:
        yield _slice(Phase(phase).name.lower(), _PHASES, start_ns, end_ns, step)


def _counters(analysis: Analysis) -> Iterator[Entry]:
    """A value for each category at the start, and then for whichever an event changes."""
    live, times = analysis.timeline.live, analysis.timeline.time_ns
    if not len(times):
        return
    for category in CATEGORIES:
        yield _counter(category, int(times[0]), 0)
    for begin in range(0, len(times), _CHUNK):
        part = live[:, begin : begin + _CHUNK + 1]
        position, row = np.nonzero(np.diff(part, axis=1).T)
        values = part[row, position + 1]
        for place, code, value in zip((begin + position).tolist(), row.tolist(), values.tolist(), strict=True):
            yield _counter(CATEGORIES[code], int(times[place]), value)


def _counter(category: str, time_ns: int, value: int) -> Entry:
    return {"ph": "C", "name": str(category), "pid": _PROCESS, "ts": time_ns, "args": {"bytes": value}}
