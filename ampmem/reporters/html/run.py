"""One run on the page, from its recording or its JSON: the summary, the sentences about it, and the events.

Bars show the activations by purpose, by module and by type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ampmem.analysis.activations import FULL_PRECISION, ActivationGroup, ActivationPart, Saving, kind_in_words, savings
from ampmem.analysis.advised import Advised
from ampmem.analysis.analyse import Analysis, analyse
from ampmem.analysis.casts import ParameterCasts
from ampmem.analysis.comparison import Entry, entry_of
from ampmem.analysis.findings.base import Finding, Remedy, Section, remedies, told_elsewhere
from ampmem.analysis.jsonable import like, plain
from ampmem.analysis.modules import ROOT
from ampmem.analysis.ops import plain_kind, plain_op, user_frames
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.summary import PeakPlace, Summary, summary_of
from ampmem.analysis.timeline.categories import PRECISION_COPIES, Category
from ampmem.analysis.timeline.timeline import PHASES
from ampmem.documentation import paragraphs
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.events import Column
from ampmem.names import NOT_KNOWN, RAN_ON_PREDICTED, has_times, natural
from ampmem.recording import read
from ampmem.reporters.html.progress import PageProgress
from ampmem.reporters.html.stream import SegmentView, StreamView, address_map_view, packed, stream_view
from ampmem.reporters.text.answer import asked, capital, place_of, to_come
from ampmem.reporters.text.estimate import fit_in_short, sentences
from ampmem.reporters.text.memory import parameters_in_layers
from ampmem.reporters.text.out_of_memory import LargeTensorRow, headline, largest_rows, next_lines, request_facts
from ampmem.reporters.text.plain_text import per_parameter
from ampmem.reporters.text.run import (
    StepWords,
    describe_allocator,
    describe_device,
    describe_devices,
    describe_optimizers,
    describe_precision,
    parameters_in_short,
    steps_in_cells,
    steps_in_words,
    warnings,
)
from ampmem.reporters.text.static_model import judgement, rule_in_words
from ampmem.units import format_bytes, format_count, format_peak
from ampmem.vocabulary import AUTOCAST_PRECISIONS, LOW_PRECISION, SourceKind

MAX_MODULES = 40
MAX_SAVINGS = 100
_OPS = 3
"""The number of ops that the detail of a kind names."""
_ANY = "*"
_OUTSIDE = "outside the modules"

_Part = tuple[ActivationGroup, ActivationPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionBar:
    """Bytes of activations: ``full`` in float32 or float64, ``low`` in bfloat16 or float16, ``other`` in other types.

    ``ops`` are the bar's ops, as torch names them, each with a type of what it saved or made; ``None`` if not seen.
    ``module`` is the path of the bar's modules, with ``*`` for any number, and ``None`` for no module. ``detail`` says
    more.
    """

    label: str
    detail: str
    full: int
    low: int
    other: int
    ops: tuple[tuple[str | None, str | None], ...]
    module: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionWords:
    """The names of the parts of :class:`PrecisionBar`; empty for a part that no activation is in."""

    full: str
    low: str
    other: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsView:
    """The activations by kind, module and type.

    ``kinds`` are grouped by the op that saved them, or if no save was seen by the op that made them (``by`` is ``saved
    for`` or ``made by``). ``modules_rest`` is the sum of the modules left out. ``when`` is their instant, in words.
    """

    when: str
    by: str
    words: PrecisionWords
    whole: PrecisionBar
    kinds: tuple[PrecisionBar, ...]
    modules: tuple[PrecisionBar, ...]
    modules_rest: PrecisionBar | None
    savings: tuple[Saving, ...]
    savings_left_out: int


def activations_view(summary: Summary) -> ActivationsView | None:
    """The activations at the end of forward, or when memory ran out; ``None`` if there are none."""
    parts = [(group, part) for group in summary.activations for part in group.parts]
    if not parts:
        return None
    seen = any(part.saved_for for _, part in parts)
    names = [module.name for module in summary.modules]
    modules = _largest_first(_by_module(parts, names)) if any(part.module for _, part in parts) else ()
    pairs = savings(summary.activations)
    return ActivationsView(
        when="at the end of forward" if summary.last_step.marks.after_forward else "when memory ran out",
        by="saved for" if seen else "made by",
        words=_words(parts, "still " if summary.precision.dtype else ""),
        whole=_bar("all", "", parts),
        kinds=_largest_first(_by_kind(parts, seen=seen)),
        modules=modules[:MAX_MODULES],
        modules_rest=_together(modules[MAX_MODULES:]),
        savings=pairs[:MAX_SAVINGS],
        savings_left_out=max(0, len(pairs) - MAX_SAVINGS),
    )


def _words(parts: Iterable[_Part], still: str) -> PrecisionWords:
    types = {group.dtype for group, _ in parts}
    full, low = ([each for each in some if each in types] for some in (FULL_PRECISION, LOW_PRECISION))
    rest = types - {*full, *low}
    other = ["masks and indices"] * bool(rest - {None}) + ["type not known"] * (None in rest)
    full_words = f"{still}{' and '.join(full)}" if full else ""
    return PrecisionWords(full=full_words, low=" and ".join(low), other=", ".join(other))


def _by_kind(parts: Iterable[_Part], *, seen: bool) -> Iterator[PrecisionBar]:
    """A bar for each kind of activation, by the op that saved it; if no save was ``seen``, by the op that made it."""
    kinds: dict[str, list[_Part]] = {}
    for group, part in parts:
        kind = kind_in_words(group, part) if seen else plain_kind(part.made_by or "") or "an unknown op"
        kinds.setdefault(kind, []).append((group, part))
    for kind, mine in kinds.items():
        made = _largest_ops((part.made_by, part.bytes) for _, part in mine)
        ops = _largest_ops((part.saved_for, part.bytes) for _, part in mine) if seen else made
        held = f"a variable or a checkpoint holds them; made by {_ops_text(made, '')}"
        detail = held if seen and ops == [None] else _ops_text(ops, kind)
        pairs = ((part.saved_for if seen else part.made_by, group.dtype) for group, part in mine)
        yield _bar(kind, detail, mine, ops=pairs)


def _largest_ops(sizes: Iterable[tuple[str | None, int]]) -> list[str | None]:
    """The ops by bytes, the largest first."""
    sums: dict[str | None, int] = {}
    for op, size in sizes:
        sums[op] = sums.get(op, 0) + size
    return sorted(sums, key=lambda op: -sums[op])


def _ops_text(ops: Sequence[str | None], kind: str) -> str:
    """The largest of ``ops`` in words; empty if the kind names the op already."""
    words = list(dict.fromkeys(plain_op(op) for op in ops if op is not None))
    if words == [kind]:
        return ""
    return ", ".join(words[:_OPS]) + (", …" if len(words) > _OPS else "")


def _by_module(parts: Iterable[_Part], names: Iterable[str]) -> Iterator[PrecisionBar]:
    """One bar for each module, and one for repeated ones: ``blocks.0`` to ``blocks.11`` are ``blocks.*``.

    ``names`` are those of all modules, as checkpointed blocks keep nothing of the modules below them.
    """
    mine: dict[str | None, list[_Part]] = {}
    for group, part in parts:
        mine.setdefault(part.module, []).append((group, part))
    above = {".".join(path[:end]) for path in map(_path, [*mine, *names]) for end in range(1, len(path))}
    folded: dict[str | None, list[str | None]] = {}
    for module in mine:
        folded.setdefault(_folded(module, above), []).append(module)
    for pattern, modules in folded.items():
        inside = [each for module in modules for each in mine[module]]
        detail = f"{format_count(len(modules))} modules" if len(modules) > 1 else ""
        name = modules[0] if len(modules) == 1 else pattern
        yield _bar(name or _OUTSIDE, detail, inside, module=name)


def _path(module: str | None) -> list[str]:
    return [] if module is None or module == ROOT else module.split(".")


def _folded(module: str | None, above: Iterable[str]) -> str | None:
    """``module`` with ``*`` for each number that has modules below it, such as a transformer's blocks."""
    path = _path(module)
    if not path:
        return module
    return ".".join(
        _ANY if piece.isdecimal() and ".".join(path[: end + 1]) in above else piece for end, piece in enumerate(path)
    )


