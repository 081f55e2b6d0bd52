"""``ampmem fit`` without a run: the search over made-up peaks, its conclusions, and how the argument is given."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil, log2
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.golden_sections import Golden

from ampmem.analysis.fit import (
    DOUBLINGS,
    GUESSES,
    SCHEMA,
    FitResult,
    Memory,
    SavingVerdict,
    Vary,
    break_evens,
    fit_result,
    fit_schema,
    memory_of,
    next_to_fit,
    precision_fits,
    remaining,
    wanted,
)
from ampmem.analysis.jsonable import from_json
from ampmem.cli.fit import fit, varied_arguments
from ampmem.cli.main import run
from ampmem.errors import RecordingError, UsageError
from ampmem.reporters.html.fit_page import fit_view
from ampmem.reporters.text.fit import of_whole, render_fit_result, what_follows

OUTSIDE = 512
TOTAL = 100_000
Peak = Callable[[int], int]


def memory(peak: int) -> Memory | None:
    return Memory(allocated=peak, reserved=peak, used=peak + OUTSIDE) if peak + OUTSIDE <= TOTAL else None


def vary(low: int, high: int | None) -> Vary:
    return Vary(name="--batch-size", separator="=", low=low, high=high)


def searched(
    precisions: Mapping[str, Peak], varied: Vary, *, curve: int = 0, at_once: int = 1
) -> dict[str, dict[int, Memory | None]]:
    """What comes of a search in which a run's peak is what ``precisions`` says; each run is made once."""
    points: dict[str, dict[int, Memory | None]] = {precision: {} for precision in precisions}
    while following := wanted(points, varied, total=TOTAL, curve=curve):
        for precision, value in following[:at_once]:
            assert value not in points[precision]
            assert varied.low <= value <= (varied.high or varied.low << DOUBLINGS)
            points[precision][value] = memory(precisions[precision](value))
    return points


def result(points: dict[str, dict[int, Memory | None]], varied: Vary) -> FitResult:
    return fit_result(points, script="train.py", vary=varied, gpu="a GPU", total=TOTAL, steps=2, notes=("a note",))


def test_what_the_script_lets_the_process_take_is_what_a_run_has_to_fit_into(golden: Golden) -> None:
    """Of 97 KiB the process may use 50,000 bytes: by a straight line through two runs that is the value of 25."""
    points: dict[int, Memory | None] = {
        value: Memory(allocated=size, reserved=size, used=size + OUTSIDE, allowed=50_000)
        for value, size in ((1, 2000), (2, 4000))
    }
    assert next_to_fit({**points, 40: None}, vary(1, 40), TOTAL) == 25
    found = result({"fp32": {**points, 26: None}}, vary(1, 40))
    golden(render_fit_result(found))
    view = fit_view(found)
    assert view.capacity == view.may == found.gpu.allowed == 50_000
    golden(view.room, "room")


def test_a_precision_like_another_one_is_run_at_the_ends_only(golden: Golden) -> None:
    peaks = {"as-is": 1000, "fp32": 1000, "amp": 700, "amp-nocache": 700}
    slopes = {precision: lambda value, size=size: 2000 + size * value for precision, size in peaks.items()}
    points = searched(slopes, vary(1, 200), curve=5)
    # 97 is the largest in FP32 and 139 under AMP: (100,000 - 512 - 2000) / 1000, and / 700.
    assert sorted(points["as-is"]) == [1, 97, 98] and sorted(points["amp-nocache"]) == [1, 139, 140]
    assert {97, 98} < points["fp32"].keys() and len(points["fp32"]) > 4
    found = result(points, vary(1, 200))
    golden(render_fit_result(found))
    assert found.break_even[-1].differences == found.break_even[1].differences


def test_a_precision_that_differs_at_the_far_end_is_searched(golden: Golden) -> None:
    points = searched({"fp32": lambda value: 1000 * value, "amp": lambda value: 500 + 500 * value}, vary(1, 300))
    assert {99, 100} <= points["fp32"].keys() and {197, 198} <= points["amp"].keys()
    flat = searched({"fp32": lambda _: 1000, "amp": lambda _: 900}, vary(1, 300), curve=3)
    golden(render_fit_result(result(flat, vary(1, 300))))


