"""The prediction of a simulated run: its terms, whether it fits, and its words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from build import small_run, write

from ampmem.analysis.estimate import STOPPED, Fit, prediction_of
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
RECORD = PredictionRecord(
    total=4 * GIB,
    outside=512 * MIB,
    allocated=ALLOCATED,
    reserved=RESERVED,
    highest_allocated=3100 * MIB,
    highest_reserved=3300 * MIB,
    bounds={},
    unmodelled=("what sort allocates",),
    ran_out=False,
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
    ("record", "fit", "words"),
    [
        (RECORD, Fit.FITS, "3.027 GiB allocated, 3.223 GiB reserved of 4.0 GiB; it fits, with 284.0 MiB to spare"),
        (
            replace(BOUNDED, highest_reserved=3500 * MIB, highest_allocated=3300 * MIB),
            Fit.FITS,
            "3.027 GiB to 3.223 GiB allocated, 3.223 GiB to 3.418 GiB reserved of 4.0 GiB; it fits, with 84.0 MiB to "
            "284.0 MiB",
        ),
        (
            replace(BOUNDED, highest_reserved=3600 * MIB),
            Fit.MAY_NOT_FIT,
            "it may not fit: with cuDNN's workspaces in convolutions it lacks up to 16.0 MiB",
        ),
        (
            JOINED,
            Fit.FITS,
            "3.223 GiB reserved of 4.0 GiB; it fits, with 84.0 MiB to 280.0 MiB to spare beside the 512.0 MiB",
        ),
        (
            replace(JOINED, libraries_at_most={"NCCL's buffers": 285 * MIB}),
            Fit.MAY_NOT_FIT,
            "it may not fit: with NCCL's buffers it lacks up to 1.0 MiB beside",
        ),
        (
            replace(JOINED, libraries={"NCCL's buffers": 286 * MIB}),
            Fit.DOES_NOT_FIT,
            "it does not fit: it lacks 2.0 MiB beside the 512.0 MiB",
        ),
        (
            UNSURE,
            Fit.FITS,
            "it fits, with 96.0 MiB to 284.0 MiB to spare beside the 512.0 MiB to 700.0 MiB that the CUDA context",
        ),
        (
            replace(UNSURE, outside_at_most=800 * MIB),
            Fit.MAY_NOT_FIT,
            "it may not fit: it lacks up to 4.0 MiB beside the 512.0 MiB to 800.0 MiB that the CUDA context",
        ),
        (
            replace(UNSURE, outside=797 * MIB, outside_at_most=800 * MIB),
            Fit.DOES_NOT_FIT,
            "it does not fit: it lacks 1.0 MiB to 4.0 MiB beside the 797.0 MiB to 800.0 MiB",
        ),
        (
            replace(UNSURE, allowed=3310 * MIB),
            Fit.FITS,
            "reserved of 4.0 GiB; it fits, with 10.0 MiB to spare of the 3.2 GiB that this process may use",
        ),
        (
            replace(BOUNDED, highest_reserved=3320 * MIB, allowed=3310 * MIB),
            Fit.MAY_NOT_FIT,
            "it may not fit: with cuDNN's workspaces in convolutions it needs up to 10.0 MiB more than the 3.2 GiB "
            "that this process may use",
        ),
        (replace(UNSURE, allowed=4090 * MIB), Fit.FITS, "it fits, with 96.0 MiB to 284.0 MiB to spare beside the"),
        (replace(BOUNDED, ran_out=True), Fit.DOES_NOT_FIT, "(simulated): it does not fit: 1 GiB were asked for"),
    ],
)
def test_it_fits_or_not_or_maybe(record: PredictionRecord, fit: Fit, words: str) -> None:
    prediction = prediction_of(record)
    assert prediction.fit is fit
    assert words in prediction_headline(prediction, "a GPU", failure="1 GiB were asked for")


TRIED = replace(
    BOUNDED,
    bounds={**BOUNDED.bounds, CUDNN_TRIALS: 700 * MIB},
    highest_allocated=3584 * MIB,
    highest_reserved=3584 * MIB,
    unfilled_allocated=3300 * MIB,
    unfilled_reserved=3500 * MIB,
)


def test_trials_that_take_what_is_free_are_told_apart() -> None:
    assert prediction_headline(prediction_of(TRIED), "a GPU") == (
        "a GPU (simulated): peak 3.027 GiB to 3.223 GiB allocated, 3.223 GiB to 3.418 GiB reserved of 4.0 GiB; it "
        "fits, with 84.0 MiB to 284.0 MiB to spare beside the 512.0 MiB that the CUDA context is assumed to use; "
        "cudnn.benchmark's trials may take all free memory, up to 700.0 MiB, once, at each convolution's first call"
    )


def test_it_is_not_laid_on_workspaces_where_the_context_decides() -> None:
    """Allocated are 3100 MiB: beside 1000 MiB of the context 4 MiB are missing, whatever cuDNN takes."""
    record = replace(TRIED, outside_at_most=1000 * MIB, least_reserved=3150 * MIB, likely_reserved=3300 * MIB)
    found = prediction_headline(prediction_of(record), "a GPU")
    assert "it may not fit: it lacks 4.0 MiB to 404.0 MiB beside the most of the 512.0 MiB to 1000.0 MiB" in found
    less = prediction_headline(prediction_of(replace(record, outside_at_most=900 * MIB)), "a GPU")
    assert "it may not fit: with cuDNN's workspaces in convolutions it lacks up to 304.0 MiB beside the 512.0" in less


def test_what_the_process_may_take_is_what_is_left() -> None:
    prediction = prediction_of(replace(UNSURE, allowed=3310 * MIB))
    assert (prediction.limited, prediction.margin) == (True, 10 * MIB)
    assert fit_in_short(prediction)[1] == "predicted: 3.2 GiB of the 3.2 GiB that this process may use are used"
    caption = render_prediction(prediction, "a GPU").splitlines()[0]
    assert caption == "the prediction for a GPU, 4.0 GiB, of which this process may use 3.2 GiB"
    assert not prediction_of(replace(UNSURE, allowed=4090 * MIB)).limited


def test_a_script_that_failed_otherwise_neither_fits_nor_not() -> None:
    prediction = prediction_of(RECORD, stopped=STOPPED)
    assert prediction.fit is Fit.NOT_KNOWN
    assert prediction_headline(prediction, "a GPU").endswith("reserved of 4.0 GiB, up to where the script failed")
    assert fit_in_short(prediction) == (
        "not known",
        "predicted: 3.7 GiB of 4.0 GiB used up to where the script failed",
    )
    told = list(sentences(prediction))
    assert "whether it fits is not known: this is up to where the script failed" in told
    assert not any("it fits" in sentence and "not known" not in sentence for sentence in told)


def test_what_does_not_fit_by_then_does_not_fit() -> None:
    assert prediction_of(replace(RECORD, outside=2 * GIB), stopped=STOPPED).fit is Fit.DOES_NOT_FIT
    ran_out = prediction_of(replace(RECORD, ran_out=True), stopped=STOPPED)
    assert (ran_out.fit, ran_out.stopped) == (Fit.DOES_NOT_FIT, "")


@pytest.mark.parametrize(
    ("failure", "ended", "stopped"),
    [
        (FailureRecord(kind=FailureKind.RAISED, error="KeyboardInterrupt", message=""), True, STOPPED),
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


def test_the_section_of_show() -> None:
    lines = render_prediction(prediction_of(BOUNDED), "a GPU").splitlines()
    assert lines[0] == "the prediction for a GPU, 4.0 GiB"
    cells = [" ".join(line.split()) for line in lines]
    assert "scratch of aten.sum.dim_IntList 30.0 MiB 0 B" in cells
    assert "= total, as nvidia-smi would show 3.625 GiB 3.723 GiB 3.723 GiB" in cells
    assert "not modelled: what sort allocates" in cells
    assert any(line.startswith("allocated includes rounding; each column is an instant of its own") for line in cells)
    assert max(map(len, lines)) <= 100
    assert render_prediction(None, "a GPU") == ""
    assert render_prediction(prediction_of(BOUNDED), "4GiB").splitlines()[0] == "the prediction for a GPU of 4.0 GiB"


def test_the_headline_and_the_table_have_the_same_ends_of_the_range() -> None:
    """What is reserved is a range where workspaces come and go: the least of it is in the table, too."""
    prediction = prediction_of(replace(BOUNDED, least_reserved=3150 * MIB, likely_reserved=3200 * MIB))
    assert "peak 3.027 GiB allocated, 3.076 GiB to 3.223 GiB reserved of 4.0 GiB" in prediction_headline(
        prediction, "a GPU"
    )
    assert "peak 3.027 GiB allocated in step 2, " in prediction_headline(prediction, "a GPU", place="in step 2")
    cells = [" ".join(line.split()) for line in render_prediction(prediction, "a GPU").splitlines()]
    assert "allocated reserved at least up to" in cells
    assert "= reserved 3.125 GiB 3.223 GiB 3.076 GiB 3.223 GiB" in cells


def test_sentences_say_the_same() -> None:
    told = list(sentences(prediction_of(BOUNDED)))
    assert told[0] == (
        "predicted at the peak of allocated memory: tensors 2.930 GiB + workspaces of cuBLAS 64.0 MiB + "
        "scratch of aten.sum.dim_IntList 30.0 MiB + rounding 6.0 MiB + cached 100.0 MiB + "
        "outside (assumed) 512.0 MiB = 3.625 GiB in total"
    )
    assert told[2] == (
        "predicted at most: 3.027 GiB allocated, 3.223 GiB reserved, 512.0 MiB outside, 3.723 GiB in total"
    )
    assert list(sentences(None)) == []
    assert fit_in_short(prediction_of(RECORD)) == ("fits", "predicted: 3.7 GiB of 4.0 GiB used")


def test_what_libraries_keep_is_in_all_that_is_used() -> None:
    prediction = prediction_of(JOINED)
    reserved = prediction.at_peak_reserved
    assert reserved.total == reserved.reserved + reserved.outside + 4 * MIB == 3816 * MIB
    assert prediction.highest is not None and prediction.highest.total == (3300 + 512 + 200) * MIB
    assert prediction.highest.bounds == {"NCCL's buffers": 200 * MIB}
    cells = [" ".join(line.split()) for line in render_prediction(prediction, "a GPU").splitlines()]
    assert "NCCL's buffers 4.0 MiB 4.0 MiB 200.0 MiB" in cells
    assert (
        "+ outside (assumed) 512.0 MiB + NCCL's buffers 4.0 MiB = 3.727 GiB in total" in list(sentences(prediction))[1]
    )
    assert fit_in_short(prediction) == ("fits", "predicted: 3.7 GiB to 3.9 GiB of 4.0 GiB used")


def test_the_most_of_the_context_is_in_the_most_of_all() -> None:
    prediction = prediction_of(UNSURE)
    assert prediction.highest is not None
    assert (prediction.highest.outside, prediction.highest.total) == (700 * MIB, 4000 * MIB)
    assert prediction.highest.reserved + prediction.highest.outside == prediction.highest.total
    cells = [" ".join(line.split()) for line in render_prediction(prediction, "a GPU").splitlines()]
    assert "outside (assumed) 512.0 MiB 512.0 MiB 700.0 MiB" in cells
    assert fit_in_short(prediction) == ("fits", "predicted: 3.7 GiB to 3.9 GiB of 4.0 GiB used")


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