def _bar(
    label: str,
    detail: str,
    parts: Iterable[_Part],
    *,
    ops: Iterable[tuple[str | None, str | None]] = (),
    module: str | None = None,
) -> PrecisionBar:
    sizes = {"full": 0, "low": 0, "other": 0}
    for group, part in parts:
        key = "full" if group.dtype in FULL_PRECISION else "low" if group.dtype in LOW_PRECISION else "other"
        sizes[key] += part.bytes
    return PrecisionBar(label=label, detail=detail, ops=tuple(dict.fromkeys(ops)), module=module, **sizes)


def _largest_first(bars: Iterable[PrecisionBar]) -> tuple[PrecisionBar, ...]:
    return tuple(sorted(bars, key=lambda bar: (-(bar.full + bar.low + bar.other), natural(bar.label))))


def _together(bars: Sequence[PrecisionBar]) -> PrecisionBar | None:
    if not bars:
        return None
    sums: Mapping[str, int] = {key: sum(getattr(bar, key) for bar in bars) for key in ("full", "low", "other")}
    return PrecisionBar(label=f"{format_count(len(bars))} more", detail="", ops=(), module=None, **sums)


MAX_PHASE_RUNS = 20_000
MAX_PARAMETERS = 200
MAX_HEADLINES = 5
LARGEST_ROWS = 8
FRAMES = 12
"""The number of the script's frames that are shown, the innermost ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One large number and its meaning; ``value`` is the number as text."""

    label: str
    value: str
    detail: str
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding on the page; ``jump`` is the id of the section that shows it, if known.

    ``meaning`` has the paragraphs that the documentation has about it.
    """

    code: str
    meaning: tuple[str, ...]
    severity: str
    message: str
    change: str
    evidence: tuple[str, ...]
    saves: str
    jump: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyView:
    """A change, the reason for it, and its bytes; ``meaning`` is as a finding has it."""

    change: str
    why: str
    bytes: int | None
    evidence: tuple[str, ...]
    code: str
    meaning: tuple[str, ...]
    jump: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortageWords:
    """The last failed request in words; ``frames`` (outermost first) say where in the script it was made.

    ``available`` is the device's memory or the process's limit, and ``used`` the part in use, in bytes; the first is
    ``None`` if another device was recorded. ``block`` labels the request on the timeline. ``commands`` can be run next,
    and ``hint`` says how to write one.
    """

    headline: str
    available: int | None
    used: int
    block: str
    largest: tuple[LargeTensorRow, ...]
    commands: tuple[str, ...]
    hint: str
    facts: tuple[tuple[str, str], ...]
    frames: tuple[str, ...]
    remedies: tuple[RemedyView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticWords:
    """The recipe that the run is compared with, and the outcome."""

    head: str
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The page's words about a summary, as ``ampmem show`` has them; empty or ``None`` values are not shown.

    ``warnings`` say why the numbers cannot be trusted. ``copies`` are those of parameters, equal layers together, the
    largest first, and ``copies_left_out`` counts the parameters left out. ``peak`` is the largest of the steps' peaks.
    Bytes per parameter are divided by ``parameters``; 0 if their number is unknown.
    """

    facts: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    headlines: tuple[Headline, ...]
    findings: tuple[FindingView, ...]
    parameters: int
    peak: str
    steps: tuple[StepWords, ...]
    out_of_memory: ShortageWords | None
    static_model: StaticWords | None
    activations: ActivationsView | None
    copies: tuple[ParameterCasts, ...]
    copies_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPositions:
    """The start, the end and the peak of a step, as positions."""

    first: int
    last: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAtView:
    """The instant of the tables of modules, stacks, addresses and allocations; ``name`` is ``peak`` or ``failure``."""

    position: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """The events of a run. A *position* is a number of events; ``None`` is an instant that does not exist.

    ``timed`` says whether the times were measured; else they only order the events. ``instant`` is the peak, or the
    failure if memory ran out and the run ended. ``activations`` is the position of the summary's activations. If the
    events have no addresses, ``address_map`` has the allocator's segments at ``instant``.
    """

    timed: bool
    steps: tuple[StepPositions, ...]
    peak: int | None
    instant: ShownAtView | None
    failure: int | None
    activations: int
    phase_runs: tuple[tuple[int, str], ...]
    address_map: tuple[SegmentView, ...]
    stream: StreamView


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWords:
    """A run's JSON, as ``ampmem show --json`` prints it, and the words about it."""

    summary: Summary
    said: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run of the page.

    ``packed`` is :class:`RunWords` as JSON in gzip and base64. ``events`` are ``None`` if the run was given as the JSON
    of its summary.
    """

    label: str
    precision: str
    title: str
    packed: str
    events: RunEvents | None


def column(path: Path, limit: int, progress: PageProgress, advised: Advised | None = None) -> tuple[Entry, RunView]:
    """The recording at ``path`` as a column of a comparison and as a run of the page.

    Its events may take ``limit`` bytes of the page. Findings that ``advised`` disproves are left out.
    """
    progress.say(f"reading {path.name}")
    recording = read(path)
    try:
        analysis = analyse(recording)
        summary = summary_of(analysis)
    except (NothingRecorded, RecordingError) as error:
        raise type(error)(f"{path}: {error}") from error
    if advised is not None:
        summary, _ = advised.without_disproved(summary, recording.run, recording.precision)
    entry = entry_of(recording, summary=summary)
    return entry, run_view(entry, summary, analysis, limit)


def column_of(summary: Summary, title: str) -> tuple[Entry, RunView]:
    """A run of which only the summary is known as a column of a comparison and as a run of the page."""
    entry = like(Entry, summary, label=summary.precision.name, summary=summary)
    return entry, _view(entry, summary, title, None)


def run_view(entry: Entry, summary: Summary, analysis: Analysis, limit: int) -> RunView:
    """The view of one recording, which ``entry``, ``summary`` and ``analysis`` are all about.

    ``limit`` is the most bytes of the page for its events.
    """
    return _view(entry, summary, entry.script, _events(summary, analysis, limit))


def _view(entry: Entry, summary: Summary, title: str, events: RunEvents | None) -> RunView:
    words = packed_words(summary, said_of(summary, summary.findings))
    return RunView(label=entry.label, precision=summary.precision.name, title=title, packed=words, events=events)


def packed_words(summary: Summary, said: Said) -> str:
    """The JSON of a run on the page, without its events."""
    text = json.dumps(plain(RunWords(summary=summary, said=said)), allow_nan=False, separators=(",", ":"))
    return packed([text.encode()])


def said_of(summary: Summary, told: Sequence[Finding], to_baseline: Headline | None = None) -> Said:
    """The page's sentences about ``summary`` and its findings ``told``, which other runs may have judged.

    ``to_baseline`` compares this run with another.
    """
    copies = parameters_in_layers(summary.casts.by_parameter)
    return Said(
        facts=tuple(_facts(summary)),
        notes=(*sentences(None if summary.ended_by else summary.prediction), *summary.notes),
        warnings=warnings(summary),
        headlines=tuple(_headlines(summary, to_baseline))[:MAX_HEADLINES],
        findings=tuple(map(_finding, told_elsewhere(summary.out_of_memory, told))),
        parameters=summary.parameters.known_count,
        peak=format_peak(summary.peak.said),
        steps=steps_in_cells(summary, summary.notes),
        out_of_memory=None if summary.out_of_memory is None else _shortage(summary.out_of_memory, summary),
        static_model=None
        if summary.static_recipe is None
        else StaticWords(head=rule_in_words(summary.static_recipe, summary), verdict=judgement(summary)),
        activations=activations_view(summary),
        copies=tuple(together for _, together in copies[:MAX_PARAMETERS]),
        copies_left_out=sum(count for count, _ in copies[MAX_PARAMETERS:]),
    )


def _events(summary: Summary, analysis: Analysis, limit: int) -> RunEvents:
    timeline, steps, peaks = analysis.timeline, analysis.recording.steps, analysis.peaks
    top, found = summary.peak, zip(peaks, summary.steps, strict=True)
    of_top = (at for at, step in found if (step.index, step.peak.bytes) == (top.step, top.bytes))
    peak = next(of_top, None) if top.bytes else None
    ooms = analysis.recording.ooms
    failure = timeline.position(ooms[-1].time_ns) if ooms else None
    forwards = [marks.after_forward for marks in analysis.marks if marks.after_forward is not None]
    instant = None if peak is None else ShownAtView(position=peak, name="peak")
    if failure is not None and summary.ended_by is not None and not summary.ended_by.later:
        instant = ShownAtView(position=failure, name="failure")
    at, when = (0, "peak") if instant is None else (instant.position, instant.name)
    stream = stream_view(analysis, peaks, at, limit, when=when)
    return RunEvents(
        timed=has_times(summary.notes) and summary.source is not SourceKind.SIMULATED,
        steps=tuple(
            StepPositions(first=timeline.position(step.start_ns), last=timeline.position(step.end_ns), peak=at_peak)
            for step, at_peak in zip(steps, peaks, strict=True)
        ),
        peak=peak,
        instant=instant,
        failure=failure,
        activations=timeline.position(forwards[-1]) if forwards else failure or 0,
        phase_runs=_phase_runs(analysis.recording.events.phase),
        address_map=() if stream.addresses else address_map_view(analysis, at),
        stream=stream,
    )


def _facts(summary: Summary) -> Iterator[str]:
    if summary.parameters.count:
        yield parameters_in_short(summary)
    if optimizers := describe_optimizers(summary):
        yield f"optimizer {optimizers}" if optimizers.startswith(NOT_KNOWN) else optimizers
    yield describe_device(summary)
    if summary.caching_allocator is not None:
        yield f"allocator: {describe_allocator(summary.caching_allocator)}"
        if devices := describe_devices(summary.caching_allocator):
            yield f"devices: {devices}"
    if summary.world_size > 1:
        yield f"rank {summary.rank} of {summary.world_size}"
    yield f"precision: {describe_precision(summary)}"
    yield steps_in_words(summary)
    yield f"{format_count(summary.conservation.events)} allocator events"
    yield f"torch {summary.torch}, ampmem {summary.ampmem}"


def _headlines(summary: Summary, to_baseline: Headline | None) -> Iterator[Headline]:
    """The known numbers, the most important first; ``to_baseline`` compares this run with another."""
    if summary.ended_by is not None:
        yield from _of_failure(summary.ended_by)
        return
    peak, allocator, count = summary.peak, summary.allocator, summary.parameters.known_count
    requested = "" if peak.allocated is None else f", {format_peak(peak.bytes)} of it requested"
    when = f"step {peak.step}, in {peak.phase}{requested}"
    whole = summary.whole
    name = "Peak" if whole.where is PeakPlace.STEP else "Peak of the steps"
    yield _size(name, peak.said, when, format_peak)
    if whole.where is PeakPlace.NOT_RECORDED:
        yield _size("Peak", whole.bytes, f"of the whole run, {place_of(whole)}", format_peak)
    if (outside := summary.outside_steps) is not None:
        where = f"{'after the last' if outside.after else 'before the first'}, in {outside.phase}"
        yield _size("Outside of the steps", outside.said, where, format_peak)
    if summary.prediction is not None:
        value, detail = fit_in_short(summary.prediction)
        if RAN_ON_PREDICTED in summary.notes:
            detail += ", in the whole run"
        yield Headline(label="On the GPU", value=value, detail=detail, bytes=summary.prediction.margin)
    if allocator.reserved is not None:
        yield _size("Reserved", allocator.reserved, "by the allocator, at the peak", format_peak)
    if allocator.cached is not None:
        yield _size("Cached", allocator.cached, "reserved but not in use, at the peak")
    if count:
        each = per_parameter(peak.bytes, count)
        yield Headline(label="Bytes per parameter", value=each, detail="at the peak", bytes=None)
    if to_baseline is not None:
        yield to_baseline
    precision_copies = sum(peak.categories[category] for category in PRECISION_COPIES)
    yield _size("Activations", peak.categories[Category.ACTIVATIONS], "at the peak")
    if precision_copies or summary.source != SourceKind.SNAPSHOT or summary.precision.name in AUTOCAST_PRECISIONS:
        yield _size("Precision copies", precision_copies, "at the peak")
    events = f"categories compared with the allocator, {format_count(summary.conservation.events)} events"
    residual = summary.conservation.residual_bytes
    yield Headline(label="Residual", value=format_bytes(residual), detail=events, bytes=residual)


def _of_failure(oom: FailedRequest) -> Iterator[Headline]:
    """The figures of the failed request: live memory, the missing bytes, free memory, and memory still to come."""
    yield _size("At the failure", sum(oom.alive.values()), f"in tensors, in {oom.where}")
    if oom.lacking:
        yield _size("Missing", oom.lacking, f"for {asked(oom)}")
    yield _size("Reserved", oom.reserved, f"by the allocator; {format_bytes(oom.cached)} of it not in use")
    if oom.by_the_limit and oom.allowed is not None:
        yield _size("Left below the limit", oom.left, f"of {format_bytes(oom.allowed)}")
    else:
        total = "" if oom.outside is None or oom.device_total is None else f"of {format_bytes(oom.device_total)}"
        yield _size("Free on the device", oom.device_free, total)
    coming = oom.to_come
    if coming is not None and (coming.gradients or coming.optimizer_state):
        yield _size("Still to come", coming.gradients + (coming.optimizer_state or 0), to_come(oom))


def _size(label: str, size: int, detail: str, shown: Callable[[int], str] = format_bytes) -> Headline:
    return Headline(label=label, value=shown(size), detail=detail, bytes=size)


def _finding(finding: Finding) -> FindingView:
    evidence = (*finding.evidence, *([f"run this to prove it: {finding.proof}"] if finding.proof else []))
    said, meaning = capital(finding.message), paragraphs(finding.code)
    return like(FindingView, finding, message=said, meaning=meaning, evidence=evidence, jump=_section(finding))


def _section(finding: Finding) -> str:
    """The page's section for a finding; empty if unknown, as JSON does not have it."""
    return finding.section if isinstance(finding.section, Section) else ""


