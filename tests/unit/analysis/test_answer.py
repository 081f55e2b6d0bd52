"""What is said first: what mixed precision made of the peak, as data, in words, and beside the findings."""

import re
from dataclasses import replace

import pytest
from support.build import AMP, FP32, NO_CACHE, RUN, Story, predicted
from support.failures import OUT_OF_MEMORY, oom_at
from support.golden_sections import Golden

from ampmem.analysis.answer import Effect, Verdict, judged_findings, shared_findings, verdict_of, verdict_of_one
from ampmem.analysis.comparison import Entry, compare, entry_of
from ampmem.analysis.estimate import prediction_of
from ampmem.analysis.findings.base import Finding, Section
from ampmem.analysis.timeline.categories import Category
from ampmem.events import Fact, Phase, PrecisionRecord, Recording
from ampmem.reporters.html.comparison import compared_runs
from ampmem.reporters.html.verdict import verdict_view
from ampmem.reporters.text.answer import percent_of, portion, wording
from ampmem.reporters.text.compare import render_figures
from ampmem.reporters.text.layout import PLAIN
from ampmem.reporters.text.memory import render_peak
from ampmem.reporters.text.plain_text import percent

KIB = 1024
MIB = 1024 * KIB


def run(
    precision: PrecisionRecord = FP32,
    *,
    activations: int = 1000 * KIB,
    in_float32: int = 0,
    copies: int = 0,
    update: int = 0,
    phase: Phase = Phase.OPTIMIZER,
    script: str = "train.py",
) -> Recording:
    """One step: parameters of 200 KiB and their gradients, so much saved for backward, and so much for the update.

    ``phase`` is one that takes ``update`` bytes in place of the update.
    Of the activations ``in_float32`` are the loss's, and the rest what ``addmm`` saved, low under autocast.
    """
    story = Story(weight=50 * KIB)
    story.begin(0)
    story.enter(Phase.FORWARD)
    if copies:
        story.tensor(Fact.CAST_COPY, 0x2000, copies, "weight", op="aten::_to_copy")
    story.alloc(0x3000, activations - in_float32, op="aten::addmm")
    story.fact(Fact.SAVED, 0x3000, "aten::addmm", dtype="float32" if precision is FP32 else "bfloat16")
    if in_float32:
        story.tensor(Fact.SAVED, 0x5000, in_float32, "aten::_log_softmax", op="aten::_log_softmax", dtype="float32")
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x4000, 200 * KIB, "weight", op="AddmmBackward0")
    story.free(0x3000, *[0x5000] * bool(in_float32), *[0x2000] * bool(copies))
    story.enter(phase)
    if update:
        story.scratch(0x6000, update, op="aten::_foreach_add")
    story.end(loss=1.0)
    return story.recording(run=replace(RUN, script=script), precision=precision)


def verdict(*recordings: Recording) -> Verdict:
    return verdict_of(compare([entry_of(recording) for recording in recordings]))


def text(*recordings: Recording) -> str:
    return wording(verdict(*recordings)).text


SAVES = run(), run(AMP, activations=740 * KIB, in_float32=480 * KIB, copies=100 * KIB)
COSTS = run(), run(AMP, activations=980 * KIB, in_float32=960 * KIB, copies=100 * KIB)
IN_THE_UPDATE = run(update=3000 * KIB), run(AMP, activations=500 * KIB, copies=100 * KIB, update=3000 * KIB)
DIFFERENT_INSTANTS = run(update=900 * KIB), run(AMP, activations=400 * KIB, copies=100 * KIB, update=900 * KIB)


def test_amp_saves_and_the_parts_add_up() -> None:
    found = verdict(*SAVES).answer
    assert (found.baseline.bytes, found.mixed.bytes) == (1400 * KIB, 1240 * KIB)
    assert found.effect is Effect.SAVES
    assert sum(change.difference for change in found.changes) == found.mixed.bytes - found.baseline.bytes
    assert [(change.category, change.difference) for change in found.changes] == [
        (Category.ACTIVATIONS, -260 * KIB),
        (Category.CAST_COPIES, 100 * KIB),
    ]
    assert sum(change.before for change in found.unchanged) == 400 * KIB
    assert [(group.kind, group.bytes) for group in found.in_float32] == [("the loss", 480 * KIB)]


@pytest.mark.parametrize(
    "recordings",
    [SAVES, COSTS, IN_THE_UPDATE, DIFFERENT_INSTANTS],
    ids=["SAVES", "COSTS", "IN_THE_UPDATE", "DIFFERENT_INSTANTS"],
)
def test_the_answer_in_words(recordings: tuple[Recording, Recording], golden: Golden) -> None:
    golden(text(*recordings))


