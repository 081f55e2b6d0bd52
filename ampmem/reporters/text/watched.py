"""A watched run in a terminal: its course, its growth, how it ended, and the next commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ampmem.analysis.watched import FullPart, HeldBefore, Shortage, WatchedSummary
from ampmem.growth import LEAST_STEPS
from ampmem.output import printable
from ampmem.recording.watched import Why
from ampmem.reporters.text.answer import capital
from ampmem.reporters.text.layout import PLAIN, Layout, number, table, words
from ampmem.reporters.text.memory import BAR, bar_of
from ampmem.reporters.text.plain_text import ABSENT, or_absent, wrapped, wrapped_text
from ampmem.units import format_bytes, format_count, format_peak

WHY = {
    Why.START: "the start",
    Why.EVERY: "every {every} steps",
    Why.HIGHEST: "a new highest peak",
    Why.GROWTH: "memory grew",
}
PHASES = {
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer's update",
    "evaluation": "in an evaluation",
    "between": "between forward, backward and update",
    "setup": "before the first forward",
}
SAMPLED = "on the CPU a peak is a lower bound: the largest value seen when a module, a backward or an update ended"


def render_watched(found: WatchedSummary, layout: Layout = PLAIN) -> str:
    """The whole text about the run."""
    parts = [
        layout.heading(watched_verdict(found)),
        wrapped_text((watched_heading(found), *summary_lines(found)), layout.width),
    ]
    if found.shortage is not None:
        parts += [layout.alarm("Out of memory"), _shortage(found.shortage, layout)]
    if found.full:
        columns = [number("number"), words("why"), words("steps"), number("peak")]
        columns.append(words("most of it", least=20, wraps=True))
        full = table(columns, [full_row(part, found.run.every) for part in found.full], layout)
        parts += [layout.heading("Steps recorded in full"), full]
    if found.notes:
        parts.append(wrapped_text((f"note: {note}" for note in found.notes), layout.width))
    if found.commands:
        parts += [layout.heading("Next"), "\n".join(map(printable, found.commands))]
    return "\n\n".join(parts)


def watched_heading(found: WatchedSummary) -> str:
    """The command that was watched, and the device."""
    run = found.run
    script = " ".join((run.script, *run.arguments))
    ranks = f", rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
    device = f" on {run.device}" if run.device else ""
    simulated = " (simulated)" if run.source == "simulated" else ""
    return f"{script}{device}{simulated}{ranks}"


def watched_verdict(found: WatchedSummary) -> str:
    """The answer in one sentence: whether memory ran out, and whether it grows."""
    short, grows = found.shortage, growth_line(found)
    if short is not None:
        ran_out = f"memory ran out in step {short.step}, {PHASES.get(short.phase, short.phase)}"
        return capital(f"{ran_out}; {grows}" if found.highest is not None else ran_out)
    return capital("no step has ended" if found.highest is None else grows)


def summary_lines(found: WatchedSummary) -> Iterator[str]:
    """The run in sentences, besides the verdict."""
    if found.highest is None or found.last is None:
        yield from _end(found)
        return
    kept = "" if found.rows == found.steps else f" ({format_count(found.rows)} rows are kept, extremes always)"
    yield f"{format_count(found.steps)} steps, {_state(found)}{kept}"
    highest, last = found.highest, found.last
    batch = f", batch {highest.batch}" if highest.batch else ""
    if batch and found.usual_batch not in ("", highest.batch):
        batch += f"; in most steps it was {found.usual_batch}"
    of = f" of {format_bytes(found.run.limit)}" if found.run.limit else ""
    where = PHASES.get(highest.phase, highest.phase)
    whole = " of the finished steps:" if found.shortage is not None else ""
    yield f"highest peak{whole} {format_peak(highest.peak)}{of}, in step {highest.step}, {where}{batch}"
    reserved = f", {format_bytes(last.reserved)} reserved" if last.reserved else ""
    retries = f", the allocator freed its cache {last.retries} times to continue" if last.retries else ""
    split = f", {format_bytes(last.split)} free between blocks in use" if last.split else ""
    yield (
        f"after step {last.step}: {format_bytes(last.alive)} allocated{reserved}{split}{retries}; the process uses "
        f"{format_bytes(last.host)} of host memory"
    )
    for grown in found.grown[-1:]:
        held = ", ".join(f"{format_bytes(each.bytes)} in {each.count} by {each.what}" for each in grown.held[:_LARGEST])
        yield f"still held of steps {grown.step - grown.steps + 1} to {grown.step}: {held}"
    yield from _newcomers(found)
    for part in found.full:
        if part.why is Why.GROWTH and part.growth:
            yield f"what grows, in steps {part.first} to {part.last}: {' '.join(part.growth)}"
    if found.run.sampled:
        yield SAMPLED
        full = max(found.full, key=lambda part: part.peak or 0, default=None)
        if full is not None and (full.peak or 0) > highest.peak:
            yield f"full recordings, which see every allocation, reach {format_peak(full.peak or 0)}"
    yield from _end(found)


def _newcomers(found: WatchedSummary) -> Iterator[str]:
    """What is new in each full recording that was made because of a higher peak or of growth."""
    for before, part in pairwise(each for each in found.full if each.categories):
        added = {name: size - before.categories.get(name, 0) for name, size in part.categories.items()}
        most = max(added, key=lambda name: added[name])
        lines = {line: size - before.lines.get(line, 0) for line, size in part.lines.items()}
        line, size = max(lines.items(), key=lambda each: each[1], default=("", 0))
        least = _NEWS * (part.peak or 0)
        if part.why in (Why.HIGHEST, Why.GROWTH) and added[most] >= least:
            yield (
                f"new in steps {part.first} to {part.last}, compared with steps {before.first} to {before.last}: "
                f"{format_bytes(added[most])} more in `{most}`"
                + (f"; {format_bytes(size)} more allocated at {line}" if size >= least else "")
            )


def growth_line(found: WatchedSummary) -> str:
    """The sentence that says whether live memory at the end of each step grows, and by how much per step."""
    growth = found.growth
    seen = next((part.first for part in reversed(found.full) if part.why is Why.GROWTH), None)
    if growth is None and seen is not None:
        return (
            f"memory grew until step {seen}, from which on it was recorded in full; over all steps the rise at the end "
            "of each is not more than their noise"
        )
    if growth is None:
        few = f" (a verdict needs {LEAST_STEPS} steps)" if found.steps < LEAST_STEPS else ""
        return f"no growth seen in the memory allocated at the end of each step{few}"
    each, size = format_bytes(round(growth.per_step)), round(growth.noise)
    noise = f", give or take {format_bytes(size)}" if size else ""
    return (
        f"memory grows: the memory allocated at the end of each step rises by {each} per step, "
        f"{format_bytes(growth.total)} from step {growth.first} to step {growth.last}{noise}"
    )


def _state(found: WatchedSummary) -> str:
    if found.running:
        return "running"
    if found.ending is None:
        return "no end written"
    if found.ending.failure is None:
        return "ended"
    return "interrupted" if found.ending.failure.interrupted else "ended with an error"


def _end(found: WatchedSummary) -> Iterator[str]:
    ending = found.ending
    if ending is not None and ending.failure is not None and not ending.failure.interrupted:
        said = ending.failure.line.partition(". ")[0] if ending.out_of_memory else ending.failure.line
        yield f"in step {ending.step} the script failed: {said}"


def _shortage(found: Shortage, layout: Layout) -> str:
    text = wrapped_text(shortage_lines(found), layout.width)
    if not found.held:
        return text
    columns = [words("held", least=20), number("bytes"), number("blocks"), number("last full\nrecording")]
    return f"{text}\n\n{table(columns, held_rows(found), layout, strong={'total'})}"


_NEWS = 0.01
"""The share of the memory from which on a difference is new memory, and not rounding up to blocks."""


def shortage_lines(found: Shortage) -> Iterator[str]:
    """The failure in sentences: the request, the batch, the memory that grew most, and the usual peak."""
    asked = "a block" if found.asked is None else format_bytes(found.asked)
    where = f" at {found.line}" if found.line else ""
    free = "" if found.free is None else f"; {format_bytes(found.free)} of {format_bytes(found.total)} was free"
    yield f"step {found.step}, {PHASES.get(found.phase, found.phase)}: {asked} requested{where}{free}"
    if found.batch != found.usual_batch and found.usual_batch:
        yield f"the batch was {found.batch or 'unknown'}; in most steps before it was {found.usual_batch}"
    elif found.batch:
        yield f"the batch was {found.batch}, as in most steps before"
    more = max(found.held, key=_bytes_added, default=None)
    if more is not None and _bytes_added(more) > 0 and _bytes_added(more) >= _NEWS * more.then:
        yield (
            f"{more.what} grew most: {format_bytes(more.then)}, compared with {format_bytes(more.before)} in the "
            "last full recording"
        )
    if found.usual_peak is not None:
        yield f"usual peak of the steps before: {format_peak(found.usual_peak)}"


def _bytes_added(each: HeldBefore) -> int:
    return 0 if each.before is None else each.then - each.before


HELD_COLUMNS = ("held", "bytes", "blocks", "last full recording")


def held_rows(found: Shortage) -> list[list[str]]:
    """The memory held when memory ran out, and the total."""
    sizes = [(each.what, each.then, each.count, each.before) for each in found.held]
    sizes.append(("total", sum(each.then for each in found.held), sum(each.count for each in found.held), None))
    return [
        [what, format_bytes(then), format_count(count) if count else ABSENT, or_absent(before)]
        for what, then, count, before in sizes
    ]


_LARGEST = 3
FULL_COLUMNS = ("number", "why", "steps", "peak", "most of it")


def full_row(part: FullPart, every: int) -> list[str]:
    """A full recording: its number, the reason for it, its steps, its peak, and the largest categories."""
    largest = sorted(part.categories.items(), key=lambda each: -each[1])[:_LARGEST]
    most = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest)
    why, steps = WHY[part.why].format(every=every), f"{part.first} to {part.last}"
    return [str(part.number), why, steps, or_absent(part.peak), most or ABSENT]


def render_watched_ranks(found: Sequence[WatchedSummary], layout: Layout = PLAIN) -> str:
    """Watched runs side by side, such as a job's ranks: the highest peak of each, and which rose first."""
    columns = [words("file", least=20), number("rank"), number("steps"), number("highest\npeak"), number("in step")]
    columns += [number("allocated\nat the end"), words("grows"), words("state")]
    text = table(columns, [_rank(each) for each in found], layout)
    known = [(each.highest.step, each.highest.time_ns, each) for each in found if each.highest is not None]
    if len(known) < 2:
        return text
    step, _, first = min(known, key=lambda each: each[:2])
    return f"{text}\n\nthe highest peak came first on rank {first.run.rank}, in step {step} ({first.file})"


