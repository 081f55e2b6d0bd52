"""Writes the page of recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ampmem.analysis.advise import SCHEMA as ADVICE
from ampmem.analysis.advise import AdviceDocument
from ampmem.analysis.advised import Advised
from ampmem.analysis.answer import judged_findings, verdict_of, verdict_of_one
from ampmem.analysis.comparison import Comparison, Entry, compare, distinct
from ampmem.analysis.difference.difference import SCHEMA as DIFFERENCE
from ampmem.analysis.difference.difference import Difference
from ampmem.analysis.difference.sides import PRINTED_SUMMARY, Printed, Side, is_json, printed_in
from ampmem.analysis.fine_tuning import SCHEMA as ESTIMATE
from ampmem.analysis.fine_tuning import Estimate
from ampmem.analysis.fit import SCHEMA as FIT
from ampmem.analysis.fit import FitResult
from ampmem.analysis.ranks.jobs import are_ranks, read_runs
from ampmem.analysis.ranks.merge import Jobs, merge_all
from ampmem.analysis.ranks.ranks import SCHEMA as RANKS
from ampmem.analysis.ranks.ranks import Ranks
from ampmem.analysis.summary import Summary
from ampmem.errors import UsageError
from ampmem.output import check_output, write_text
from ampmem.recording import check_recording, rank_of, world_size_of
from ampmem.reporters.html.advise_page import advice_view
from ampmem.reporters.html.comparison import changes_view, compared_runs, difference_headline, difference_verdict
from ampmem.reporters.html.estimate_page import render_estimate_page
from ampmem.reporters.html.fit_page import fit_view
from ampmem.reporters.html.page import PageView, opens_on, page_view, render, render_chart
from ampmem.reporters.html.progress import PageProgress
from ampmem.reporters.html.ranks import job_view, ranks_verdict_view
from ampmem.reporters.html.run import RunView, column, column_of, packed_words, said_of
from ampmem.reporters.html.verdict import VerdictView, verdict_view
from ampmem.reporters.text.ranks import heading, jobs_wording

_Shown: TypeAlias = PageView | FitResult | AdviceDocument | Estimate
"""What a page is made of."""

MOST_PAGES = 8
"""With at most this many ranks, all ranks' whole pages are in the file."""


def ranks_page(jobs: Sequence[Ranks]) -> PageView:
    """The page of ``jobs`` without the pages of single ranks; of several the verdict is on the first."""
    verdict = ranks_verdict_view(jobs[0])
    if len(jobs) > 1:
        verdict = replace(verdict, headline=f"{heading(jobs[0])}: {verdict.headline}")
    return page_view((), None, verdict, job=job_view(jobs, [{}] * len(jobs), ""))


def _labels(ranks: Ranks, numbers: Sequence[int], jobs: Sequence[Ranks]) -> dict[int, str]:
    """By rank, the labels of the runs of these ranks: ``rank 3``, ``amp rank 3``."""
    if len(jobs) == 1:
        return {number: f"rank {number}" for number in sorted(numbers)}
    precisions = [job.job.precision.name for job in jobs]
    precision = ranks.job.precision.name
    return {
        number: f"{precision if precisions.count(precision) == 1 else heading(ranks)} rank {number}"
        for number in sorted(numbers)
    }


def _of_worst(jobs: Jobs, comparison: Comparison) -> VerdictView:
    """The verdict on the worst rank of each precision, side by side."""
    view = verdict_view(verdict_of(comparison), jobs_wording(jobs, comparison))
    return replace(view, waterfall=None) if any(ranks.unsound for ranks in jobs.jobs) else view


def ranks_shown(ranks: Ranks, most: int) -> tuple[int, ...]:
    """The ranks whose pages are in the file, the worst first: at most ``most``, all if there are no more.

    Else these are the worst rank, failed ranks, and one rank of each class of equal ranks: first the median rank's,
    then the least, then by peak.
    """
    worst, every = ranks.worst, [rank.rank for rank in ranks.ranks]
    first = [] if worst is None else [worst.rank]
    if len(every) <= most:
        return tuple(dict.fromkeys([*first, *every]))
    failed = [rank.rank for rank in ranks.ranks if rank.failure is not None or rank.out_of_memory is not None]
    told = [] if worst is None else [worst.rank, worst.over_median.rank, worst.over_least.rank]
    largest = sorted((alike.ranks[0] for alike in ranks.alike), key=lambda number: -ranks.rank(number).peak_bytes)
    class_of = {number: alike.ranks[0] for alike in ranks.alike for number in alike.ranks}
    by_class: dict[int, int] = {}
    for number in (*told, *largest):
        by_class.setdefault(class_of[number], number)
    return tuple(dict.fromkeys([*first, *failed, *by_class.values()]))[:most] or tuple(every[:1])


