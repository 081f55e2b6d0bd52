"""The prediction of a simulated run: its terms, whether it fits, and its words."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from support.build import predicted, small_run, write
from support.golden_sections import Golden

from ampmem.analysis.estimate import Fit, Prediction, prediction_of
from ampmem.analysis.jsonable import from_json
from ampmem.analysis.summary import Summary, summarize, summary_schema
from ampmem.events import PredictionRecord, TermsRecord
from ampmem.failure import FailureKind, FailureRecord
from ampmem.names import CUDNN_TRIALS, warning
from ampmem.recording import read
from ampmem.reporters.text.estimate import fit_in_short, other_notes, prediction_headline, render_prediction, sentences
from ampmem.reporters.text.run import warnings
from ampmem.reporters.text.table import render

MIB = 1 << 20
GIB = 1 << 30
FAILED = "up to where the script failed"

ALLOCATED = TermsRecord(
    tensors=3000 * MIB,
    workspaces={"cuBLAS": 64 * MIB},
    scratch={"aten.sum.dim_IntList": 30 * MIB},
    rounding=6 * MIB,
    cached=100 * MIB,
)
RESERVED = TermsRecord(
    tensors=2900 * MIB, workspaces={"cuBLAS": 64 * MIB}, scratch={}, rounding=6 * MIB, cached=330 * MIB
)
RECORD = predicted(
    0,
    total=4 * GIB,
    outside=512 * MIB,
    allocated=ALLOCATED,
    reserved=RESERVED,
    highest_allocated=3100 * MIB,
    highest_reserved=3300 * MIB,
    unmodelled=("what sort allocates",),
)
JOINED = replace(RECORD, libraries={"NCCL's buffers": 4 * MIB}, libraries_at_most={"NCCL's buffers": 200 * MIB})
UNSURE = replace(RECORD, outside_at_most=700 * MIB)
BOUNDED = replace(RECORD, bounds={"cuDNN's workspaces in convolutions": 200 * MIB})


def test_the_terms_add_up() -> None:
    prediction = prediction_of(RECORD)
    allocated, reserved = prediction.at_peak_allocated, prediction.at_peak_reserved
    assert (allocated.allocated, allocated.reserved, allocated.total) == (3100 * MIB, 3200 * MIB, 3712 * MIB)
    assert (reserved.allocated, reserved.reserved, reserved.total) == (2970 * MIB, 3300 * MIB, 3812 * MIB)
    assert prediction.margin == (4096 - 3812) * MIB
    assert prediction.highest is None


@pytest.mark.parametrize(
    ("record", "fit"),
    [
        (RECORD, Fit.FITS),
        (replace(BOUNDED, highest_reserved=3500 * MIB, highest_allocated=3300 * MIB), Fit.FITS),
        (replace(BOUNDED, highest_reserved=3600 * MIB), Fit.MAY_NOT_FIT),
        (JOINED, Fit.FITS),
        (replace(JOINED, libraries_at_most={"NCCL's buffers": 285 * MIB}), Fit.MAY_NOT_FIT),
        (replace(JOINED, libraries={"NCCL's buffers": 286 * MIB}), Fit.DOES_NOT_FIT),
        (UNSURE, Fit.FITS),
        (replace(UNSURE, outside_at_most=800 * MIB), Fit.MAY_NOT_FIT),
        (replace(UNSURE, outside=797 * MIB, outside_at_most=800 * MIB), Fit.DOES_NOT_FIT),
        (replace(UNSURE, allowed=3310 * MIB), Fit.FITS),
        (replace(BOUNDED, highest_reserved=3320 * MIB, allowed=3310 * MIB), Fit.MAY_NOT_FIT),
        (replace(UNSURE, allowed=4090 * MIB), Fit.FITS),
        (replace(BOUNDED, ran_out=True), Fit.DOES_NOT_FIT),
    ],
)
def test_it_fits_or_not_or_maybe(record: PredictionRecord, fit: Fit, golden: Golden) -> None:
    prediction = prediction_of(record)
    assert prediction.fit is fit
    golden(prediction_headline(prediction, "a GPU", failure="1 GiB were asked for"))


TRIED = replace(
    BOUNDED,
    bounds={**BOUNDED.bounds, CUDNN_TRIALS: 700 * MIB},
    highest_allocated=3584 * MIB,
    highest_reserved=3584 * MIB,
    unfilled_allocated=3300 * MIB,
    unfilled_reserved=3500 * MIB,
)


def test_trials_that_take_what_is_free_are_told_apart(golden: Golden) -> None:
    golden(prediction_headline(prediction_of(TRIED), "a GPU"))


@pytest.mark.parametrize("context", [1000, 900])
def test_it_is_not_laid_on_workspaces_where_the_context_decides(context: int, golden: Golden) -> None:
    """Allocated are 3100 MiB: beside 1000 MiB of the context 4 MiB are missing, whatever cuDNN takes."""
    record = replace(TRIED, outside_at_most=context * MIB, least_reserved=3150 * MIB, likely_reserved=3300 * MIB)
    golden(prediction_headline(prediction_of(record), "a GPU"))


def test_what_the_process_may_take_is_what_is_left(golden: Golden) -> None:
    prediction = prediction_of(replace(UNSURE, allowed=3310 * MIB))
    assert (prediction.limited, prediction.margin) == (True, 10 * MIB)
    golden(all_words(prediction))
    assert not prediction_of(replace(UNSURE, allowed=4090 * MIB)).limited


def all_words(prediction: Prediction) -> str:
    """What is said of ``prediction`` in its headline, in short, in sentences and in the table."""
    headline = prediction_headline(prediction, "a GPU", place="in step 2")
    return "\n".join(
        (headline, *fit_in_short(prediction), *sentences(prediction), render_prediction(prediction, "4GiB"))
    )


def test_a_script_that_failed_otherwise_neither_fits_nor_not(golden: Golden) -> None:
    prediction = prediction_of(RECORD, stopped=FAILED)
    assert prediction.fit is Fit.NOT_KNOWN
    golden(all_words(prediction))


def test_what_does_not_fit_by_then_does_not_fit() -> None:
    assert prediction_of(replace(RECORD, outside=2 * GIB), stopped=FAILED).fit is Fit.DOES_NOT_FIT
    ran_out = prediction_of(replace(RECORD, ran_out=True), stopped=FAILED)
    assert (ran_out.fit, ran_out.stopped) == (Fit.DOES_NOT_FIT, "")


@pytest.mark.parametrize(
    ("failure", "ended", "stopped"),
    [
        (FailureRecord(kind=FailureKind.RAISED, error="ValueError", message=""), True, FAILED),
        (
            FailureRecord(kind=FailureKind.RAISED, error="KeyboardInterrupt", message=""),
            True,
            "up to where the script was interrupted",
        ),
        (None, False, "up to where its recording breaks off"),
        (None, True, ""),
    ],
)
def test_a_recording_of_a_part_has_no_verdict(failure: FailureRecord | None, ended: bool, stopped: str) -> None:
    recording = small_run().recording()
    recording = replace(recording, run=replace(recording.run, failure=failure), prediction=RECORD, ended=ended)
    value = json.loads(summarize(recording).to_json())
    jsonschema.Draft202012Validator(summary_schema()).validate(value)
    assert value["prediction"]["stopped"] == stopped
    assert value["prediction"]["fit"] == ("not-known" if stopped else "fits")
    assert ("it fits" in render(summarize(recording), ())) is not bool(stopped)


@pytest.mark.parametrize("record", [RECORD, BOUNDED, JOINED, UNSURE])
def test_the_words_of_a_prediction(record: PredictionRecord, golden: Golden) -> None:
    golden(all_words(prediction_of(record)))
    assert max(map(len, render_prediction(prediction_of(record), "a GPU").splitlines())) <= 100


def test_without_a_prediction_nothing_is_said() -> None:
    assert (render_prediction(None, "a GPU"), list(sentences(None))) == ("", [])


def test_the_headline_and_the_table_have_the_same_ends_of_the_range(golden: Golden) -> None:
    """What is reserved is a range where workspaces come and go: the least of it is in the table, too."""
    golden(all_words(prediction_of(replace(BOUNDED, least_reserved=3150 * MIB, likely_reserved=3200 * MIB))))


def test_what_libraries_keep_is_in_all_that_is_used() -> None:
    prediction = prediction_of(JOINED)
    reserved = prediction.at_peak_reserved
    assert reserved.total == reserved.reserved + reserved.outside + 4 * MIB == 3816 * MIB
    assert prediction.highest is not None and prediction.highest.total == (3300 + 512 + 200) * MIB
    assert prediction.highest.bounds == {"NCCL's buffers": 200 * MIB}


def test_the_most_of_the_context_is_in_the_most_of_all() -> None:
    highest = prediction_of(UNSURE).highest
    assert (highest.outside, highest.total) == (700 * MIB, 4000 * MIB)
    assert highest.reserved + highest.outside == highest.total


def test_a_note_is_told_once() -> None:
    notes = ["assumed: a lot", "not modelled: what sort allocates"]
    assert other_notes(prediction_of(RECORD), notes) == ["assumed: a lot"]
    assert other_notes(None, notes) == notes


def test_it_is_in_the_recording_and_in_the_json(tmp_path: Path) -> None:
    measured = small_run().recording()
    assert json.loads(summarize(measured).to_json())["prediction"] is None
    recording = read(write(tmp_path / "simulated.ampmem", replace(measured, prediction=BOUNDED)))
    assert recording.prediction == BOUNDED
    value = json.loads(summarize(recording).to_json())
    jsonschema.Draft202012Validator(summary_schema()).validate(value)
    told = value["prediction"]
    assert told["fit"] == "fits"
    assert told["at_peak_allocated"]["scratch"] == {"aten.sum.dim_IntList": 30 * MIB}
    assert told["highest"]["bounds"] == {"cuDNN's workspaces in convolutions": 200 * MIB}


def test_what_is_said_beside_the_numbers_is_in_the_json() -> None:
    notes = (warning("an integer was taken as 1"), "assumed: nonzero=0.25")
    summary = summarize(replace(small_run().recording(), notes=notes))
    value = json.loads(summary.to_json())
    jsonschema.Draft202012Validator(summary_schema()).validate(value)
    assert value["warnings"] == ["an integer was taken as 1"] == list(warnings(summary, notes))
    assert value["notes"] == ["assumed: nonzero=0.25"]
    older = {key: item for key, item in value.items() if key not in ("warnings", "notes")}
    assert from_json(Summary, older).notes == ()
