"""The text about one run except its memory tables: the run, its steps, warnings, findings and next commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ampmem.analysis.analyse import doubts_of
from ampmem.analysis.findings.base import Finding
from ampmem.analysis.parameters import Parameters
from ampmem.analysis.ranks.ranks import Job
from ampmem.analysis.summary import PrecisionSummary, Step, Summary
from ampmem.events import AllocatorRecord
from ampmem.names import NOT_KNOWN, casts_compiled, has_times
from ampmem.output import printable
from ampmem.reporters.text.layout import PLAIN, Column, Layout, number, table, words
from ampmem.reporters.text.plain_text import ABSENT, command_lines, or_absent, short, shorten, wrapped
from ampmem.reporters.text.static_model import judgement
from ampmem.units import counted, format_bytes, format_count, format_duration, format_peak
from ampmem.vocabulary import Precision, SourceKind


def describe_precision(summary: Summary) -> str:
    """The precision in words: ``amp, bfloat16, cache on``."""
    return precision_in_words(summary.precision, summary.source)


def precision_in_words(precision: PrecisionSummary, source: SourceKind) -> str:
    """The precision in words, from a recording made by ``source``."""
    if precision.name == Precision.AS_IS and source == SourceKind.SNAPSHOT:
        return "not known"
    words: list[str] = [precision.name]
    if precision.dtype is not None:
        words.append(precision.dtype)
    if precision.cache is not None:
        words.append("cache on" if precision.cache else "cache off")
    if precision.scaler:
        words.append("loss scaling")
    if precision.forced:
        words.append("forced, in regions that ampmem opened" if precision.wrapped else "forced")
    return ", ".join(words)


def describe_allocator(allocator: AllocatorRecord) -> str:
    """The caching allocator's settings and use: ``PYTORCH_ALLOC_CONF=max_split_size_mb:64, allocated on 2 streams``.

    Only streams that allocated count; other streams may use their memory too.
    """
    variable = f"{allocator.variable}=" if allocator.variable else ""
    words = [f"{variable}{allocator.settings}" if allocator.settings else "default settings"]
    if allocator.settings == NOT_KNOWN:
        words = ["settings not known"]
    if allocator.expandable_segments and "expandable_segments" not in allocator.settings:
        words.append("expandable segments")
    words.append(f"allocated on {counted(allocator.streams, 'stream')}")
    if allocator.private_pools:
        words.append(counted(allocator.private_pools, "private pool"))
    return ", ".join(words)


def describe_devices(allocator: AllocatorRecord) -> str:
    """The devices that had memory, with their peaks; empty if only the first one had."""
    used = [device for device, peak in enumerate(allocator.peaks) if peak]
    if used in ([], [0]) and allocator.device == 0:
        return ""
    names = [f"{device}{' (recorded)' * (device == allocator.device)}" for device in used or [allocator.device]]
    peaks = [f" peak {format_bytes(allocator.peaks[device])}" for device in used] or [""]
    return "; ".join(name + peak for name, peak in zip(names, peaks, strict=True))


def describe_device(run: Summary | Job) -> str:
    """The device of a run or of a job's ranks, and whether the events are a simulation's or a snapshot's."""
    source = f", {_SOURCES[run.source]}" if run.source in _SOURCES else ""
    return f"{run.device.name} ({run.device.type}){source}"


_SOURCES = {SourceKind.SIMULATED: "simulated", SourceKind.SNAPSHOT: "from a memory snapshot"}


def steps_in_words(summary: Summary) -> str:
    """The number of steps that ended: ``3 steps``, ``2 finished steps`` if memory ran out in another."""
    what = "step" if summary.steps[-1].finished else "finished step"
    return counted(sum(step.finished for step in summary.steps), what)


def describe_optimizers(summary: Summary) -> str:
    """The optimizers that stepped, in words; empty when none did."""
    return ", ".join(f"{item.class_name} ({item.implementation})" for item in summary.optimizer)


def parameters_in_short(summary: Summary) -> str:
    """``1,000 parameters in 3.9 KiB``; for a snapshot, where they cannot be counted, the bytes recognised."""
    return _amount(summary.parameters, " parameters", " of parameters")