STREAM_LIMIT = 8_000_000
"""The most bytes of the page for the events of one recording."""

STREAMS_LIMIT = 24_000_000
"""The most bytes of the page for the events of all recordings."""


def write(
    recordings: Sequence[Path],
    output: Path,
    *,
    force: bool = False,
    advised: Advised | None = None,
    compiling: Sequence[Difference] = (),
) -> None:
    """Write the page of ``recordings``, or of JSON that ampmem printed, to ``output``.

    Several recordings are compared, and ranks of one job merged. Findings that ``advised`` disproves are left out.
    ``compiling`` is what compiling changes in each precision.

    Raises :class:`~ampmem.errors.UsageError` when there is no recording, one is missing or ``output`` cannot be written
    (it exists, without ``force``, or is one of the recordings), and what reading and summing up a recording raises.
    """
    if not recordings:
        raise UsageError("there is nothing to report on: give at least one recording")
    # An unwritable output must fail before the work, not after it.
    for path in recordings:
        if (rank_of(path) is None or len(recordings) == 1) and not is_json(path):  # a missing rank is dealt with later
            check_recording(path)
    for path in recordings:
        check_output(output, force=force, source=path)
    with PageProgress() as progress:
        maker = _PageMaker(room=STREAMS_LIMIT, progress=progress, advised=advised, compiling=compiling)
        _write(maker.page(recordings), output, progress, force=force)


def write_difference(before: Side, after: Side, found: Difference, output: Path, *, force: bool = False) -> None:
    """Write the page of ``found``, the difference of two sides, and of the sides themselves, to ``output``.

    Raises :class:`~ampmem.errors.UsageError` when ``output`` cannot be written (it exists, without ``force``).
    """
    check_output(output, force=force)
    with PageProgress() as progress:
        files = {label: side.file for label, side in (("before", before), ("after", after)) if side.file is not None}
        view = _PageMaker(room=STREAMS_LIMIT, progress=progress).of_difference(found, files)
        _write(view, output, progress, force=force)


def _write(view: _Shown, output: Path, progress: PageProgress, *, force: bool) -> None:
    progress.say(f"writing {output.name}")
    write_text(output, _rendered(view), force=force)


def write_advice(
    found: AdviceDocument, output: Path, *, before: Path, after: Path | None = None, force: bool = False
) -> list[Path]:
    """Write the page of ``found`` and, next to it, the replaced pages of two recordings; returns all paths.

    ``before`` is the recording of the unchanged script, ``after`` that of the best change. Raises
    :class:`~ampmem.errors.UsageError` when ``output`` cannot be written.
    """
    check_output(output, force=force)
    links: list[tuple[str, str]] = []
    pages: list[Path] = []
    for part, recording in (("before", before), ("after", after)):
        if recording is not None:
            page = output.with_name(f"{output.stem}.{part}.html")
            write([recording], page, force=True)
            name = "the script as it is" if part == "before" else found.runs[0].change
            links.append((f"timeline of {name}", page.name))
            pages.append(page)
    write_text(output, render_chart("advise", advice_view(found, tuple(links))), force=force)
    return [output, *pages]


def page_of(recordings: Sequence[Path], room: int) -> str:
    """The HTML of ``recordings``, in which all events take at most ``room`` bytes, except reduced ones.

    Raises what :func:`write` raises about recordings.
    """
    with PageProgress() as progress:
        return _rendered(_PageMaker(room=room, progress=progress).page(recordings))


def _rendered(view: _Shown) -> str:
    if isinstance(view, PageView):
        return render(view)
    if isinstance(view, Estimate):
        return render_estimate_page(view)
    kind, shown = ("fit", fit_view(view)) if isinstance(view, FitResult) else ("advise", advice_view(view))
    return render_chart(kind, shown)


