"""The ranks of a job as text: the verdict, who is missing, then ranks x categories."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampmem.analysis.ranks.ranks import Absence, Job, MissingRank, Ranks
from ampmem.names import NOT_ENDED, is_warning, said_in
from ampmem.recording import rank_of, rank_pattern
from ampmem.reporters.text.common.describe import arm_in_words
from ampmem.reporters.text.common.layout import PLAIN, Layout
from ampmem.reporters.text.common.plain_text import wrapped
from ampmem.reporters.text.next_steps import render_next
from ampmem.reporters.text.ranks.matrix import render_matrix
from ampmem.reporters.text.ranks.names import named
from ampmem.reporters.text.ranks.places import render_groups, render_places
from ampmem.reporters.text.ranks.verdict import ranks_wording
from ampmem.reporters.text.sections.run import keyed
from ampmem.reporters.text.sections.verdict import wording_lines
from ampmem.reporters.text.warnings import warning_lines
from ampmem.units import format_bytes
from ampmem.vocabulary import SourceKind

_FIGURE = re.compile(r"\d[\d.,]*( [KMGTP]?i?B\b)?")


def render_ranks(
    ranks: Ranks, *, files: Sequence[str] = (), every: bool = False, layout: Layout = PLAIN, heading: str = ""
) -> str:
    """The merged view as text, without a newline at its end; ``every`` rank has a row of its own kind then.

    ``files`` are the recordings, for what to do next. ``heading`` is there where the job is one of several, of which
    all else is said before.
    """
    sections = [
        layout.strong(heading),
        "\n".join(wording_lines(ranks_wording(ranks), layout)),
        "\n".join(line for text in doubts(ranks) for line in warning_lines(text, layout)),
        "\n".join(layout.alarm(line) for text in absences(ranks) for line in wrapped(text, layout.width)),
        render_matrix(ranks, layout, every=every),
        render_groups(ranks, layout),
        render_places(ranks, layout, every=every),
        "" if heading else _job(ranks.job, layout),
        "\n".join(line for text in _foot(ranks) for line in wrapped(text, layout.width)),
        "" if not files else _next(ranks, files, layout, more=not every),
    ]
    return "\n\n".join(section for section in sections if section)


def doubts(ranks: Ranks) -> Iterator[str]:
    """Which ranks do not belong together or were killed, what makes numbers doubtful, and of which ranks."""
    if ranks.launches:
        yield (
            f"these are ranks of {len(ranks.launches)} launches of the script: "
            f"{'; '.join(named(those) for those in ranks.launches)}. What one has more than another need not be due to "
            "its place in the job"
        )
    yield from _killed(ranks)
    if ranks.unsound:
        worst = max(ranks.rank(number).residual_bytes or 0 for number in ranks.unsound)
        yield (
            f"{named(ranks.unsound)}: the sums are not the allocator's own, by up to {format_bytes(worst)}. Some of "
            "the memory below has a wrong name, or none."
        )
    for note, whose in _notes(ranks):
        if is_warning(note):
            yield f"{whose}: {said_in(note)}"


def _killed(ranks: Ranks) -> Iterator[str]:
    """The ranks whose recordings were not ended, by the last step that they ended."""
    read = {rank.rank: rank.last_step for rank in ranks.ranks}
    by_step: dict[int | None, list[int]] = {}
    for number in ranks.not_ended:
        by_step.setdefault(read.get(number), []).append(number)
    for step, those in by_step.items():
        when = "before a step of theirs had ended" if step is None else f"in the step after step {step}"
        one = len(those) == 1
        was, whose = ("was", "its machine") if one else ("were", "their machines")
        recording = "its recording was" if one else "their recordings were"
        yield f"{named(those)} {was} killed, or {whose} went away, {when}: {recording} not ended"


def absences(ranks: Ranks) -> Iterator[str]:
    """Which ranks are missing and why, which failed, and why the ranks may not be comparable, a sentence each."""
    for why in Absence:
        those = [each for each in ranks.missing if each.why is why]
        if why is Absence.NO_FILE and ranks.job.source == SourceKind.SIMULATED:
            continue  # one rank is simulated without the others
        if why in (Absence.NO_FILE, Absence.LIES_BESIDE):
            yield from [_not_given(why, those)] if those else []
        else:
            yield from (_unreadable(each) if why is Absence.NOTHING_RECORDED else _early(ranks, each) for each in those)
    yield from _behind(ranks)
    for rank in ranks.compared:
        if rank.failure is not None:
            after = "" if rank.last_step is None else f" after step {rank.last_step}"
            yield f"rank {rank.rank} failed{after}: {rank.failure}"
    yield from (f"note: {remark}" for remark in ranks.remarks)


def _behind(ranks: Ranks) -> Iterator[str]:
    """Which of those that are compared stopped before others did."""
    last = {rank.rank: rank.last_step for rank in ranks.ranks if rank.last_step is not None}
    furthest = max(last.values(), default=0)
    by_step: dict[int, list[int]] = {}
    for rank in ranks.compared:
        if last.get(rank.rank, furthest) < furthest:
            by_step.setdefault(last[rank.rank], []).append(rank.rank)
    got_on = [number for number, step in last.items() if step == furthest]
    for step, those in sorted(by_step.items()):
        yield f"{named(those)} recorded no step after step {step}; {named(got_on)} went on to step {furthest}"


def _not_given(why: Absence, those: Sequence[MissingRank]) -> str:
    who = named([each.rank for each in those])
    verb = "has" if len(those) == 1 else "have"
    if why is Absence.NO_FILE:
        return f"{who} {verb} no file"
    files = [each.file for each in those if each.file is not None]
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    was, lies = ("was", "lies") if len(those) == 1 else ("were", "lie")
    return f"{who} {was} not given, but {lies} beside: {shown}"


def _unreadable(missing: MissingRank) -> str:
    return f"rank {missing.rank} is left out: {missing.detail}"


def _early(ranks: Ranks, missing: MissingRank) -> str:
    ended = "no step" if missing.step is None else f"no step after {missing.step}"
    said = f"rank {missing.rank} is left out, it ended {ended}"
    if missing.rank in ranks.not_ended:
        return f"{said}, as the warning says"
    why = "its recording does not say why; it may have been killed" if missing.detail is None else missing.detail
    return f"{said}: {why}"


def _job(job: Job, layout: Layout) -> str:
    rows = [
        ("script", job.script or "?"),
        ("ranks", str(job.world_size)),
        ("device", f"{job.device.name} ({job.device.type}), events from {job.source}"),
        ("precision", arm_in_words(job.arm, job.source)),
        ("torch", f"{job.torch}, ampmem {job.ampmem}"),
    ]
    return "\n".join([layout.strong("the job"), *keyed(rows, layout)])


def _foot(ranks: Ranks) -> Iterator[str]:
    known = [rank.rank for rank in ranks.ranks if rank.residual_bytes == 0 and rank.rank not in ranks.unsound]
    if known:
        yield f"conservation: the sums of {named(known)} are the allocator's own at every event"
    for note, whose in _notes(ranks):
        if not is_warning(note):
            yield f"note ({whose}): {note}"


def _notes(ranks: Ranks) -> list[tuple[str, str]]:
    """What the recordings have to say, and which of them say it: once where the words are the same but for figures."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank in ranks.ranks:
        for note in rank.notes:
            if note == NOT_ENDED:
                continue  # said of all of them together
            found.setdefault(_FIGURE.sub("", note), {}).setdefault(note, []).append(rank.rank)
    return [_once(variants) for variants in found.values()]


def _once(variants: dict[str, list[int]]) -> tuple[str, str]:
    note, first = next(iter(variants.items()))
    whose = named([rank for those in variants.values() for rank in those])
    return note, whose if len(variants) == 1 else f"{whose}; the figures are those of rank {first[0]}"


def _next(ranks: Ranks, files: Sequence[str], layout: Layout, *, more: bool) -> str:
    """The commands for a page, for all, and for the worst rank by itself."""
    alone = None
    if ranks.worst is not None and len(ranks.ranks) > 1:
        which = "one rank" if len(ranks.alike) == 1 else "the worst rank"
        alone = (ranks.rank(ranks.worst.rank).file, f"{which} by itself")
    return render_next(files, layout, more=more, pattern=_pattern(ranks, files), alone=alone)


def _pattern(ranks: Ranks, files: Sequence[str]) -> str:
    """The files as a shell finds them; empty where that would be more or others."""
    jobs = {None if (named := rank_of(Path(file))) is None else named.job for file in files}
    job = jobs.pop()
    if jobs or job is None or any(each.why is Absence.LIES_BESIDE for each in ranks.missing):
        return ""
    return rank_pattern(job, ranks.job.world_size)
