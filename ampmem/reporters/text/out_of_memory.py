"""The out-of-memory report of a run, as text."""

from __future__ import annotations

from collections.abc import Sequence

from ampmem.analysis.findings.base import Remedy, remedies
from ampmem.analysis.largest import MOST, LargeAllocation
from ampmem.analysis.ops import user_frames
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.parameters import Parameters
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category
from ampmem.names import layers, of_all_layers, shape_text
from ampmem.reporters.text.answer import asked, asked_by, device, free_blocks, lacking, left, to_come
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.memory import render_categories
from ampmem.reporters.text.plain_text import ABSENT, command_lines, wrapped
from ampmem.units import format_bytes, format_count

FRAMES = 5
"""The number of the script's frames that are shown, the innermost ones."""

_KEY = 12
_NAME = 20
"""The least width of a name."""
_LARGEST = 5
"""The number of largest tensors that are listed."""
MADE_LATER = "what the script allocated after the recorded steps; nothing more is known about it"
_WITHOUT_BATCH = ("setup", "optimizer")
_RAISE_THE_LIMIT = (
    "first raise the limit of the process: torch.cuda.set_per_process_memory_fraction in the script, or "
    "per_process_memory_fraction in PYTORCH_ALLOC_CONF"
)
_HOW_TO_FIT = (
    "ampmem fit finds the largest batch size that fits; name the argument for the batch size, as in "
    "ampmem fit SCRIPT --vary --batch-size=1:"
)


def render_out_of_memory(summary: Summary, layout: Layout = PLAIN) -> str:
    """The failed request, the memory at that instant, and what to change; empty if no request failed."""
    oom = summary.out_of_memory
    if oom is None:
        return ""
    lines = list(map(layout.alarm, wrapped(headline(oom), layout.width)))
    for key, texts in _rows(oom, summary):
        shown = [line for text in texts for line in wrapped(text, layout.width - _KEY)]
        lines += [f"{key if i == 0 else '':<{_KEY}}{line}" for i, line in enumerate(shown)]
    parts = {Category.TEMPORARIES: {f"in {phase}": size for phase, size in oom.temporaries_by_phase.items()}}
    alive = render_categories(oom.alive, parts, parameters_then(summary.parameters, oom), layout)
    lines += ["", layout.strong("alive when the request failed"), "", alive]
    if oom.largest:
        lines += ["", layout.strong("the largest tensors at that instant"), "", _largest(oom.largest, layout)]
    if commands := next_lines(oom):
        lines += ["", layout.strong("to run next"), "", *(line for each in commands for line in _command(each, layout))]
    return "\n".join(lines)


def _command(line: str, layout: Layout) -> Sequence[str]:
    if line in (_HOW_TO_FIT, _RAISE_THE_LIMIT):
        return wrapped(line, layout.width)
    return command_lines(line, layout.width)


def largest_rows(found: Sequence[LargeAllocation], limit: int) -> list[tuple[int, str, str, str, str]]:
    """The largest tensors: bytes of each, their number, type with shape, category, name and module.

    Equal layers are one row.
    """
    groups = layers(found, what=_what, sizes=lambda item: (item.bytes,))
    last = found[-1] if len(found) >= MOST else None  # there may be more like the last one
    sizes = [max(item.bytes for item in group) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: -sizes[i])[:limit]
    return [
        (
            sizes[i],
            f"{format_count(len(groups[i]))}{' or more' if last in groups[i] else ''}",
            _kind(groups[i][0]),
            str(groups[i][0].category),
            _called(groups[i]),
        )
        for i in order
    ]


def _what(item: LargeAllocation) -> tuple[str | None, ...]:
    """What equal tensors share except for the numbers of their layers."""
    return item.name, item.module, item.op, item.category, _kind(item)


def _kind(item: LargeAllocation) -> str:
    """Type and shape, as far as known."""
    return " ".join(filter(None, (item.dtype, None if item.shape is None else shape_text(item.shape))))


def _called(group: Sequence[LargeAllocation]) -> str:
    """The name of a tensor or of equal layers, and the module if the name does not have it."""
    first = group[0]
    name, module = (
        of_all_layers(text or "") if len(group) > 1 else text or "" for text in (first.name or first.op, first.module)
    )
    return name if not module or module in name else f"{name or ABSENT} in {module}"


