"""The prediction of a simulated run: its terms, whether it fits, and its words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from build import small_run, write

from ampmem.analysis.fit.estimate import Fit, prediction_of
from ampmem.analysis.summary import summarize, summary_schema
from ampmem.events import PredictionRecord, TermsRecord
from ampmem.recording import read
from ampmem.reporters.text.estimate import fit_in_short, headline, other_notes, render_prediction, sentences

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
        (RECORD, Fit.FITS, "3.0 GiB allocated, 3.2 GiB reserved of 4.0 GiB; it fits, with 284.0 MiB to spare"),
        (
            replace(BOUNDED, highest_reserved=3500 * MIB, highest_allocated=3300 * MIB),
            Fit.FITS,
            "3.0 GiB to 3.2 GiB allocated, 3.2 GiB to 3.4 GiB reserved of 4.0 GiB; it fits, with 84.0 MiB to 284.0 MiB",
        ),
        (
            replace(BOUNDED, highest_reserved=3600 * MIB),
            Fit.MAY_NOT_FIT,
            "it may not fit: with cuDNN's workspaces in convolutions it lacks up to 16.0 MiB",
        ),
        (
            JOINED,
            Fit.FITS,
            "3.2 GiB reserved of 4.0 GiB; it fits, with 84.0 MiB to 280.0 MiB to spare beside the 512.0 MiB",
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
        (replace(BOUNDED, ran_out=True), Fit.DOES_NOT_FIT, "3.2 GiB reserved; it does not fit: 1 GiB were asked for"),
    ],
)
def test_it_fits_or_not_or_maybe(record: PredictionRecord, fit: Fit, words: str) -> None:
    prediction = prediction_of(record)
    assert prediction.fit is fit
    assert words in headline(prediction, "a GPU", failure="1 GiB were asked for")


def test_a_script_that_failed_otherwise_neither_fits_nor_not() -> None:
    text = headline(prediction_of(RECORD), "a GPU", stopped="up to where the script failed")
    assert text.endswith("reserved of 4.0 GiB, up to where the script failed")


def test_the_section_of_show() -> None:
    lines = render_prediction(prediction_of(BOUNDED), "a GPU").splitlines()
    assert lines[0] == "the prediction for a GPU, 4.0 GiB"
    cells = [" ".join(line.split()) for line in lines]
    assert "scratch of aten.sum.dim_IntList 30.0 MiB 0 B" in cells
    assert "= total, as nvidia-smi would show 3.6 GiB 3.7 GiB 3.7 GiB" in cells
    assert "not modelled: what sort allocates" in cells
    assert any(line.startswith("allocated is with rounding; each column is an instant of its own") for line in cells)
    assert max(map(len, lines)) <= 100
    assert render_prediction(None, "a GPU") == ""
    assert render_prediction(prediction_of(BOUNDED), "4GiB").splitlines()[0] == "the prediction for a GPU of 4.0 GiB"


def test_sentences_say_the_same() -> None:
    told = list(sentences(prediction_of(BOUNDED)))
    assert told[0] == (
        "predicted at the peak of what is allocated: tensors 2.9 GiB + workspaces of cuBLAS 64.0 MiB + "
        "scratch of aten.sum.dim_IntList 30.0 MiB + rounding 6.0 MiB + cached 100.0 MiB + "
        "outside (assumed) 512.0 MiB = 3.6 GiB in all"
    )
    assert told[2] == "predicted at most: 3.0 GiB allocated, 3.2 GiB reserved, 3.7 GiB in all"
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
    assert "+ outside (assumed) 512.0 MiB + NCCL's buffers 4.0 MiB = 3.7 GiB in all" in list(sentences(prediction))[1]
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