def _amount(parameters: Parameters, counted: str = "", recognized: str = "") -> str:
    """The number and bytes of ``parameters``, and those of all ranks; for a snapshot the bytes: ``at least 8.6 MiB``.

    ``counted`` follows the number, ``recognized`` the bytes of parameters that cannot be counted.
    """
    if not parameters.exact:
        return f"{parameters.bound} {format_bytes(parameters.bytes)}{recognized} recognized".lstrip()
    amount = f"{format_count(parameters.count)}{counted} in {format_bytes(parameters.bytes)}"
    if parameters.global_count is None or parameters.global_bytes is None:
        return amount
    of_all = f"{format_count(parameters.global_count)} in {format_bytes(parameters.global_bytes)}"
    return f"{amount} on this rank, of {of_all}"


def describe_loss(step: Step) -> str:
    """The loss of the step's last backward, and of how many: ``0.6931 (last of 4)``."""
    if step.loss is None:
        return ABSENT
    return f"{step.loss:.6g}" if step.backwards <= 1 else f"{step.loss:.6g} (last of {step.backwards})"


def describe_update(step: Step) -> str:
    """The state of the step's update: ``done``, ``skipped``, ``out of memory`` or ``none seen``."""
    if not step.finished:
        return "out of memory"
    if step.skipped_update:
        return "skipped"
    return "done" if step.marks.after_optimizer is not None else "none seen"


def conserved(summary: Summary) -> str:
    """The number of events, and the difference between our sums and the allocator's."""
    conservation = summary.conservation
    residual, reserved = conservation.residual_bytes, conservation.reserved_residual_bytes
    words = [f"{format_count(conservation.events)} events"]
    words.append("no total to check against" if residual is None else f"residual {format_bytes(residual)}")
    if reserved is not None:
        words.append(f"residual of reserved memory {format_bytes(reserved)}")
    if conservation.other_threads_bytes:
        most = format_bytes(conservation.other_threads_bytes)
        words.append(f"other threads, which are not recorded, held up to {most} at once (counted in other)")
    return ", ".join(words)


_WORD = "WARNING"
_INDENT = " " * 9


def warnings(summary: Summary, notes: Sequence[str] = ()) -> tuple[str, ...]:
    """Why the numbers of this run cannot be trusted, or less so, a sentence each; empty if they can.

    ``notes`` are further notes about the run besides the summary's; some of them are warnings.
    """
    found = doubts_of(summary.conservation, summary.static_problem, notes)
    return tuple(dict.fromkeys((*found, *summary.warnings)))


def render_warnings(summary: Summary, notes: Sequence[str] = (), *, of: str = "", layout: Layout = PLAIN) -> str:
    """The :func:`warnings` as lines; ``of`` names one of several runs. Empty if there are none."""
    label = f"{of}: " if of else ""
    return "\n".join(line for text in warnings(summary, notes) for line in warning_lines(f"{label}{text}", layout))


def warning_lines(text: str, layout: Layout) -> list[str]:
    """``text`` as lines under the word "warning"."""
    first, *others = wrapped(f"{_WORD:<{len(_INDENT)}}{text}", layout.width, indent=_INDENT)
    return [first.replace(_WORD, layout.alarm(_WORD), 1), *others]


def render_next(
    files: Sequence[str], layout: Layout, *, more: bool = True, pattern: str = "", alone: tuple[str, str] | None = None
) -> str:
    """The commands for a page of ``files`` and, if there is ``more``, for all tables; empty without a file.

    ``pattern`` is a shell pattern for these files, if there is one; ``alone`` is one file worth a look of its own, and
    what it is. A command is never broken or cut, so that it can be copied: if the names are too long, it has none.
    """
    if not files:
        return ""
    commands = [("ampmem report", "all of it as a page")]
    if more:
        commands.append(("ampmem show --all", "every table"))
    names, room = pattern or " ".join(shlex.quote(file) for file in files), layout.width - len("next: ")
    if max(len(f"{command} {names}") for command, _ in commands) > room or printable(names) != names:
        names = "FILE" if len(files) == 1 else "FILE..."
    lines = [(f"{command} {names}", what) for command, what in commands]
    if alone is not None:
        line = f"ampmem show {shlex.quote(alone[0])}"
        lines += [(line, alone[1])] if len(line) <= room and printable(line) == line else []
    width = max(len(line) for line, _ in lines)
    with_words = [f"{line:<{width}}  {what}" for line, what in lines]
    shown = with_words if max(map(len, with_words)) <= room else [line for line, _ in lines]
    return "\n".join(f"{'next: ' if i == 0 else '      '}{line}" for i, line in enumerate(shown))