def test_activations_that_stay_float32_are_the_reason_only_where_they_are_enough() -> None:
    told = text(run(), run(AMP, activations=940 * KIB, in_float32=100 * KIB))
    assert "fall by 60.0 KiB, to 0.94x; 100.0 KiB of the loss are FP32 at the end of forward." in told
    assert "because" not in told


def test_a_half_is_called_a_half() -> None:
    told = text(run(activations=10_000 * KIB), run(AMP, activations=5000 * KIB))
    assert told.startswith("Mixed precision lowers the peak from 10.2 to 5.3 MiB, -48 %, to about half: activations ")
    assert "fall by 4.9 MiB, to about half." in told
    assert "are FP32" not in told


def test_peaks_in_two_phases_are_not_compared_with_each_other() -> None:
    shown = verdict_view(verdict(*DIFFERENT_INSTANTS)).waterfall
    assert shown is not None and shown.when == "at the end of forward of both"
    assert [(row.label, row.value) for row in shown.rows] == [
        ("fp32", "1.2 MiB"),
        ("Cast copies", "+100.0 KiB"),
        ("Activations", "-600.0 KiB"),
        ("amp", "700.0 KiB"),
    ]
    of_page = compared_runs(compare([entry_of(recording) for recording in DIFFERENT_INSTANTS]))
    assert of_page.waterfalls == ()


def test_peaks_of_other_phases_are_different_instants() -> None:
    found = verdict(*SAVES)
    forward = replace(found.answer.mixed, phase="forward", op="aten::nll_loss_forward")
    told = wording(replace(found, answer=replace(found.answer, mixed=forward))).text
    assert (
        "The peaks are at different instants: fp32's is in backward, at AddmmBackward0; amp's is in forward, at "
        in told
    )


def test_peaks_of_one_phase_with_other_gradients_are_different_instants() -> None:
    early = run(AMP, activations=900 * KIB)
    story_without = replace(early, events=early.events)
    found = verdict(run(), story_without).answer
    assert found.fewer_gradients == 0
    changes = tuple(
        replace(change, after=change.after - 150 * KIB) if change.category is Category.GRADIENTS else change
        for change in (*found.changes, *found.unchanged)
    )
    told = wording(replace(verdict(run(), early), answer=replace(found, changes=changes))).text
    assert (
        "Both peaks are in backward, but not at the same instant: at amp's 150.0 KiB fewer gradients are alive." in told
    )


@pytest.mark.parametrize(
    ("uncached", "words"),
    [
        (
            {"activations": 740 * KIB, "in_float32": 480 * KIB, "copies": 100 * KIB},
            "(amp-nocache) the peak is the same.",
        ),
        ({"activations": 740 * KIB, "in_float32": 480 * KIB, "copies": 150 * KIB}, "the peak is 50.0 KiB higher."),
        ({"activations": 740 * KIB, "in_float32": 480 * KIB, "copies": 40 * KIB}, "the peak is 60.0 KiB lower."),
    ],
)
def test_whether_the_cache_matters(uncached: dict[str, int], words: str) -> None:
    found = verdict(*SAVES, run(NO_CACHE, **uncached))
    assert wording(found).text.endswith(words)
    assert found.same_as == (None, None, 1 if words.endswith("is the same.") else None)


def test_next_to_no_activations_are_nothing_to_relate_to() -> None:
    both = [entry_of(run(activations=4)), entry_of(run(AMP, activations=8194))]
    assert [column.activation_ratio for column in compare(both).columns] == [None, None]


def test_sizes_that_differ_a_little_read_differently() -> None:
    told = text(run(activations=20_000 * KIB), run(AMP, activations=19_990 * KIB, in_float32=19_990 * KIB))
    assert told.startswith("Mixed precision hardly changes the peak, 19.92 MiB without it and 19.91 MiB with it: ")


def test_a_difference_of_a_few_bytes_has_no_digits_and_is_no_saving() -> None:
    both = run(update=30_000 * KIB), run(AMP, activations=500 * KIB, copies=800 * KIB, update=30_000 * KIB - 2)
    assert text(*both).startswith("Mixed precision hardly changes the peak, 29.7 MiB without and with it: ")
    assert "At the peak" not in text(*both)
    found = judged_findings(compare([entry_of(each) for each in both]))[1]
    assert "AMP does not lower the peak of fp32 (measured)." in [each.message for each in found]


