import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.build import AMP, NO_CACHE, Story, predicted, small_run, write
from support.build import precision_run as run

import ampmem
from ampmem.analysis.comparison import Comparison, Entry, compare, distinct, entry_of
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import Category
from ampmem.cli.show import show
from ampmem.errors import NothingRecorded, UsageError
from ampmem.events import Recording
from ampmem.failure import failure_of
from ampmem.reporters.base import EVERYTHING, Detail
from ampmem.reporters.text.compare import render
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.plain_text import WIDTH
from ampmem.vocabulary import Mark


def entries(*recordings: Recording) -> list[Entry]:
    return [entry_of(recording) for recording in recordings]


def each(comparison: Comparison, name: str) -> tuple[Any, ...]:
    return tuple(getattr(column, name) for column in comparison.columns)


def steps_of(comparison: Comparison) -> tuple[int | None, ...]:
    return tuple(step and step.index for step in each(comparison, "step"))


FAILED = Entry(label="amp-nocache", summary=None, failure="killed by SIGKILL")


def test_the_numbers() -> None:
    fp32 = run(plain=(4000, 1000, 2000))
    amp = run(AMP, activations=500, copies=200, losses=(2.02, 1.005), plain=(3000, 5000))
    comparison = compare([*entries(fp32, amp), FAILED])
    assert comparison.baseline == 0
    assert steps_of(comparison) == (1, 1, None)
    assert [column.total(Mark.AFTER_FORWARD) for column in comparison.columns] == [1200, 1100, None]
    forward = comparison.columns[1].live(Mark.AFTER_FORWARD)
    assert forward is not None and forward[Category.CAST_COPIES] == 200
    for mark in (Mark.AFTER_BACKWARD, Mark.AFTER_OPTIMIZER):
        assert [column.total(mark) for column in comparison.columns] == [800, 800, None]
    assert [column.peak for column in comparison.columns] == [1600, 1500, None]
    assert each(comparison, "peak_difference") == (0, -100, None)
    assert each(comparison, "activation_ratio") == (1.0, 0.625, None)
    assert each(comparison, "low_precision")[2] is each(comparison, "peak_reserved")[2] is None
    times = each(comparison, "step_time")
    assert times[0] is not None and times[1] is not None
    assert (times[0].median_ns, times[0].fastest_ns, times[0].slowest_ns, times[0].ratio) == (2000, 1000, 4000, 1.0)
    assert (times[1].median_ns, times[1].ratio) == (4000, 2.0)
    assert times[2] is None
    assert comparison.losses == {0: (2.0, 2.02, None), 1: (1.0, 1.005, None)}
    assert each(comparison, "loss_difference") == (0.0, pytest.approx(0.01), None)
    assert comparison.remarks == ()


def test_of_simulated_gpus_the_most_is_told_beside_what_is_likely() -> None:
    sure = predicted(3 << 20, outside=1 << 20)
    unsure = replace(sure, bounds={"workspaces": 4 << 20}, highest_reserved=9 << 20)
    alone = render(compare(entries(replace(run(), prediction=sure), replace(run(AMP), prediction=sure))))
    assert "total on the GPU" in alone and "total, up to" not in alone
    both = render(compare(entries(replace(run(), prediction=sure), replace(run(AMP), prediction=unsure))))
    (row,) = (line.split() for line in both.splitlines() if line.startswith("total, up to"))
    assert row[-2:] == ["10.0", "MiB"]


def test_the_baseline_is_the_first_fp32_wherever_it_stands() -> None:
    comparison = compare(entries(run(AMP, activations=400), run(NO_CACHE), run(), run(activations=1600)))
    assert comparison.baseline == 2
    assert each(comparison, "activation_ratio") == (0.5, 1.0, 1.0, 2.0)


def test_without_fp32_there_is_nothing_to_relate_to() -> None:
    comparison = compare(entries(run(AMP, plain=(5,)), run(NO_CACHE, plain=(7,))))
    assert comparison.baseline is None
    nothing = (None, None)
    for name in ("activation_ratio", "peak_difference", "loss_difference"):
        assert each(comparison, name) == nothing
    assert [time and time.ratio for time in each(comparison, "step_time")] == [None, None]
    text = render(comparison)
    assert "fp32" not in text and "rule of thumb" not in text


@pytest.mark.parametrize(
    ("skipped", "steps"),
    [
        (((), ()), (2, 2)),
        (((), (2,)), (1, 1)),
        (((0, 2), (1,)), (2, 3)),
    ],
    ids=["all done", "the last skipped in one", "none done in both"],
)
def test_the_step_is_the_last_that_all_did(skipped: tuple[tuple[int, ...], tuple[int, ...]], steps: object) -> None:
    fp32 = run(losses=(3.0, 2.0, 1.0), skipped=skipped[0])
    amp = run(AMP, losses=(3.0, 2.0, 1.0, 0.5), skipped=skipped[1])
    assert steps_of(compare(entries(fp32, amp))) == steps


