"""The step in which memory ran out: what counts in it, what is concluded from it, and how it is shown."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from support.build import Story, small_run, write
from support.failures import FP32, ended, in_backward, in_forward, oom_at
from support.golden_sections import Golden

from ampmem.analysis.analyse import analyse
from ampmem.analysis.comparison import Entry, compare, entry_of
from ampmem.analysis.out_of_memory import FailedRequest
from ampmem.analysis.soundness import measure
from ampmem.analysis.summary import summarize, summary_schema
from ampmem.errors import NothingRecorded
from ampmem.events import Fact, Phase, PrecisionRecord, Recording
from ampmem.recorder.sources.cuda.oom import ended_with
from ampmem.recording import read
from ampmem.reporters.base import EVERYTHING
from ampmem.reporters.html.notebook import html_of, summary_card
from ampmem.reporters.html.run import run_view, said_of
from ampmem.reporters.text.compare import render as render_comparison
from ampmem.reporters.text.plain_text import WIDTH
from ampmem.reporters.text.table import render


def in_the_second_step() -> Recording:
    """The first step is a whole one, without any optimizer state; the second asks in vain in its forward."""
    story = Story(weight=100, name="layers.0.weight")
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.alloc(0x2000, 200 + 4000 * step)
        story.fact(Fact.OUTPUT, 0x2000, "aten::mm", "layers.0")
        if step == 0:
            story.enter(Phase.BACKWARD)
            story.free(0x2000)
            story.tensor(Fact.GRADIENT, 0x5000, 400, "layers.0.weight")
            story.end(Phase.OPTIMIZER, skipped=True)
            story.enter(Phase.BETWEEN)
            story.free(0x5000)
    story.now += 10
    return ended(story, story.now, (400, 4200), step=1)


def caught() -> Recording:
    """Two whole steps, with a failure in the second."""
    story = small_run()
    return replace(story.recording(), ooms=(oom_at(story.now, (64, 600), step=1),))


def told(recording: Recording) -> FailedRequest:
    return summarize(recording).out_of_memory


def alive(recording: Recording) -> dict[str, int]:
    return {str(category): size for category, size in told(recording).alive.items() if size}


def test_what_forward_made_and_still_has_when_memory_runs_out_are_activations() -> None:
    assert alive(in_forward()) == {"parameters": 400, "activations": 700}
    oom = told(in_forward())
    assert (oom.residual_bytes, oom.reserved, oom.cached) == (0, 1200, 100)
    assert oom.outside == 20_000 - 300 - 1200
    assert oom.where == "forward of step 0"


def test_the_same_without_the_failure_are_temporaries() -> None:
    recording = in_forward()
    whole = replace(recording, steps=(replace(recording.steps[0], finished=True),))
    live = analyse(whole).timeline.breakdown(3)
    assert {str(category): size for category, size in live.items() if size} == {
        "parameters": 400,
        "activations": 200,
        "temporaries": 500,
    }


def test_in_backward_what_is_in_use_is_temporary_and_what_forward_left_is_not() -> None:
    recording = in_backward()
    assert alive(recording) == {"parameters": 440, "gradients": 40, "activations": 200, "temporaries": 300}
    assert told(recording).temporaries_by_phase["backward"] == 300
    (step,) = summarize(recording).steps
    assert step.marks.after_forward is not None
    assert step.marks.after_backward is None  # the engine has raised, which is no end


def in_setup() -> Recording:
    story = Story()
    story.alloc(0x1000, 640)
    story.now += 10
    when = story.now
    story.now += 10
    recording = ended(story, when, (640,), step=-1)
    return replace(recording, steps=(replace(recording.steps[0], index=0),))


def test_a_failure_in_setup_has_its_place_and_no_model() -> None:
    assert told(in_setup()).where == "setup"
    assert alive(in_setup()) == {"other": 640}


def under_amp() -> Recording:
    return replace(in_forward(), precision=PrecisionRecord(name="amp", dtype="bfloat16", cache=True, scaler=False))


@pytest.mark.parametrize("run", [in_setup, in_forward, under_amp, in_backward, in_the_second_step])
def test_the_tables_have_the_failure_near_the_top(run: Callable[[], Recording], golden: Golden) -> None:
    recording = run()
    text = render(summarize(recording), recording.notes, title="train.py", details=EVERYTHING)
    golden(text)
    lines = text.splitlines()
    assert next(number for number, line in enumerate(lines) if line.startswith("out of memory in ")) <= 5
    assert max(map(len, lines)) <= WIDTH


def test_where_it_was_is_said_in_words() -> None:
    oom = told(in_forward())
    assert replace(oom, phase="between").where == "step 0, outside of forward, backward and update"
    assert replace(oom, phase="optimizer", step=3).where == "the optimizer's update of step 3"
    assert replace(oom, phase="data", step=None).where == "data loading"


def test_nothing_is_concluded_from_what_an_unfinished_step_lacks() -> None:
    recording = in_the_second_step()
    summary = summarize(recording)
    assert [finding.code for finding in summary.findings] == ["out-of-memory"]
    assert [finding.code for finding in summarize(in_backward()).findings] == ["out-of-memory"]
    assert summary.peak.step == 1 and summary.peak.bytes == 4600
    assert summary.last_step.index == 0
    with pytest.raises(NothingRecorded, match="nothing to compare with"):
        measure(summary)
    done = replace(recording, steps=(replace(recording.steps[0], skipped_update=False), recording.steps[1]))
    assert measure(summarize(done)).step == 0


@pytest.mark.parametrize("recording", [in_forward(), in_backward(), in_the_second_step(), caught()])
def test_the_json_is_as_the_schema_says(recording: Recording, tmp_path: Path) -> None:
    read_back = read(write(tmp_path / "run.ampmem", recording))
    assert (read_back.steps, read_back.ooms) == (recording.steps, recording.ooms)
    value = json.loads(summarize(read_back).to_json())
    jsonschema.Draft202012Validator(summary_schema()).validate(value)
    assert value["out_of_memory"]["ended_the_run"] == (not value["steps"][-1]["finished"])


def alike(entry: Entry, recording: Recording) -> Entry:
    """``entry`` with the model and the device of ``recording``: what differs beside precision is not compared."""
    other = summarize(recording)
    same = replace(entry.summary, parameters=other.parameters, device=other.device, source=other.source)
    return replace(entry, summary=same)


def test_a_precision_that_ran_out_is_compared_as_far_as_it_got(golden: Golden) -> None:
    whole = entry_of(small_run().recording(precision=FP32))
    failed = entry_of(in_the_second_step(), label="amp")
    comparison = compare([whole, failed])
    # No update of the failed precision was done.
    assert [column.step and column.step.index for column in comparison.columns] == [1, 0]
    early = compare([alike(whole, in_forward()), entry_of(in_forward(), label="amp")])
    assert [column.step and column.step.index for column in early.columns] == [1, 0]
    assert [column.peak_difference for column in early.columns] == [0, None]
    golden(render_comparison(early))
    both = compare([entry_of(in_forward()), entry_of(in_forward(), label="again")])
    assert "after backward" not in render_comparison(both, details=EVERYTHING)


def test_the_page_points_at_the_instant() -> None:
    recording = in_the_second_step()
    analysis, summary = analyse(recording), summarize(recording)
    events, said = run_view(entry_of(recording), summary, analysis, 10**6).events, said_of(summary, summary.findings)
    assert events is not None and said.out_of_memory is not None
    assert events.failure == len(recording.events)
    assert events.instant is not None and (events.instant.name, events.instant.position) == ("failure", events.failure)
    assert said.out_of_memory.frames == ("train.py:9 main",)
    assert "out-of-memory" not in [finding.code for finding in said.findings], "its section says it all"
    assert [step.update for step in said.steps] == ["skipped", "out of memory"]
    assert "1 finished step" in said.facts
    assert said_of(summarize(small_run().recording()), ()).out_of_memory is None
    assert "step 0" in html_of(summary_card(summary))


def _error(*, cause: BaseException | None = None, context: BaseException | None = None) -> BaseException:
    error = ValueError("no")
    error.__cause__, error.__context__ = cause, context
    return error


OUT = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("failure", "forward_ns", "ends"),
    [
        (OUT, 10, True),
        (OUT, 30, False),  # it had gone on, and this failure left no record
        (_error(cause=OUT), 10, True),
        (_error(context=_error(context=OUT)), 10, True),
        (_error(), 10, False),
        (KeyboardInterrupt(), 10, False),
        (SystemExit(1), 10, True),
        (None, 10, True),
        (None, 30, False),
    ],
)
def test_a_run_ends_with_a_failure_that_nothing_came_after(
    failure: BaseException | None, forward_ns: int, ends: bool
) -> None:
    assert ended_with(failure, [oom_at(5, ()), oom_at(20, ())], forward_ns) == ends


def test_without_a_failed_request_no_run_ends_so() -> None:
    assert not ended_with(OUT, [], 0)