def test_percentages_are_written_out() -> None:
    assert [percent(each) for each in (0.001234, 0.05, 0.5, 1.0, 12.0)] == ["0.12 %", "5 %", "50 %", "100 %", "1,200 %"]


def test_no_difference_reads_as_none_only_where_it_is_none() -> None:
    assert percent_of(-0.26) == "-26 %"
    assert percent_of(0.0004) == "+0.04 %"
    assert portion(1, 100_000) == "<1 %"
    assert portion(99_999, 100_000) == "99 %"
    assert portion(7, 7) == "100 %"


def test_a_failed_run_and_one_of_nothing() -> None:
    failed = replace(entry_of(SAVES[1]), failure="RuntimeError: no")
    nothing = Entry(label="amp-nocache", summary=None, failure="killed by SIGKILL")
    found = verdict_of(compare([failed, nothing]))
    assert found.answer is None
    assert wording(found).text == "Peaks: amp 1.2 MiB until it failed, amp-nocache has none, nothing was recorded."
    assert wording(verdict_of(compare([nothing, nothing]))).text == "Nothing was recorded."
    both = verdict_of(compare([entry_of(SAVES[0]), failed]))
    assert wording(both).text.endswith("400.0 KiB. amp failed after that step.")
    alone = verdict_of_one(failed.summary, failed=True)
    assert (
        wording(alone).headline
        == "Until the script failed, the peak is 1.2 MiB, in backward of step 0, at AddmmBackward0"
    )


def test_a_baseline_that_ran_out_of_memory_is_no_baseline() -> None:
    recording = SAVES[0]
    short = replace(
        recording,
        run=replace(recording.run, failure=OUT_OF_MEMORY),
        steps=(replace(recording.steps[0], finished=False),),
        ooms=(oom_at(recording.steps[0].end_ns, ()),),
    )
    found = verdict(short, SAVES[1])
    assert found.answer is None
    assert wording(found).text == "Peaks: fp32 ran out of memory at 400.0 KiB, amp 1.2 MiB."


def test_recordings_that_differ_in_more_than_precision_are_no_answer() -> None:
    found = verdict(SAVES[0], run(AMP, activations=740 * KIB, script="other.py"))
    assert found.answer is None
    assert wording(found).text == "Peaks: fp32 1.4 MiB, amp 1.1 MiB."


def test_wrong_sums_are_no_verdict() -> None:
    recording = SAVES[1]
    totals = recording.events.allocated.copy()
    totals[-1] += 4096
    wrong = replace(recording, events=replace(recording.events, allocated=totals))
    told = wording(verdict(SAVES[0], wrong))
    assert told.text == "No verdict: the sums of amp differ from the allocator's, see the warning."


def test_one_recording_is_told_what_its_peak_is_made_of(golden: Golden) -> None:
    found = verdict_of_one(entry_of(SAVES[1]).summary)
    golden(wording(found).text)
    (made,) = found.compositions
    assert sum(made.parts.values()) == made.peak.bytes == 1240 * KIB


def test_the_peak_of_an_allocator_is_what_it_has_handed_out() -> None:
    """The number that ``torch.cuda.max_memory_allocated()`` prints stands first, what was requested as its part."""
    entries = []
    for recording, allocated in zip(SAVES, (2048 * MIB, 1536 * MIB), strict=True):
        entry = entry_of(recording)
        of_all = replace(entry.summary.peak, allocated=allocated)
        steps = tuple(replace(step, peak=replace(step.peak, allocated=allocated)) for step in entry.summary.steps)
        whole = replace(entry.summary.whole, bytes=allocated, at_most=allocated)
        summary = replace(entry.summary, peak=of_all, steps=steps, whole=whole)
        entries.append(replace(entry, summary=summary))
    told = wording(verdict_of_one(entries[1].summary)).text
    assert told.startswith("The peak is 1.500 GiB allocated, 1.2 MiB of it requested, in backward of step 0, at Addmm")
    comparison = compare(entries)
    told = wording(verdict_of(comparison)).text
    assert told.startswith("Mixed precision lowers the peak from 2.000 to 1.500 GiB, -25 %, not to half: activations ")
    rows = dict(
        re.findall(r"^((?:peak|of which requested)(?: \S+)*?)  +(.*)$", render_figures(comparison, PLAIN), re.MULTILINE)
    )
    assert rows["peak"].split() == ["2.000", "GiB", "1.500", "GiB"]
    assert rows["of which requested"].split() == ["1.4", "MiB", "1.2", "MiB"]
    assert "-512.0 MiB" in rows["peak vs fp32"]
    table = render_peak(replace(entries[1].summary, parameters=replace(entries[1].summary.parameters, count=0)), PLAIN)
    assert [column.peak_difference for column in comparison.columns] == [0, -512 * MIB]
    assert [line.split() for line in table.splitlines()[-3:]] == [
        ["total", "1.2", "MiB", "100", "%"],
        ["rounding", "1.499", "GiB"],
        ["allocated", "1.500", "GiB"],
    ]