KEY = 12


def render_run(summary: Summary, title: str, layout: Layout) -> str:
    """Script (if known), device, precision, versions, parameters and optimizer, a line each."""
    allocator = summary.caching_allocator
    rows = [("script", title)] if title else []
    rows.append(("device", describe_device(summary)))
    if summary.world_size > 1:
        rows.append(("rank", f"{summary.rank} of {summary.world_size}"))
    if allocator is not None:
        devices = describe_devices(allocator)
        rows += [("allocator", describe_allocator(allocator)), *([("devices", devices)] * bool(devices))]
    rows += [("precision", describe_precision(summary)), *versions_and_model(summary)]
    return "\n".join([layout.strong("the run"), *keyed(rows, layout)])


def versions_and_model(summary: Summary) -> list[tuple[str, str]]:
    """The versions, the parameters and the optimizer, each with its key."""
    # An update may allocate nothing, so a snapshot does not tell whether an optimizer stepped.
    none = "not known" if summary.source is SourceKind.SNAPSHOT else "none stepped"
    return [
        ("torch", f"{summary.torch}, ampmem {summary.ampmem}"),
        ("parameters", describe_parameters(summary)),
        *([("untrained", untrained)] if (untrained := describe_untrained(summary)) else []),
        ("optimizer", describe_optimizers(summary) or none),
    ]


def keyed(rows: Sequence[tuple[str, str]], layout: Layout) -> list[str]:
    """Each of ``rows`` as a name with a text beside it, in as many lines as the text needs."""
    return [
        f"{'' if i else key:<{KEY}}{line}".rstrip()
        for key, value in rows
        for i, line in enumerate(wrapped(value, layout.width - KEY, indent=""))
    ]


def describe_parameters(summary: Summary) -> str:
    """The number and bytes of the parameters, and how many of them are trained and cast."""
    parameters = summary.parameters
    if not parameters.count:
        return "not known"
    amount = _amount(parameters)
    if not parameters.exact:
        return amount
    if parameters.trainable != parameters.count:
        amount += f", {format_count(parameters.trainable)} trainable"
    if parameters.cast_eligible is not None:
        amount += f", {format_count(parameters.cast_eligible)} cast by autocast"
        if casts_compiled(summary.notes):
            amount += ", without casts inside compiled code, which are not seen"
    return amount


def describe_untrained(summary: Summary) -> str:
    """The number of parameters that nothing trains, such as an EMA's or a teacher's; empty if there are none."""
    parameters = summary.parameters
    if not parameters.untrained_bytes:
        return ""
    count = f"{format_count(parameters.untrained_count)} more " if parameters.untrained_count else ""
    return f"{count}in {format_bytes(parameters.untrained_bytes)}: untrained models, not counted in B/param"


def render_foot(summary: Summary, notes: Sequence[str], layout: Layout, *, judged: bool = False) -> str:
    """The error of the sums, the memory above the tensors, and the recorder's notes.

    ``judged`` says that the verdict on the static model was shown already.
    """
    lines = wrapped(f"conservation: {conserved(summary)}", layout.width)
    layers = summary.allocator
    if layers.reserved is not None:
        parts = " + ".join(
            f"{name} {format_peak(getattr(layers, name))}" for name in ("requested", "rounding", "cached")
        )
        outside = "" if layers.outside is None else f", outside {format_bytes(layers.outside)}"
        if layers.outside_process is not None:
            outside += f", of which this process {format_bytes(layers.outside_process)}"
        text = f"allocator at the peak: {parts} = reserved {format_peak(layers.reserved)}{outside}"
        lines += wrapped(text, layout.width)
    if summary.static_recipe is not None and not judged:
        lines += wrapped(f"static memory: {judgement(summary)}", layout.width)
    for note in notes:
        lines.extend(wrapped(f"note: {note}", layout.width))
    return "\n".join(lines)