_PRINTED = (
    PRINTED_SUMMARY,
    Printed(schema=RANKS, of=Ranks, what="a merged view of ranks", command="ampmem show --ranks --json"),
    Printed(schema=DIFFERENCE, of=Difference, what="a difference", command="ampmem diff --json"),
    Printed(schema=FIT, of=FitResult, what="a fit", command="ampmem fit --json"),
    Printed(schema=ADVICE, of=AdviceDocument, what="advice", command="ampmem advise --json"),
    Printed(schema=ESTIMATE, of=Estimate, what="an estimate", command="ampmem estimate --json"),
)
"""The JSON that a page can be made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageMaker:
    """Makes pages in which all events take at most ``room`` bytes; findings that ``advised`` disproves are left out.

    ``compiling`` is what compiling changes in each precision.
    """

    room: int
    progress: PageProgress
    advised: Advised | None = None
    compiling: Sequence[Difference] = ()

    def page(self, recordings: Sequence[Path]) -> _Shown:
        """The page of ``recordings`` or of printed JSON; others than recordings have kinds of their own."""
        printed = {path: printed_in(path, _PRINTED) for path in recordings if is_json(path)}
        compiling = self.compiling
        for path, those in printed.items():
            if isinstance(those[0], Summary):  # compare --compile prints differences after the summaries
                compiling = [*compiling, *(each for each in those if isinstance(each, Difference))]
                printed[path] = [each for each in those if not isinstance(each, Difference)]
        found = [each for those in printed.values() for each in those]
        if all(isinstance(each, Summary) for each in found):
            return self._of_ranks(recordings) or self._of_each(recordings, printed, compiling)
        if len(printed) == len(recordings) and all(isinstance(each, Ranks) for each in found):
            return ranks_page(found)
        if len(recordings) == len(found) == 1 and isinstance(found[0], Difference):
            page = self.of_difference(found[0], {})
            json_only = "This page was made from JSON, without the runs' own pages."
            more = " ".join(filter(None, (page.verdict.more, json_only)))
            return replace(page, verdict=replace(page.verdict, more=more))
        if len(recordings) == len(found) == 1 and isinstance(found[0], FitResult | AdviceDocument | Estimate):
            return found[0]
        path = next(path for path, those in printed.items() if not all(isinstance(each, Summary) for each in those))
        raise UsageError(f"{path} cannot be compared with other files: report on it alone")

    def _column(self, path: Path, runs: int) -> tuple[Entry, RunView]:
        """The recording at ``path``, one of ``runs`` on the page, which share the room for events."""
        return column(path, min(STREAM_LIMIT, self.room // runs), self.progress, self.advised)

    def of_difference(self, found: Difference, files: Mapping[str, Path]) -> PageView:
        """The page of ``found``, with the pages of the recordings ``files``, which are its sides by their labels."""
        shown = [replace(self._column(file, 2)[1], label=label) for label, file in files.items()]
        return page_view(
            tuple(shown), None, difference_verdict(found), changes=changes_view(found), opens=max(0, len(shown) - 1)
        )

    def _of_ranks(self, recordings: Sequence[Path]) -> PageView | None:
        """The page of the job whose ranks ``recordings`` are, in one precision or several; ``None`` for other files.

        Raises what :func:`~ampmem.analysis.ranks.merge.merge_all` raises.
        """
        if len(recordings) < 2 or all(world_size_of(path) == 1 for path in recordings):
            return None
        self.progress.say(f"reading {len(recordings)} recordings")
        runs = read_runs(recordings)
        if not are_ranks(runs):
            return None
        merged = merge_all(runs)
        jobs, comparison = merged.jobs, merged.comparison
        chosen = [ranks_shown(ranks, max(1, MOST_PAGES // len(jobs))) for ranks in jobs]
        pages = [_labels(ranks, numbers, jobs) for ranks, numbers in zip(jobs, chosen, strict=True)]
        count = sum(map(len, chosen))
        shown = [
            replace(self._column(Path(ranks.rank(number).file), count)[1], label=each[number])
            for ranks, each in zip(jobs, pages, strict=True)
            for number in each
        ]
        open_precision = opens_on([ranks.job.precision.name for ranks in jobs])
        opens = pages[open_precision][chosen[open_precision][0]]
        return page_view(
            tuple(shown),
            None if comparison is None else compared_runs(comparison),
            ranks_verdict_view(jobs[0]) if comparison is None else _of_worst(merged, comparison),
            job=job_view(jobs, pages, opens),
            opens=[run.label for run in shown].index(opens),
        )

    def _of_each(
        self, recordings: Sequence[Path], printed: Mapping[Path, Sequence[Summary]], compiling: Sequence[Difference]
    ) -> PageView:
        """The page of all recordings, and of the summaries ``printed`` in some of the files, side by side."""
        columns, names = [], []
        for path in recordings:
            if path in printed:
                found = [column_of(summary, path.name) for summary in printed[path]]
            else:
                found = [self._column(path, len(recordings))]
            columns += found
            names += [path.name] * len(found)
        entries, runs = distinct([entry for entry, _ in columns], names), [run for _, run in columns]
        if len(runs) == 1:
            (entry,) = entries
            verdict = verdict_of_one(entry.summary, label=entry.label, failed=entry.failure is not None)
            return page_view(tuple(runs), None, verdict_view(verdict))
        comparison = compare(entries)
        named = []
        for index, (entry, run, judged) in enumerate(zip(entries, runs, judged_findings(comparison), strict=True)):
            if entry.summary is not None:
                said = said_of(entry.summary, judged, difference_headline(comparison, index))
                named.append(replace(run, label=entry.label, packed=packed_words(entry.summary, said)))
        return page_view(tuple(named), compared_runs(comparison, compiling), verdict_view(verdict_of(comparison)))