def _largest(found: Sequence[LargeAllocation], layout: Layout) -> str:
    rows = [
        [format_bytes(size), count, kind or ABSENT, category, name or ABSENT]
        for size, count, kind, category, name in largest_rows(found, _LARGEST)
    ]
    columns = [
        number("bytes each"),
        number("tensors"),
        words("type and shape", least=_NAME),
        words("category", rank=1),
        words("name", least=_NAME),
    ]
    return table(columns, rows, layout)


def headline(oom: FailedRequest) -> str:
    """The part of the run in which memory ran out, and whether the run ended with it."""
    end = "the run ended here" if oom.ended_the_run else "the script went on"
    if oom.device_total is None:
        end = "the snapshot ends here"
    others = f" ({oom.failures} requests failed; this is the last)" if oom.failures > 1 else ""
    return f"out of memory in {oom.where}: {end}{others}"


def request_in_short(oom: FailedRequest) -> str:
    """The place, the request and the available memory in one sentence, to follow a verb."""
    by, frames = asked_by(oom), user_frames(oom.stack)
    who = "".join([f" by {by}" if by else "", f" at {frames[-1]}" if frames else ""])
    end = "" if oom.ended_the_run else "; the script went on"
    return (
        f"{oom.where}: {asked(oom)} was requested{who}; {format_bytes(sum(oom.alive.values()))} in tensors, "
        f"{format_bytes(oom.cached)} cached, {left(oom)}: {oom.explanation}{end}"
    )


def next_lines(oom: FailedRequest) -> tuple[str, ...]:
    """Commands to run next, or how to write one, and what to do before."""
    commands = oom.next_commands
    if commands and oom.by_the_limit:  # the last command runs the whole script; the others make it fit the limit
        commands = (*commands[:-1], _RAISE_THE_LIMIT, commands[-1])
    batch = oom.phase not in _WITHOUT_BATCH and not oom.later
    fitted = any(line.startswith("ampmem fit ") for line in commands)
    return (*commands, _HOW_TO_FIT) if commands and batch and not fitted else commands


def parameters_then(parameters: Parameters, oom: FailedRequest) -> int:
    """The number of parameters on the device, to divide bytes by; 0 if unknown."""
    there = oom.parameters_there
    return parameters.known_count if there is None else min(there, parameters.known_count)


def being_moved(parameters: Parameters, oom: FailedRequest) -> str:
    """How many of the parameters were on the device; empty if all were, or if unknown."""
    there, count = oom.parameters_there, parameters.known_count
    if there is None or not there < count:
        return ""
    return f"{format_count(there)} of {format_count(count)} were on the device by then; B/param counts only these"


def _rows(oom: FailedRequest, summary: Summary) -> list[tuple[str, Sequence[str]]]:
    found = remedies(oom, summary.findings)
    moved = being_moved(summary.parameters, oom)
    rows: list[tuple[str, Sequence[str]]] = [
        ("request", [asked(oom)]),
        ("missing", [text for text in (lacking(oom),) if text]),
        ("by", [text for text in (asked_by(oom),) if text]),
        ("at", user_frames(oom.stack)[-FRAMES:]),
        ("device", [device(oom)]),
        ("cached", [f"{format_bytes(oom.cached)}: {oom.explanation}"]),
        ("free blocks", [f"largest: {free_blocks(oom)}"]),
        ("parameters", [moved] if moved else []),
        ("other", [MADE_LATER] if oom.later and oom.alive[Category.OTHER] else []),
        ("to come", [text for text in (to_come(oom),) if text]),
        ("to change", [_change(remedy) for remedy in found if remedy.bytes is not None]),
        ("may help", [_change(remedy) for remedy in found if remedy.bytes is None]),
    ]
    if oom.residual_bytes:
        rows.append(("residual", [f"{format_bytes(oom.residual_bytes)} between the categories and the allocator"]))
    return rows


def _change(remedy: Remedy) -> str:
    if remedy.bytes is None:
        return f"- {remedy.change}"
    least = "" if remedy.finding is None else remedy.finding.at_least
    return f"- {least}{format_bytes(remedy.bytes)} less at the failure: {remedy.change}"