def test_the_last_batch_of_a_loader_is_not_compared_where_it_is_smaller() -> None:
    def loaded(recording: Recording, *, loader: bool = True) -> Recording:
        steps = [
            replace(step, batch_size=size, batch_loaded=loader)
            for step, size in zip(recording.steps, (8, 8, 3), strict=True)
        ]
        return replace(recording, steps=tuple(steps))

    three = {"losses": (2.0, 1.0, 0.5)}
    assert steps_of(compare(entries(loaded(run(**three)), loaded(run(AMP, **three))))) == (1, 1)
    unknown = loaded(run(**three), loader=False), loaded(run(AMP, **three), loader=False)
    assert steps_of(compare(entries(*unknown))) == (2, 2)


def test_the_step_is_one_that_a_failed_precision_has_too() -> None:
    amp = replace(entry_of(run(AMP, losses=(2.0,))), failure="RuntimeError: out of memory")
    comparison = compare([*entries(run()), amp])
    assert steps_of(comparison) == (0, 0)
    assert [*comparison.losses.values()] == [(2.0, 2.0), (1.0, None)]
    assert "amp failed: RuntimeError: out of memory; it recorded 1 step" in render(comparison)


@pytest.mark.parametrize(
    ("mine", "base", "difference"),
    [
        ((1.1, 3.0), (1.0, 2.0), 0.5),
        ((1.0, None), (1.0, 2.0), 0.0),
        ((1.0,), (0.0,), None),
        ((-3.0,), (-2.0,), 0.5),
        ((math.inf, 1.0), (1.0, 1.0), math.inf),
        ((math.inf,), (math.inf,), None),
        ((None,), (None,), None),
    ],
)
def test_loss_difference(
    mine: tuple[float | None, ...], base: tuple[float | None, ...], difference: float | None
) -> None:
    comparison = compare(entries(run(losses=base), run(AMP, losses=mine)))
    assert comparison.columns[1].loss_difference == (None if difference is None else pytest.approx(difference))
    assert ("not finite" in render(comparison)) == (difference == math.inf)


def test_what_makes_recordings_unlike_is_said() -> None:
    comparison = compare(entries(run(), run(AMP, elements=200, script="other.py")))
    parameters, scripts = comparison.remarks
    assert "fp32: 100 in 400 B; amp: 200 in 800 B" in parameters
    assert "fp32: train.py --epochs 1; amp: other.py --epochs 1" in scripts
    assert all(f"note: the {what} differ" in render(comparison) for what in ("parameters", "scripts"))


def test_what_differs_in_more_than_precision_is_held_against_nothing() -> None:
    unlike = compare(entries(run(plain=(5,)), run(AMP, activations=400, script="other.py", plain=(7,))))
    assert unlike.baseline is None
    nothing = (None, None)
    for name in ("peak_difference", "activation_ratio", "loss_difference"):
        assert each(unlike, name) == nothing
    assert [column.total(Mark.PEAK) for column in unlike.columns] == [1600, 1200]
    text = render(unlike)
    assert "vs fp32" not in text and "rule of thumb" not in text
    assert text.index("note: the scripts differ") < text.index("figures")
    assert "script      " not in text, "neither's is that of the runs"


def test_notes_name_the_recordings_that_have_them() -> None:
    both, one = "ampmem wrapped it", "only here"
    text = render(compare(entries(run(), run(AMP, notes=(both,)), run(NO_CACHE, notes=(both, one)))))
    assert f"note (amp, amp-nocache): {both}" in text
    assert f"note (amp-nocache): {one}" in text


def test_a_recording_knows_that_its_script_failed() -> None:
    failure = failure_of(RuntimeError("boom"))
    recording = run(AMP, notes=(failure.note, "and this"))
    entry = entry_of(replace(recording, run=replace(recording.run, failure=failure)))
    assert (entry.failure, entry.notes) == ("RuntimeError: boom", ("and this",))


def test_nothing_at_all_is_still_a_report() -> None:
    text = render(compare([replace(FAILED, script="train.py"), replace(FAILED, label="amp")]))
    assert text.splitlines() == [
        "Nothing was recorded.",
        "",
        "amp-nocache failed: killed by SIGKILL",
        "amp failed: killed by SIGKILL",
        "",
        "the runs",
        "script      train.py",
        "precision   amp-nocache (failed)",
        "            amp (failed)",
    ]


@pytest.mark.parametrize(
    ("precisions", "names", "labels"),
    [
        (("fp32", "amp"), ("a", "b"), ["fp32", "amp"]),
        (("amp", "amp", "fp32"), ("a", "b", "c"), ["amp a", "amp b", "fp32"]),
        (("amp", "amp"), ("a", "a"), ["amp a #1", "amp a #2"]),
        (("amp", "amp"), ("", ""), ["amp #1", "amp #2"]),
    ],
)
def test_labels(precisions: tuple[str, ...], names: tuple[str, ...], labels: list[str]) -> None:
    plain = [Entry(label=precision, summary=None) for precision in precisions]
    assert [entry.label for entry in distinct(plain, names)] == labels