def render_steps(summary: Summary, notes: Sequence[str], layout: Layout) -> str:
    """A row for each step; a value unknown in all steps has no column."""
    steps = steps_in_cells(summary, notes)
    figures: list[tuple[Column, list[str]]] = [
        (number("step"), [str(step.index) for step in summary.steps]),
        (number("loss", rank=2), [step.loss for step in steps]),
        (number("loss\nscale", rank=3), [step.loss_scale for step in steps]),
        (words("update"), [step.update for step in steps]),
        (number("peak"), [step.peak for step in steps]),
        (words("in"), [step.peak.phase for step in summary.steps]),
        (number("peak\nreserved", rank=1), [or_absent(step.peak_reserved, format_peak) for step in summary.steps]),
        (number("took", rank=4), [step.took for step in steps]),
    ]
    shown = [(column, cells) for column, cells in figures if not {ABSENT, ""}.issuperset(cells)]
    rows = [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]
    return f"{layout.strong('steps')}\n\n{table([column for column, _ in shown], rows, layout)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWords:
    """A step's peak, losses, update and duration, as the tables and the page have them; empty where not known."""

    peak: str
    loss: str
    loss_scale: str
    update: str
    took: str


def steps_in_cells(summary: Summary, notes: Sequence[str]) -> tuple[StepWords, ...]:
    """The words about each step. A simulated step's duration is the time that this machine takes to simulate it."""
    timed = has_times(notes) and summary.source is not SourceKind.SIMULATED
    updates = any(
        not step.finished or step.skipped_update or step.marks.after_optimizer is not None for step in summary.steps
    )
    return tuple(
        StepWords(
            peak=format_peak(step.peak.said),
            loss=describe_loss(step),
            loss_scale=short(step.loss_scale),
            update=describe_update(step) if updates else "",
            took=format_duration(step.duration_ns) if timed else "",
        )
        for step in summary.steps
    )


_LABEL = 20


_SAID = "out-of-memory"
"""The code of the finding that has a section of its own."""


def render_labelled(
    found: Sequence[tuple[Finding, Sequence[str]]], layout: Layout, *, evidence: bool = False, title: str = "findings"
) -> str:
    """The findings below ``title``, each with the labels of its recordings if there are several; empty if none.

    ``evidence`` adds the evidence for each.
    """
    told = [each for each in found if each[0].code != _SAID]
    if not told:
        return ""
    texts = ("\n".join(_finding(finding, labels, layout, evidence=evidence)) for finding, labels in told)
    heading = layout.heading(f"{title} (ampmem docs {told[0][0].code} says more)")
    return "\n".join([heading, "\n\n".join(texts)])


def _finding(finding: Finding, labels: Sequence[str], layout: Layout, *, evidence: bool) -> list[str]:
    of = f" ({', '.join(shorten(label, _LABEL) for label in labels)})" if labels else ""
    said = f"{finding.severity:<{len(_INDENT)}}{finding.code}{of}: {finding.message}"
    first, *others = wrapped(said, layout.width, indent=_INDENT)
    style = {"warning": layout.alarm, "advice": layout.advice}.get(finding.severity, layout.strong)
    lines = [first.replace(finding.severity, style(finding.severity), 1), *others]
    texts = [*(f"- {text}" for text in finding.evidence if evidence), change_of(finding)]
    room = layout.width - len(_INDENT)
    below = [line for text in texts for line in wrapped(text, room)]
    if finding.proof:
        below += ["run this to prove it:", *command_lines(finding.proof, room)]
    return [*lines, *(f"{_INDENT}{line}" for line in below)]


def change_of(finding: Finding) -> str:
    """The change and its saving; only a hint if nothing was computed."""
    return f"to take {finding.saves}: {finding.change}" if finding.saves else f"hint: {finding.change}"