def _phase_runs(phase: Column) -> tuple[tuple[int, str], ...]:
    """The positions at which the phase changes; empty if there are too many to be seen."""
    if not len(phase):
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(phase)) + 1])
    if len(starts) > MAX_PHASE_RUNS:
        return ()
    return tuple((start, PHASES[code - 1]) for start, code in zip(starts.tolist(), phase[starts].tolist(), strict=True))


def _shortage(oom: FailedRequest, summary: Summary) -> ShortageWords:
    return ShortageWords(
        headline=headline(oom),
        available=None if not oom.recorded else oom.allowed if oom.by_the_limit else oom.device_total,
        used=oom.reserved if oom.by_the_limit or oom.device_total is None else oom.device_total - oom.device_free,
        block=f"{asked(oom)}" + (f": {format_bytes(oom.lacking)} missing" if oom.lacking else ""),
        largest=largest_rows(oom.largest, LARGEST_ROWS),
        commands=oom.next_commands,
        hint="; ".join(line for line in next_lines(oom) if line not in oom.next_commands),
        facts=tuple((key.capitalize(), text) for key, text in request_facts(oom, summary)),
        frames=tuple(user_frames(oom.stack)[-FRAMES:]),
        remedies=tuple(map(_remedy, remedies(oom, summary.findings))),
    )


def _remedy(remedy: Remedy) -> RemedyView:
    about: dict[str, Any] = {"evidence": (), "code": "", "meaning": (), "jump": ""}
    if (finding := remedy.finding) is not None:
        about = {"evidence": finding.evidence, "code": finding.code, "jump": _section(finding)}
        about["meaning"] = paragraphs(finding.code)
    return like(RemedyView, remedy, why=capital(remedy.why), **about)