def _rank(found: WatchedSummary) -> list[str]:
    highest, last, growth = found.highest, found.last, found.growth
    return [
        found.file,
        str(found.run.rank),
        format_count(found.steps),
        *([ABSENT, ABSENT] if highest is None else [format_peak(highest.peak), str(highest.step)]),
        ABSENT if last is None else format_bytes(last.alive),
        "no" if growth is None else f"{format_bytes(round(growth.per_step))} per step",
        _state(found),
    ]


def render_live(found: Sequence[WatchedSummary], layout: Layout = PLAIN) -> str:
    """The current state of runs: a bar against the device's memory each, and the last full recording's categories."""
    texts = []
    rows = [row for each in found for row in (each.highest, each.last) if row is not None]
    most = max(1, 0, *(max(row.peak, row.reserved) for row in rows), *(each.run.limit or 0 for each in found))
    for each in found:
        last = each.last
        name = f"rank {each.run.rank}" if each.run.world_size > 1 else printable(each.file)
        if last is None:
            texts.append(f"{layout.strong(name)}  no step has ended")
            continue
        speed = "" if each.steps_per_second is None else f", {each.steps_per_second:.3g} steps/s"
        limit = f" of {format_bytes(each.run.limit)}" if each.run.limit else ""
        bars = [("peak", last.peak, limit), ("allocated", last.alive, "")]
        bars += [("reserved", last.reserved, "")] if last.reserved else []
        lines = [f"{layout.strong(name)}  step {last.step}{speed}, {_state(each)}"]
        lines += [f"  {what:9} {bar_of(size, most):{BAR}} {format_bytes(size)}{of}" for what, size, of in bars]
        if len(found) == 1:
            lines += _live_details(each, most)
        lines += [layout.advice(f"  {line}") for said in _warnings(each) for line in wrapped(said, layout.width - 2)]
        texts.append("\n".join(lines))
    return "\n".join(texts)


def _live_details(found: WatchedSummary, most: int) -> Iterator[str]:
    for part in (part for part in found.full[-1:] if part.categories):
        yield f"  in full, steps {part.first} to {part.last}:"
        for name, size in sorted(part.categories.items(), key=lambda each: -each[1])[:6]:
            yield f"    {name.replace('_', ' '):16} {bar_of(size, most):{BAR}} {format_bytes(size)}"


def _warnings(found: WatchedSummary) -> Iterator[str]:
    if found.growth is not None:
        yield growth_line(found)
    if found.last is not None and found.last.retries:
        yield f"the allocator freed its cache {found.last.retries} times to continue"
    yield from _end(found)
    yield from found.notes
