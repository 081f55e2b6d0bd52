"""The out-of-memory report of a run, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampmem.analysis.findings.base import Remedy, remedies
from ampmem.analysis.largest import HELD_BY, MOST, LargeAllocation
from ampmem.analysis.ops import result_of, user_frames
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.parameters import Parameters
from ampmem.analysis.summary import Summary
from ampmem.analysis.timeline.categories import Category
from ampmem.names import layers, of_all_layers, shape_text
from ampmem.reporters.text.answer import asked, asked_by, device, free_blocks, lacking, left, to_come
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.memory import Parts, in_phases, render_categories
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
    """The failed request, the live memory then, changes that help, and next commands; empty if none failed."""
    oom = summary.out_of_memory
    if oom is None:
        return ""
    lines = list(map(layout.alarm, wrapped(headline(oom), layout.width)))
    facts = [(key, [text]) for key, text in request_facts(oom, summary)]
    facts.insert(sum(key in ("request", "missing", "by") for key, _ in facts), ("at", user_frames(oom.stack)[-FRAMES:]))
    found = remedies(oom, summary.findings)
    facts.append(("to change", [_change(remedy) for remedy in found if remedy.bytes is not None]))
    if oom.levers:
        facts.append(("", ["at most: computed from the tensors alive then; ampmem advise runs each change"]))
    facts.append(("may help", [_change(remedy) for remedy in found if remedy.bytes is None]))
    for key, texts in facts:
        shown = [line for text in texts for line in wrapped(text, layout.width - _KEY)]
        lines += [f"{key if i == 0 else '':<{_KEY}}{line}" for i, line in enumerate(shown)]
    if commands := next_lines(oom):
        lines += ["", layout.strong("to run next"), ""]
    for each in commands:
        lines += (wrapped if each in (_HOW_TO_FIT, _RAISE_THE_LIMIT) else command_lines)(each, layout.width)
    parts: Parts = {Category.TEMPORARIES: in_phases(oom.temporaries_by_phase)}
    alive = render_categories(oom.alive, parts, parameters_then(summary.parameters, oom), layout)
    lines += ["", layout.strong("alive when the request failed"), "", alive]
    if oom.largest:
        lines += ["", layout.strong("the largest tensors at that instant"), "", _largest(oom.largest, layout)]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeTensorRow:
    """Equal tensors among the largest: ``bytes`` of each; ``kind`` is their type and shape, as far as known.

    ``name`` has the module, too.
    """

    bytes: int
    count: str
    kind: str
    category: str
    name: str


def largest_rows(found: Sequence[LargeAllocation], limit: int) -> tuple[LargeTensorRow, ...]:
    """The largest tensors, equal layers in one row."""
    groups = layers(
        found,
        what=lambda item: (_called(item), item.category, _kind(item)),
        sizes=lambda item: (item.bytes,),
    )
    last = found[-1] if len(found) >= MOST else None  # there may be more like the last one
    rows = [
        LargeTensorRow(
            bytes=max(item.bytes for item in group),
            count=f"{format_count(len(group))}{' or more' if last in group else ''}",
            kind=_kind(group[0]),
            category=str(group[0].category),
            name=of_all_layers(_called(group[0])) if len(group) > 1 else _called(group[0]),
        )
        for group in groups
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:limit])


def _kind(item: LargeAllocation) -> str:
    """Type and shape, as far as known."""
    return " ".join(filter(None, (item.dtype, None if item.shape is None else shape_text(item.shape))))


def _called(item: LargeAllocation) -> str:
    """What the tensor is: its name, or what made an activation; then its module, or the variable that holds it."""
    name, where = item.name or item.op or "", item.module or ""
    if item.category in (Category.ACTIVATIONS, Category.TEMPORARIES) and item.op:
        where = name if name.startswith(HELD_BY) else where
        name = result_of(item.op)
    return name if not where or where in name else f"{name or ABSENT}, {where}"


def _largest(found: Sequence[LargeAllocation], layout: Layout) -> str:
    rows = [
        [format_bytes(row.bytes), row.count, row.kind or ABSENT, row.category, row.name or ABSENT]
        for row in largest_rows(found, _LARGEST)
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
    """The commands to run next, a hint for one that needs an argument's name, and a step to do before."""
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


def request_facts(oom: FailedRequest, summary: Summary) -> list[tuple[str, str]]:
    """The known facts about the failed request, each with its key: ``("missing", "1.0 GiB: …")``."""
    there, count = oom.parameters_there, summary.parameters.known_count
    moved = ""  # all parameters were there, or it is not known
    if there is not None and there < count:
        moved = f"{format_count(there)} of {format_count(count)} were on the device by then; B/param counts only these"
    rounded = f"{format_bytes(oom.residual_bytes)} between the categories and the allocator"
    facts = {
        "request": asked(oom),
        "missing": lacking(oom),
        "by": asked_by(oom),
        "device": device(oom),
        "cached": f"{format_bytes(oom.cached)}: {oom.explanation}",
        "free blocks": f"largest: {free_blocks(oom)}",
        "parameters": moved,
        "other": MADE_LATER if oom.later and oom.alive[Category.OTHER] else "",
        "to come": to_come(oom),
        "residual": rounded if oom.residual_bytes else "",
    }
    return [(key, text) for key, text in facts.items() if text]


def _change(remedy: Remedy) -> str:
    if remedy.bytes is None:
        return f"- {remedy.change}"
    bound = "at most " if remedy.finding is None else remedy.finding.at_least
    return f"- {bound}{format_bytes(remedy.bytes)} less at the failure: {remedy.change}"