def test_the_largest_saving_is_that_of_a_finding_about_the_peak() -> None:
    summary = entry_of(SAVES[1]).summary

    def finding(code: str, size: int, off_peak: int | None) -> Finding:
        told = summary.findings[0]
        return replace(told, code=code, change=f"mend {code}", bytes=size, off_peak=off_peak)

    told = (finding("large", 900, None), finding("small", 10, 10), finding("most", 20, 20))
    found = verdict_of_one(replace(summary, findings=told))
    assert wording(found).text.endswith("Largest saving found, 20 B: mend most (most).")


@pytest.mark.parametrize(("free", "told"), [(None, "cache"), (50, "cache"), (51, "peak")])
def test_reserved_memory_is_the_largest_saving_only_where_half_of_the_device_is_taken(
    free: int | None, told: str
) -> None:
    summary = entry_of(SAVES[1]).summary
    cache, peak = (
        replace(summary.findings[0], code=code, change="", off_peak=off_peak, off_reserved=off_reserved)
        for code, off_peak, off_reserved in (("cache", None, 30), ("peak", 20, None))
    )
    prediction = None if free is None else prediction_of(predicted(100 - free, total=100))
    composition = verdict_of_one(replace(summary, findings=(cache, peak), prediction=prediction)).compositions[0]
    assert composition is not None and composition.saving is not None
    assert composition.saving.code == told


def codes(*recordings: Recording) -> dict[str, list[str]]:
    compared = compare([entry_of(recording) for recording in recordings])
    return {
        entry.label: [finding.code for finding in findings]
        for entry, findings in zip(compared.entries, judged_findings(compared), strict=True)
    }


def test_an_estimate_gives_way_to_what_was_measured() -> None:
    alone = entry_of(SAVES[1]).summary
    assert [finding.code for finding in alone.findings] == ["fp32-activations", "amp-saves"]
    assert codes(*SAVES) == {"fp32": [], "amp": ["fp32-activations"]}
    for recordings in (COSTS, IN_THE_UPDATE):
        compared = compare([entry_of(recording) for recording in recordings])
        for finding in judged_findings(compared)[1]:
            assert "estimate" not in finding.message


def test_a_loss_is_told_as_measured() -> None:
    compared = compare([entry_of(recording) for recording in COSTS])
    (finding,) = [found for found in judged_findings(compared)[1] if found.code == "amp-saves-nothing"]
    assert verdict(*COSTS).answer.effect is Effect.COSTS
    assert (finding.severity, finding.bytes) == ("warning", 80 * KIB)
    assert finding.message == "AMP needs 80.0 KiB more than fp32 at the peak (measured)."
    assert finding.evidence == (
        "cast_copies at the end of forward: 0 B in fp32, 100.0 KiB in amp",
        "activations at the end of forward: 1000.0 KiB in fp32, 980.0 KiB in amp",
    )


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        (Phase.OPTIMIZER, "no precision lowers it: the peak is in the optimizer's update"),
        (
            Phase.EVALUATION,
            "no training batch size lowers it: the peak is in evaluation, where nothing is saved for backward",
        ),
    ],
)
def test_where_the_update_or_an_evaluation_sets_the_peak_no_batch_size_is_named(phase: Phase, change: str) -> None:
    big = run(AMP, activations=995 * KIB, in_float32=990 * KIB, copies=100 * KIB, update=3000 * KIB, phase=phase)
    compared = compare([entry_of(run(update=3000 * KIB, phase=phase)), entry_of(big)])
    (finding,) = [found for found in judged_findings(compared)[1] if found.code == "amp-saves-nothing"]
    assert finding.severity == "info"
    assert finding.change.startswith(change)


def test_other_scripts_judge_nothing() -> None:
    assert codes(SAVES[0], run(AMP, activations=740 * KIB, script="other.py"))["amp"] == ["amp-saves"]


def test_a_finding_that_recordings_share_is_told_once() -> None:
    uncached = replace(COSTS[1], precision=NO_CACHE)
    compared = compare([entry_of(recording) for recording in (*COSTS, uncached)])
    shared = [(found.code, labels) for found, labels in shared_findings(compared)]
    assert shared.count(("amp-saves-nothing", ["amp", "amp-nocache"])) == 1