def test_many_entries_are_spread_over_tables() -> None:
    many = [replace(entry_of(run(AMP, activations=100 * i)), label=f"run{i}") for i in range(1, 8)]
    text = render(compare(many), layout=Layout(width=60), details=frozenset({Detail.MARKS}))
    block = text[text.index("at the end of forward") : text.index("after backward")]
    heads = [line.replace("param", "").split() for line in block.splitlines() if "run" in line]
    last = ["run4", "run5", "run6", "run7"]  # their bytes per parameter, for which there is no room, follow
    assert heads == [["run1", "run2", "run3"], last, last]
    totals = [line for line in block.splitlines() if line.startswith("total")]
    assert [line.split()[1] for line in totals] == ["500", "800", "8.00"]


def test_bytes_per_parameter_are_left_out_before_recordings_are_parted() -> None:
    five = compare([replace(entry_of(run(AMP, activations=100 * i)), label=f"run{i}") for i in range(1, 6)])

    def heads(width: int) -> list[str]:
        peak = render(five, layout=Layout(width=width)).split("\n\n")[2].splitlines()
        return [" ".join(line.split()) for line in peak[: [line[:1] for line in peak].index("-")]]

    assert heads(100) == ["B/ B/ B/ B/ B/", "run1 param run2 param run3 param run4 param run5 param"]
    assert heads(70) == ["run1 run2 run3 run4 run5"]


def test_of_many_losses_the_first_and_the_last_are_shown() -> None:
    text = render(compare(entries(run(losses=tuple(float(i) for i in range(1, 21))))), details=EVERYTHING)
    rows = text[text.index("losses\n") :].splitlines()[4:]
    assert [row.split()[0] for row in rows[:7]] == ["0", "1", "2", "3", "4", "…", "19"]


def widest(count: int) -> Comparison:
    """Labels of 300 characters with control characters in them, and figures at their widest."""
    ugly = "\x1b[31m" + "x" * 150 + "\n " + "y" * 150
    recording = run(AMP, losses=(-1.23456e-300, 1.0), plain=(1, 999_999_000_000_000), notes=(ugly,), script=ugly)
    entry = replace(entry_of(recording), label=ugly, failure=ugly * 3)
    huge = dict.fromkeys(entry.summary.peak.categories, (1023 * 2**40 + 900 * 2**30))
    (*_, last) = entry.summary.steps
    marks = replace(last.marks, after_forward=huge, after_backward=huge, after_optimizer=huge)
    step = replace(last, marks=marks, peak=replace(last.peak, categories=huge))
    device = replace(entry.summary.device, name=ugly)
    summary = replace(entry.summary, steps=(step,), device=device, torch=ugly)
    many = [replace(entry, summary=summary, label=ugly + str(i)) for i in range(count)]
    return compare([*entries(run(plain=(1,))), *many])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 6])
def test_nothing_is_ever_wider_than_the_page(count: int) -> None:
    text = render(widest(count), details=EVERYTHING)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(character.isprintable() or character == "\n" for character in text)


def test_show_of_several_files_is_their_comparison(tmp_path: Path) -> None:
    fp32, amp = write(tmp_path / "a.ampmem", run()), write(tmp_path / "b.ampmem", run(AMP, activations=400))
    done = CliRunner().invoke(show, [str(fp32), str(amp)], catch_exceptions=False)
    assert done.output == render(ampmem.compare(fp32, str(amp)), files=[str(fp32), str(amp)]) + "\n"
    assert "rule of thumb: under autocast activations take 0.5x of fp32's" in done.output
    for option in ("--each", "--steps"):
        each = CliRunner().invoke(show, [option, str(fp32), str(amp)], catch_exceptions=False)
        assert each.output.startswith(done.output + "\n" + "=" * WIDTH)
        assert each.output.count("the peak by category") == 2
    as_json = CliRunner().invoke(show, ["--json", str(fp32), str(amp)], catch_exceptions=False)
    assert [summary["arm"]["name"] for summary in json.loads(as_json.output)] == ["fp32", "amp"]


def test_show_labels_files_of_one_precision_with_their_names(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, run(AMP)) for name in ("a.ampmem", "b.ampmem")]
    done = CliRunner().invoke(show, list(map(str, paths)), catch_exceptions=False)
    assert "amp a.ampmem: amp, bfloat16, cache on" in done.output


def test_show_names_the_one_of_several_that_is_at_fault(tmp_path: Path) -> None:
    good, empty = write(tmp_path / "good.ampmem", run()), write(tmp_path / "empty.ampmem", Story().recording())
    with pytest.raises(NothingRecorded, match=r"empty\.ampmem: .*no step ended"):
        CliRunner().invoke(show, [str(good), str(empty)], catch_exceptions=False)


def test_compare_in_python(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ampmem", small_run().recording())
    comparison = ampmem.compare(path, small_run().recording())
    assert isinstance(comparison, ampmem.Comparison)
    assert [entry.label for entry in comparison.entries] == ["amp a.ampmem", "amp"]
    assert comparison.entries[0].summary == summarize(small_run().recording())
    with pytest.raises(UsageError, match="at least one recording"):
        ampmem.compare()
    with pytest.raises(UsageError, match=r"gone\.ampmem does not exist"):
        ampmem.compare(tmp_path / "gone.ampmem")
