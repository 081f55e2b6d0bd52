"""Peaks of a GPU beside the simulation's: the table, its errors, what is left out, and one run of it all."""

import json
import sys
from pathlib import Path

import pytest
import truth
from children import Ended
from measured import ways
from measured.case import CASES, TINY
from measured.table import TruthRow, document, row_of, summary, text
from measured.ways import Peaks, Ways
from results import FAILED, NO_TIME, PASSED, REFUSED, Row
from support.ready_python import Kind, ready_python

MIB = 1 << 20
REAL = Peaks(allocated=100 * MIB, reserved=120 * MIB, outside=500 * MIB)


def row(**changes: Peaks) -> TruthRow:
    peaks = {
        "plain": REAL,
        "recorded": REAL,
        "simulated": Peaks(allocated=99 * MIB, reserved=126 * MIB, outside=512 * MIB),
    }
    return TruthRow(case="gpt", precision="amp", **(peaks | changes))


def test_errors_are_of_what_is_real() -> None:
    assert row().allocated_error == pytest.approx(-0.01)
    assert row().reserved_error == pytest.approx(0.05)
    assert row().inside is None
    assert row().remark == ""
    assert truth.row_about(row()).outcome == PASSED


def test_an_interval_holds_what_is_real_or_does_not() -> None:
    low = {"allocated": 99 * MIB, "reserved": 126 * MIB}
    assert row(simulated=Peaks(**low, most_allocated=101 * MIB, most_reserved=130 * MIB)).inside is True
    narrow = row(simulated=Peaks(**low, most_allocated=99 * MIB, most_reserved=126 * MIB))
    assert narrow.inside is False
    assert narrow.remark == "outside of its interval"


def test_a_recording_that_is_not_pytorchs_own_count_is_a_failure() -> None:
    off = row(recorded=Peaks(allocated=100 * MIB - 512, reserved=120 * MIB))
    assert off.recorder_differs == -512
    assert truth.row_about(off).outcome == FAILED
    assert "the recording is off by -512 B" in truth.row_about(off).detail


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"plain": Peaks(allocated=1, reserved=1, why="out of memory")}, PASSED),
        ({"plain": Peaks(why="not installed: torchvision", refused=True)}, REFUSED),
        ({"simulated": Peaks(why="exit code 2: ampmem: no", refused=True)}, REFUSED),
        ({"plain": Peaks(why="exit code 1: ValueError")}, FAILED),
        ({"simulated": Peaks(why="no time left")}, FAILED),
    ],
)
def test_rows_without_an_error_say_why(changes: dict[str, Peaks], outcome: str) -> None:
    found = row(**changes)
    assert found.allocated_error is None
    assert next(iter(changes.values())).why in found.remark
    assert truth.row_about(found).outcome == outcome
    assert any(line.startswith("without an error: 1 of 1") for line in summary([found]))


def test_the_table_and_its_median_and_worst() -> None:
    exact = row(simulated=REAL)
    shown = text([row(), exact], "an H200").splitlines()
    assert shown[0] == "an H200"
    assert "100.0" in shown[3] and "-1.00 %" in shown[3] and "+5.00 %" in shown[3]
    assert shown[-2].startswith("all: allocated off by 0.50 % in the median, -1.00 % at worst, of 2; reserved")
    assert shown[-1] == "the recording's own peak is PyTorch's in 2 of 2 rows"


def test_rows_come_back_from_the_json_and_runs_are_joined(tmp_path: Path) -> None:
    machine: dict[str, truth.Fact] = {"gpu": "NVIDIA H200"}
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    later = row(plain=Peaks(allocated=2 * MIB, reserved=2 * MIB))
    one.write_text(json.dumps(document([row()], machine)))
    other.write_text(json.dumps(document([later], machine)))
    assert row_of(json.loads(one.read_text())["rows"][0]) == row()
    truth.join([one, other], tmp_path / "both")
    (kept,) = json.loads((tmp_path / "both.json").read_text())["rows"]
    assert row_of(kept) == later
    other.write_text(json.dumps(document([later], {"gpu": "another"})))
    with pytest.raises(ValueError, match="another machine"):
        truth.join([one, other], tmp_path / "both")


def test_the_cases_that_are_asked_for() -> None:
    everything = [name for name, _ in truth.chosen("", "")]
    assert set(everything) == set(CASES) - set(TINY)
    assert truth.chosen("bert,reuse", "") == [
        (name, precision) for name in ("bert", "reuse") for precision in ("fp32", "amp", "amp-nocache")
    ]
    rest = [name for name, _ in truth.chosen("", "hf-bert")]
    assert rest == everything[everything.index("hf-bert") :]
    with pytest.raises(ValueError, match="there is no case 'gpt9'"):
        truth.chosen("gpt9", "")


def test_the_gpu_is_simulated_by_its_name_or_its_memory() -> None:
    assert truth.gpu_of({"gpu": "NVIDIA H200", "total_memory": 1}) == "h200"
    assert truth.gpu_of({"gpu": "NVIDIA B300", "total_memory": 7 << 30}) == str(7 << 30)


class Fake(Ways):
    """Ways that take no time, but for a clock that moves."""

    __slots__ = ()

    def plain(self, case: str, precision: str) -> Peaks:
        truth.monotonic.now += 10  # type: ignore[attr-defined]
        return REAL

    def recorded(self, case: str, precision: str) -> Peaks:
        return REAL

    def simulated(self, case: str, precision: str) -> Peaks:
        return REAL


class Clock:
    """Seconds, as the test has it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_there_is_no_time_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "monotonic", Clock())
    runs = truth.chosen("bert", "")
    made = list(truth.measure(Fake(folder=tmp_path, gpu="h200"), runs, 25.0))
    assert [each.case if isinstance(each, TruthRow) else each for each in made] == [
        *("bert", "bert"),
        Row(name="bert amp-nocache", outcome=NO_TIME),
    ]


def test_a_run_that_fails_says_why() -> None:
    missing = ways.failed(Ended(code=3, seconds=1, lines=("step", "not installed: torchvision", "")))
    assert (missing.why, missing.refused) == ("not installed: torchvision", True)
    late = ways.failed(Ended(code=None, seconds=1, lines=("step 0", "")))
    assert (late.why, late.refused) == ("timed out: step 0", False)
    assert ways.failed(Ended(code=2, seconds=1, lines=("ampmem: this torch cannot simulate",))).refused


@pytest.mark.slow
def test_three_simulations_are_one_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "PRECISIONS", ("amp",))
    monkeypatch.setattr(sys, "executable", ready_python(kind=Kind.SIMULATED))
    code = truth.main(["--device", "sim", "--only", "tiny-cnn", "--out", str(tmp_path / "truth")])
    data = json.loads((tmp_path / "truth.json").read_text())
    assert code == 0
    assert data["schema"] == "ampmem.truth/1"
    first = row_of(data["rows"][0])
    assert first.allocated_error == first.reserved_error == 0
    assert first.recorder_differs == 0
    assert first.inside is True  # it has convolutions
    assert (tmp_path / "truth.txt").read_text().startswith("gpu simulated")