steps_up = st.lists(st.integers(0, 3000), min_size=2, max_size=300)


@given(steps_up, st.integers(1, 50))
def test_the_boundary_is_found_whatever_the_peaks_grow_like(growth: list[int], low: int) -> None:
    high = low + len(growth) - 1
    peaks = [sum(growth[: i + 1]) for i in range(len(growth))]
    points = searched({"amp": lambda value: peaks[value - low]}, vary(low, high))["amp"]
    (precision,) = precision_fits({"amp": points})
    fitting = [value for value in range(low, high + 1) if peaks[value - low] + OUTSIDE <= TOTAL]
    assert precision.largest_fitting == (max(fitting) if fitting else None)
    expected = low if not fitting else fitting[-1] + 1 if fitting[-1] < high else None
    assert precision.smallest_not_fitting == expected
    assert len(points) <= GUESSES + ceil(log2(len(growth))) + 1


@given(st.integers(0, 60_000), st.integers(1, 90_000), st.integers(2, 100_000))
@example(0, 1, 99_616)
def test_few_runs_are_enough_for_peaks_in_proportion(base: int, slope: int, high: int) -> None:
    points = searched({"amp": lambda value: base + slope * value}, vary(1, high))["amp"]
    (precision,) = precision_fits({"amp": points})
    largest = min(high, (TOTAL - OUTSIDE - base) // slope)
    assert precision.largest_fitting == (largest or None)
    assert precision.smallest_not_fitting == (largest + 1 if largest < high else None)
    assert len(points) <= 10


@pytest.mark.parametrize("high", [256, 4000])
@pytest.mark.parametrize("times", [1, 4, 8])
@pytest.mark.parametrize("slope", [100, 720, 3000])
def test_few_runs_are_enough_where_the_most_keeps_to_what_the_device_has(slope: int, times: int, high: int) -> None:
    """As with convolutions: at most several times what is allocated is reserved, but no more than there is."""

    def run(value: int) -> Memory | None:
        known = memory(slope * value)
        sure = known is not None and known.allocated * 105 // 100 + OUTSIDE <= TOTAL
        most = min(times * slope * value + slope * value + OUTSIDE, TOTAL) if sure else TOTAL + 1000
        return known and replace(known, highest=most, surely=sure)

    points: dict[int, Memory | None] = {}
    while (value := next_to_fit(points, vary(1, high), TOTAL)) is not None:
        points[value] = run(value)
    (precision,) = precision_fits({"amp": points})
    largest = precision.largest_fitting
    assert largest is not None and getattr(run(largest), "surely", False)
    assert largest == high or not getattr(run(largest + 1), "surely", False)
    assert len(points) <= 4 + ceil(log2(high))


def test_a_search_does_not_creep_along_a_curve_that_the_device_cuts_off() -> None:
    """The runs of a small convolutional network: the most is the whole device from 16 on, and 136 may not fit."""

    def run(value: int) -> Memory | None:
        known = memory(500 + 720 * value)
        sure = value <= 125
        return known and replace(known, highest=(2000 if value == 1 else TOTAL) if sure else TOTAL + 700, surely=sure)

    points: dict[int, Memory | None] = {}
    while (value := next_to_fit(points, vary(1, 256), TOTAL)) is not None:
        assert value + 1 in points or not {value - 1, value - 2, value - 3} <= points.keys()
        points[value] = run(value)
    assert max(value for value, found in points.items() if found and found.surely) == 125
    assert len(points) <= 4 + 8


def test_a_search_does_not_creep_up_to_where_the_device_cuts_the_most_off() -> None:
    """Runs of a small convolutional network on 4 GiB, in MiB: the most reaches that at 82. Let 110 fit."""
    ran = (16, 64, 80, 82, 110, 114, 125)
    allocated, reserved = (406, 1566, 1953, 2001, 2678, 2775, 3041), (418, 1961, 2451, 2512, 2951, 3055, 3350)
    most = (1433, 3414, 4044, 4096, 4096, 4820, 5198)

    def run(value: int) -> Memory | None:
        if value > 150:
            return None
        peaks = [int(np.interp(value, ran, each)) for each in (allocated, reserved, most)]
        return Memory(
            allocated=peaks[0],
            reserved=peaks[1],
            used=peaks[1] + 80,
            highest=peaks[2],
            surely=value <= 110,
            outside_at_most=896,
        )

    points: dict[int, Memory | None] = {}
    while (value := next_to_fit(points, vary(16, 256), 4096)) is not None:
        points[value] = run(value)
    assert max(value for value, found in points.items() if found and found.surely) == 110
    assert not {80, 81, 82} <= points.keys()
    assert len(points) <= 4 + 8


def test_without_an_upper_bound_few_runs_find_the_largest_value_and_none_is_far_beyond_it() -> None:
    points = searched({"amp": lambda value: 300 * value}, vary(3, None))["amp"]
    (precision,) = precision_fits({"amp": points})
    assert (precision.largest_fitting, precision.smallest_not_fitting) == (331, 332)
    assert list(points) == [3, 12, 192, 331, 332]
    late = searched({"amp": lambda value: max(20_000, 5 * value)}, vary(1, None))["amp"]  # another phase's peak first
    assert list(late) == [1, 4, 16, 64, 256, 1024, 4096, 65536, 34816, 19456, 19897, 19898]
    endless = searched({"amp": lambda value: 5}, vary(3, None))["amp"]
    assert list(endless) == [3 * 4**i for i in range(DOUBLINGS // 2 + 1)]


@given(st.integers(1, 3000), st.floats(0.5, 2), st.integers(0, 90_000))
def test_without_an_upper_bound_the_search_ends_whatever_the_peaks_grow_like(
    slope: int, power: float, base: int
) -> None:
    points = searched({"amp": lambda value: max(base, int(slope * value**power))}, vary(1, None))["amp"]
    fits, too_large = (
        max((v for v, found in points.items() if found), default=0),
        min((v for v, found in points.items() if found is None), default=None),
    )
    assert fits == 1 << DOUBLINGS or too_large == fits + 1
    assert len(points) <= 2 * DOUBLINGS + GUESSES


@given(st.integers(1, 400), st.integers(0, 40_000), st.integers(2, 500))
def test_the_break_even_point_is_bracketed_by_neighbours(saved: int, copies: int, high: int) -> None:
    precisions = {"fp32": lambda value: 500 * value, "amp": lambda value: copies + (500 - saved) * value}
    varied = vary(1, high)
    points = searched(precisions, varied, at_once=2)
    (found,) = break_evens(points)
    both = [
        value for value in range(1, high + 1) if memory(precisions["fp32"](value)) and memory(precisions["amp"](value))
    ]
    saving = [value for value in both if precisions["amp"](value) < precisions["fp32"](value)]
    if not saving:
        assert found.verdict is (SavingVerdict.NEVER if both else SavingVerdict.UNKNOWN)
    elif saving[0] == 1:
        assert (found.verdict, found.costs_at) == (SavingVerdict.ALWAYS, None)
    else:
        assert (found.verdict, found.costs_at, found.saves_at) == (SavingVerdict.CROSSES, saving[0] - 1, saving[0])
    assert sum(map(len, points.values())) <= 2 * (8 + 8)


def test_peaks_that_are_out_of_order_end_the_search_and_are_told(golden: Golden) -> None:
    odd = {6, 7, 11}

    def peak(value: int) -> int:
        return TOTAL if value in odd or value > 20 else 4000 * value

    varied = vary(1, 64)
    points = searched({"fp32": peak, "amp": lambda value: peak(value) + (100 if value > 9 else -100)}, varied, curve=9)
    found = result(points, varied)
    for precision in found.precisions:
        assert precision.largest_fitting == 20 and precision.smallest_not_fitting == 21
        assert set(precision.gaps) == odd & set(precision.memory)
    (against,) = found.break_even
    assert against.verdict is SavingVerdict.REVERSED
    golden(render_fit_result(found))


def test_the_curve_has_as_many_values_as_asked_for() -> None:
    precisions = {"fp32": lambda value: 1000 * value, "amp": lambda value: 800 * value}
    points = searched(precisions, vary(1, 300), curve=6)
    fits = {precision.name: precision.largest_fitting for precision in precision_fits(points)}
    assert fits == {"fp32": 99, "amp": 124}
    amp = [value for value, found in sorted(points["amp"].items()) if found is not None]
    assert len(amp) >= 6 and (amp[0], amp[-1]) == (1, 124)
    assert max(later - sooner for sooner, later in pairwise(amp)) <= 123 / 5 * 5 / 3  # each a third off at most
    assert sum(map(len, points.values())) < sum(map(len, searched(precisions, vary(1, 300)).values())) + 2 * 6
    assert sum(map(len, searched(precisions, vary(1, 300), curve=0).values())) <= 12


def test_nothing_more_is_run_when_the_smallest_value_does_not_fit(golden: Golden) -> None:
    points = searched({"fp32": lambda value: TOTAL, "amp": lambda value: 9}, vary(4, 8), curve=5)
    assert set(points["fp32"]) == {4}
    golden(render_fit_result(result(points, vary(4, 8))))
    assert next_to_fit(points["fp32"], vary(4, 8), TOTAL) is None


def test_the_text_and_the_json_say_what_was_run(golden: Golden) -> None:
    precisions = {"fp32": lambda value: 1000 * value, "amp": lambda value: 3500 + 100 * value}
    points = searched(precisions, vary(1, 64))
    points["amp"][64] = Memory(allocated=9900, reserved=9900, used=99_000, highest=TOTAL + 1024, surely=False)
    found = result(points, vary(1, 64))
    golden(render_fit_result(found))
    document = json.loads(found.to_json())
    jsonschema.Draft202012Validator(fit_schema()).validate(document)
    assert document["schema"] == SCHEMA == "ampmem.fit/1"
    assert document["vary"] == {"argument": "--batch-size", "low": 1, "high": 64, "separator": "="}
    assert document["runs"] == sum(len(precision["points"]) for precision in document["arms"])
    (crossing,) = document["break_even"]
    assert (crossing["verdict"], crossing["costs_at"], crossing["saves_at"]) == ("crosses", 3, 4)
    assert {each["value"]: each["bytes"] for each in crossing["differences"]}[3] == 800
    first = document["arms"][0]["points"][0]
    assert first["value"] == 1 and first["allocated_bytes"] == 1000 and first["fits"] is True


def test_the_json_says_all_that_the_tables_and_the_page_say() -> None:
    points = searched({"fp32": lambda value: 1000 * value, "amp": lambda value: 3500 + 100 * value}, vary(1, 64))
    points["amp"][70] = replace(maybe(90_000, 20_000) or Memory(allocated=0, reserved=0, used=0), allowed=99_000)
    for separator in ("=", " ", ""):
        found = result(points, replace(vary(1, 64), separator=separator))
        assert from_json(FitResult, json.loads(found.to_json())) == found
    old = json.loads(found.to_json())
    del old["vary"]["separator"]
    for point in (point for precision in old["arms"] for point in precision["points"]):
        del point["outside_at_most_bytes"], point["allowed_bytes"]
    assert from_json(FitResult, old).vary == vary(1, 64), "of a version that did not say it"


def maybe(peak: int, unknown: int) -> Memory | None:
    """What comes of a run of which ``unknown`` bytes are assumed at most."""
    known = memory(peak)
    most = peak + OUTSIDE + unknown
    return known and replace(known, highest=most, surely=most <= TOTAL)


def test_the_boundary_is_of_what_surely_fits_and_what_may_fit_is_told(golden: Golden) -> None:
    points: dict[str, dict[int, Memory | None]] = {"amp": {}}
    while following := wanted(points, vary(1, 256), total=TOTAL, curve=0):
        for precision, value in following:
            points[precision][value] = maybe(1000 * value, 20_000)
    points["amp"][90] = maybe(90_000, 20_000)
    found = result(points, vary(1, 256))
    (precision,) = found.precisions
    assert (precision.largest_fitting, precision.smallest_not_fitting, precision.largest_that_may_fit) == (79, 80, 90)
    golden(render_fit_result(found))
    document = json.loads(found.to_json())
    assert [document["arms"][0][name] for name in ("largest_fitting", "largest_that_may_fit")] == [79, 90]
    said = {point["value"]: (point["fits"], point["may_fit"]) for point in document["arms"][0]["points"]}
    assert [said[79], said[90], said[256]] == [(True, True), (False, True), (False, False)]


FP32: dict[int, Memory | None] = {1: memory(900), 2: memory(2000)}
AMP: dict[int, Memory | None] = {1: memory(800), 2: memory(900)}
# The baseline was run with further values, to find where another precision saves.
FURTHER = {
    "fp32": {**FP32, 3: memory(3000)},
    "amp": {1: memory(800), 3: memory(900)},
    "as-is": {1: memory(900), 3: memory(3000)},
}
NEARLY = Memory(allocated=90_000, reserved=99_000, used=99_999)
LESS = {
    "fp32": {1: Memory(allocated=9000, reserved=20_000, used=20_512)},
    "amp": {1: Memory(allocated=8000, reserved=30_000, used=30_512)},
}
RESULTS: dict[str, tuple[Mapping[str, dict[int, Memory | None]], Vary]] = {
    "nothing surely fits": ({"fp32": {4: maybe(90_000, 20_000)}}, vary(4, 8)),
    "sizes that nearly fill the GPU": ({"fp32": {4: NEARLY, 5: None}}, vary(1, 64)),
    "the same peaks": ({"fp32": FP32, "amp": AMP, "amp-nocache": AMP}, vary(1, 2)),
    "the same peaks but one": ({"fp32": FP32, "amp": AMP, "amp-nocache": {**AMP, 2: None}}, vary(1, 2)),
    "the same numbers once": (FURTHER, vary(1, 3)),
    "the same so far": ({**FURTHER, "as-is": {1: memory(900)}}, vary(1, 3)),
    "one unit a column": ({"amp": {1: memory(300), 2: memory(900), 8: memory(90_000)}}, vary(1, 8)),
    "an argument by its place": (
        {"amp": {8: memory(2000), 9: None}},
        varied_arguments([], ["data", "--vary", "1:64"]).vary,
    ),
    "nothing fits": ({"fp32": {1: None}, "amp": {1: None}, "amp-nocache": {1: None}}, vary(1, 8)),
    "less allocated and more reserved": (LESS, vary(1, 1)),
    "one run": ({"fp32": {1: memory(9)}}, vary(1, 1)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_search_says(name: str, golden: Golden) -> None:
    points, varied = RESULTS[name]
    found = result(dict(points), varied)
    text = render_fit_result(found)
    golden(text)
    assert max(map(len, text.splitlines())) <= 100
    view = fit_view(found)
    assert all(line in " ".join(text.split()) for line in view.break_even)
    assert [curve.label for curve in view.curves] == list(dict.fromkeys(points)) or "same" in text


def test_a_gpu_that_is_named_by_its_size_is_told_once(golden: Golden) -> None:
    found = result({"fp32": {1: memory(9)}}, vary(1, 1))
    golden(render_fit_result(replace(found, gpu=replace(found.gpu, name="100kB"))))


def test_what_is_in_use_and_what_there_is_have_one_unit() -> None:
    assert of_whole(3 * 1024**3, 826 * 1024**2, 1638 * 1024**2) == "0.8 to 1.6 of 3.0 GiB"


def test_the_scripts_own_precision_is_tried_too() -> None:
    (precisions,) = [param.default for param in fit.params if param.name == "precisions"]
    assert precisions == "fp32,amp,amp-nocache,as-is"


def test_the_schema_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    run(["fit", "--schema"])
    assert json.loads(capsys.readouterr().out) == fit_schema()


def test_a_recording_of_no_simulated_gpu_says_nothing_of_what_fits() -> None:
    from support.build import small_run

    with pytest.raises(RecordingError, match="does not say"):
        memory_of(small_run().recording())


@pytest.mark.parametrize(
    ("options", "arguments", "at_eight"),
    [
        ([], ["--epochs", "1", "--vary", "--batch-size=1:64", "-x"], ("--epochs", "1", "--batch-size=8", "-x")),
        ([], ["--vary=--batch-size 1:64"], ("--batch-size", "8")),
        ([], ["--vary", "-b 1:64", "-x"], ("-b", "8", "-x")),
        (["+data.batch_size=1:"], ["name=x"], ("name=x", "+data.batch_size=8")),
        ([], ["data", "--vary", "1:64", "-x"], ("data", "8", "-x")),
        (["1:"], ["data"], ("data", "8")),
    ],
)
def test_the_argument_is_passed_on_as_it_is_written(
    options: list[str], arguments: list[str], at_eight: tuple[str, ...]
) -> None:
    found = varied_arguments(options, arguments)
    assert found.at(8) == at_eight
    assert (found.vary.low, found.vary.high) == (1, None if options else 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py", "--batch-size=1:8"], "give the script's argument to vary"),
        (["train.py", "--vary"], "needs an argument of the script with the values"),
        (["train.py", "--vary", "--batch-size"], "needs an argument of the script with the values"),
        (["train.py", "--vary", "--batch-size=8"], "whole numbers LOW:HIGH"),
        (["train.py", "--vary", "--lr=0.1:0.5"], "whole numbers LOW:HIGH"),
        (["train.py", "--vary", "--batch-size=0:5"], "LOW must be at least 1"),
        (["train.py", "--vary", "--batch-size=9:5"], "9 is larger than 5"),
        (["train.py", "--batch-size=3", "--vary", "--batch-size=1:8"], "is given twice: remove "),
        (["train.py", "--batch-size", "3", "--vary", "--batch-size=1:8"], "is given twice: remove "),
        (["--vary", "-b=1:8", "train.py", "--vary", "-c=1:8"], "more than once"),
        (["--vary", "-b=1:8", "--vary", "-c=1:8", "train.py"], "more than once"),
        (["train.py", "--vary", "-b=1:8", "--vary", "-c=1:8"], "more than once"),
        (["--device", "cuda", "train.py", "--vary", "-b=1:8"], "on a simulated GPU only"),
        (["--gpu", "gtx", "train.py", "--vary", "-b=1:8"], "unknown GPU 'gtx'"),
        (["--precision", "fp32,tf32", "train.py", "--vary", "-b=1:8"], "unknown precision 'tf32'"),
        (
            ["--precision", "fp32", "--dtype", "bf16", "train.py", "--vary", "-b=1:8"],
            "--dtype is the type that autocast casts to",
        ),
        (["--steps", "1", "train.py", "--vary", "-b=1:8"], "at least 2"),
        (["--html", "page.html", "train.py", "--vary", "-b=1:8"], "page.html exists already"),
        (["missing.py", "--vary", "-b=1:8"], "script not found: missing.py"),
    ],
)
def test_wrong_use_is_told_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "page.html").write_text("precious")
    with pytest.raises(UsageError) as told:
        run(["fit", *arguments])
    assert message in str(told.value)
    assert told.value.exit_code == 2


def test_what_is_left_is_said_as_far_as_it_is_known(golden: Golden) -> None:
    precisions: dict[str, Peak] = {"fp32": lambda value: 1000 * value, "amp": lambda value: 10_000 + 600 * value}
    points: dict[str, dict[int, Memory | None]] = {precision: {} for precision in precisions}
    said: list[str] = []
    while following := wanted(points, vary(8, 128), total=TOTAL, curve=3):
        said.append(what_follows(remaining(points, vary(8, 128), total=TOTAL, curve=3)))
        precision, value = following[0]
        points[precision][value] = memory(precisions[precision](value))
    golden("\n".join((*said, what_follows(remaining(points, vary(8, 128), total=TOTAL, curve=3)))))