def test_a_change_that_saves_more_in_one_precision_is_told_of_each() -> None:
    told = Finding(code="x", severity="advice", section=Section.PEAK, message="m", bytes=9, change="c", evidence=())
    entries = [entry_of(recording) for recording in SAVES]
    of_precisions = [replace(told, off_peak=size) for size in (7 * KIB, 6 * KIB)]
    entries = [
        replace(entry, summary=replace(entry.summary, findings=(finding,)))
        for entry, finding in zip(entries, of_precisions, strict=True)
        if entry.summary is not None
    ]
    shared = [(found.saves, labels) for found, labels in shared_findings(compare(entries))]
    assert shared == [("7.0 KiB off the peak", ["fp32"]), ("6.0 KiB off the peak", ["amp"])]


def judged_of_the_cache(
    code: str, precision: PrecisionRecord, *, copies: int, other_copies: int, update: int = 0
) -> list[Finding]:
    """What becomes of an estimate about the cache in a run under ``precision``, beside the run with it switched."""
    other = AMP if precision is NO_CACHE else NO_CACHE
    runs = [
        entry_of(run(which, activations=500 * KIB, copies=size, update=update))
        for which, size in ((precision, copies), (other, other_copies))
    ]
    summary = runs[0].summary
    estimate = Finding(
        code=code,
        severity="advice",
        section=Section.CASTS,
        message="an estimate",
        bytes=7,
        change="switch it",
        evidence=(),
    )
    mine = replace(runs[0], summary=replace(summary, findings=(estimate,)))
    return list(judged_findings(compare([mine, runs[1]]))[0])


def test_what_the_cache_takes_is_what_the_run_without_it_took_less() -> None:
    (finding,) = judged_of_the_cache("cache-off-saves", AMP, copies=100 * KIB, other_copies=40 * KIB)
    assert (finding.severity, finding.bytes, finding.off_peak) == ("advice", 60 * KIB, 60 * KIB)
    assert finding.message == (
        "without autocast's cache (amp-nocache) the cast copies take 60.0 KiB less at their peak, and the run's peak "
        "is 60.0 KiB lower."
    )


def test_what_does_not_lower_the_peak_is_no_advice() -> None:
    (finding,) = judged_of_the_cache(
        "cache-on-saves", NO_CACHE, copies=100 * KIB, other_copies=40 * KIB, update=9000 * KIB
    )
    assert (finding.severity, finding.bytes, finding.off_peak) == ("info", 60 * KIB, None)
    assert finding.message.endswith("(amp) they take 60.0 KiB less at their peak, but the run's peak is not lower.")


@pytest.mark.parametrize("code", ["cache-off-saves", "cache-off-costs"])
def test_an_estimate_that_the_other_run_does_not_bear_out_is_not_told(code: str) -> None:
    assert judged_of_the_cache(code, AMP, copies=100 * KIB, other_copies=100 * KIB) == []


def test_what_the_cache_spares_is_told_with_what_the_peak_would_be() -> None:
    (finding,) = judged_of_the_cache("cache-off-costs", AMP, copies=40 * KIB, other_copies=100 * KIB)
    assert (finding.severity, finding.bytes) == ("advice", 60 * KIB)
    assert finding.message.endswith("take 60.0 KiB more at their peak, and the run's peak is 60.0 KiB higher.")


def test_a_little_is_told_as_a_little() -> None:
    small = run(update=30_000 * KIB), run(AMP, activations=500 * KIB, copies=800 * KIB, update=29_900 * KIB)
    (finding,) = [
        found for found in judged_findings(compare([entry_of(each) for each in small]))[1] if "saves" in found.code
    ]
    assert finding.message == "AMP lowers the peak of fp32 by only 100.0 KiB (measured)."


def test_no_batch_size_is_advised_where_the_update_sets_the_peak() -> None:
    recording = run(AMP, activations=500 * KIB, copies=600 * KIB, update=3000 * KIB)
    loaded = replace(recording, steps=(replace(recording.steps[0], batch_size=8, batch_loaded=True),))
    for each, advised in ((loaded, False), (run_with_batch(8), True)):
        summary = entry_of(each).summary
        (finding,) = [found for found in summary.findings if found.code == "amp-saves-nothing"]
        assert ("batch_size >=" in finding.change) == ("from batch size" in finding.message) == advised


def run_with_batch(size: int) -> Recording:
    """Copies cost more than the activations save, and the peak is in backward."""
    recording = run(AMP, activations=500 * KIB, copies=600 * KIB)
    return replace(recording, steps=(replace(recording.steps[0], batch_size=size, batch_loaded=True),))
