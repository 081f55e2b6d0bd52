"""Which findings a file of ``ampmem advise --resume`` disproves, and of which recordings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.build import AMP, RUN, small_run

from ampmem.analysis.advised import KIND, Advised, EndedRun, read_advised
from ampmem.analysis.changes import CHANGES, Script, Trial
from ampmem.analysis.findings import FORCED_BY_ADVISE
from ampmem.analysis.findings.base import Finding, Section
from ampmem.analysis.fit import Memory
from ampmem.analysis.jsonable import plain
from ampmem.analysis.ranks.jobs import RankRun, rank_run_of
from ampmem.analysis.summary import Summary
from ampmem.errors import UsageError
from ampmem.events import Recording
from ampmem.vocabulary import NOTHING_FORCED, Device, Forced, Precision

MIB = 1 << 20
FUSED, FOREACH = Forced(fused=True), Forced(foreach=False)
EXPANDABLE = Forced(allocator="expandable_segments:True")
OF: dict[str, Any] = {
    KIND: "1",
    "torch": RUN.torch,
    "script": "train.py --epochs 1",
    "source": "0123",
    "device": "cpu",
    "GPU": "",
    "precision": "as-is",
    "assumption": [],
    "rank": "0 of 1",
}


def finding(code: str) -> Finding:
    return Finding(
        code=code, severity="advice", section=Section.PEAK, message="", bytes=9, change="", evidence=(), off_peak=9
    )


def ran(allocated: int, reserved: int = 0) -> Trial:
    return Trial(memory=Memory(allocated=allocated, reserved=reserved, used=reserved))


def advised(trials: dict[Forced, Trial], device: Device = Device.SIMULATED) -> Advised:
    script = Script(blocks=None, optimizers=(), updated=1, device=device, device_name=RUN.device_name)
    return Advised(
        path=Path("runs.jsonl"), identity=OF, trials={NOTHING_FORCED: ran(100 * MIB, 200 * MIB)} | trials, script=script
    )


FOREACH_CASES: dict[str, tuple[dict[Forced, Trial], str | None]] = {
    "neither saved": (
        {FUSED: ran(100 * MIB), FOREACH: ran(101 * MIB)},
        "foreach=False saved nothing, fused=True saved nothing",
    ),
    "one saved": ({FUSED: ran(100 * MIB), FOREACH: ran(90 * MIB)}, None),
    "one saved less than is told": (
        {FUSED: ran(100 * MIB), FOREACH: ran(100 * MIB - 2048)},
        "foreach=False saved 2.0 KiB, fused=True saved nothing",
    ),
    "one was not run": ({FUSED: ran(100 * MIB)}, None),
    "one was refused": (
        {FUSED: Trial(memory=None, failure="no such implementation"), FOREACH: ran(100 * MIB)},
        "foreach=False saved nothing",
    ),
    "both were refused": (dict.fromkeys((FUSED, FOREACH), Trial(memory=None, failure="no")), None),
    "one ran out of memory": ({FUSED: ran(100 * MIB), FOREACH: Trial(memory=None)}, None),
    "the script itself did": ({NOTHING_FORCED: Trial(memory=None), FUSED: ran(1), FOREACH: ran(1)}, None),
}


@pytest.mark.parametrize("case", FOREACH_CASES)
def test_a_finding_is_disproved_where_each_of_its_changes_saved_nothing(case: str) -> None:
    trials, saved = FOREACH_CASES[case]
    said = advised(trials).disproof(finding("foreach-temporaries"))
    assert said == (
        None
        if saved is None
        else f"the finding foreach-temporaries is left out: ampmem advise ran its change for this script: {saved}"
    )


def test_on_a_cpu_one_change_is_all_there_is() -> None:
    assert advised({FUSED: ran(100 * MIB)}, Device.CPU).disproof(finding("foreach-temporaries")) is not None


def test_the_setting_of_the_allocator_saves_reserved_memory() -> None:
    assert advised({EXPANDABLE: ran(100 * MIB, 150 * MIB)}).disproof(finding("fragmentation")) is None
    assert advised({EXPANDABLE: ran(50 * MIB, 200 * MIB)}).disproof(finding("fragmentation")) is not None


def test_findings_whose_change_is_not_run_stay() -> None:
    assert advised({FUSED: ran(1), FOREACH: ran(1)}).disproof(finding("copies-survive")) is None
    assert {name for names in FORCED_BY_ADVISE.values() for name in names.split(",")} <= {
        each.allow for each in CHANGES
    }


def test_of_activations_in_float32_only_the_loss_is_run() -> None:
    ran_in_chunks = advised({Forced(loss_chunks=8): ran(100 * MIB)})
    of_loss = replace(finding("fp32-activations"), proof="ampmem advise --allow loss train.py")
    assert (ran_in_chunks.disproof(of_loss) or "").endswith(": loss in 8 chunks saved nothing")
    assert ran_in_chunks.disproof(finding("fp32-activations")) is None


def recorded(**of_run: Any) -> Recording:
    found = small_run().recording()
    return replace(found, run=replace(RUN, script_sha256="0123", **of_run), precision=replace(AMP))


def shown(recording: Recording) -> tuple[Summary, RankRun]:
    """What becomes of a recording with both findings, of which one is disproved."""
    run = rank_run_of(recording, Path("train.ampmem"))
    assert run.entry is not None and run.summary is not None
    summary = replace(run.summary, findings=(finding("foreach-temporaries"), finding("copies-survive")))
    left = advised({FUSED: ran(100 * MIB), FOREACH: ran(100 * MIB)}).rank_without_disproved(
        replace(run, entry=replace(run.entry, summary=summary))
    )
    return left.summary, left


def test_what_is_left_out_is_said_in_the_tables_and_in_json() -> None:
    summary, run = shown(recorded())
    assert [each.code for each in summary.findings] == ["copies-survive"]
    (note,) = [note for note in summary.notes if "is left out" in note]
    assert note in run.notes and note in json.loads(summary.to_json())["notes"]


@pytest.mark.parametrize(
    ("of_run", "what"),
    [
        ({"script_sha256": "4567"}, "source of the script"),
        ({"arguments": ()}, "script"),
        ({"torch": "2.9.0"}, "version of torch"),
        ({"device_name": "another CPU"}, "GPU"),
        ({"assume": ("nonzero=1",)}, "assumption"),
        ({"world_size": 2}, "rank"),
    ],
)
def test_a_recording_of_something_else_keeps_its_findings_and_says_why(of_run: dict[str, Any], what: str) -> None:
    found = recorded()
    summary, run = shown(replace(found, run=replace(found.run, **of_run)))
    assert len(summary.findings) == 2
    assert run.notes[-1] == f"runs.jsonl: its runs differ from this one ({what}), so no finding is left out"
    assert summary.notes[-1] == run.notes[-1]


def test_a_forced_precision_is_another_one() -> None:
    found = recorded()
    summary, _ = shown(replace(found, precision=replace(found.precision, name=Precision.AMP, forced=True)))
    assert "(precision)" in summary.notes[-1]


def test_the_file_of_a_search_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    script = Script(blocks=None, optimizers=(), updated=1, device_name="a CPU")
    runs = (
        EndedRun(forced=NOTHING_FORCED, trial=ran(9), script=script),
        EndedRun(forced=FUSED, trial=Trial(memory=None, failure="no")),
    )
    path.write_text("\n".join(json.dumps(each) for each in (OF, *map(plain, runs))) + '\n{"forced"')
    found = read_advised(path)
    assert found.identity == OF and found.script == script
    assert found.trials == {run.forced: run.trial for run in runs}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("", "not a file that ampmem advise --resume has written"),
        ("[]\n", "not a file that ampmem advise --resume has written"),
        ("[" * 100_000, "not a file that ampmem advise --resume has written"),
        (json.dumps(OF), "it does not have the run of the script as it is yet"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "runs").write_text(text)
    with pytest.raises(UsageError, match=f"--advised .*: .*{why}"):
        read_advised(tmp_path / "runs")
