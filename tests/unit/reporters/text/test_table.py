from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from build import ARM, Story, small_run, write
from click.testing import CliRunner

from ampmem.analysis.compare import Entry
from ampmem.analysis.summary import Summary, summarize
from ampmem.cli.show import show
from ampmem.errors import NothingRecorded, RecordingError
from ampmem.events import Fact, Phase
from ampmem.recording import read
from ampmem.reporters.text.frames import user_frame
from ampmem.reporters.text.plain_text import WIDTH, per_parameter, shorten
from ampmem.reporters.text.static_model import render_static_model
from ampmem.reporters.text.static_models import render_static_models
from ampmem.reporters.text.table import MODULES, render

GOLDEN = """\
script      train.py --epochs 1
device      a CPU (cpu), events from cpu
arm         amp, bfloat16, cache on
torch       2.13.0, ampmem 0.1.0
parameters  150 in 600 B, 100 trainable, 100 cast by autocast
optimizer   AdamW (foreach)

  step    loss    loss scale  update       peak  in          took
------  ------  ------------  --------  -------  --------  ------
     0     2.5             -  done      2.3 KiB  backward    0 µs
     1     1.5             -  done      3.0 KiB  backward    0 µs

step 1, peak in backward

                      after       B/       after       B/     after       B/     peak       B/
                    forward    param    backward    param    update    param             param
----------------  ---------  -------  ----------  -------  --------  -------  -------  -------
parameters            600 B     4.00       600 B     4.00     600 B     4.00    600 B     4.00
gradients               0 B     0.00       400 B     2.67     400 B     2.67    400 B     2.67
optimizer_state       800 B     5.33       800 B     5.33     800 B     5.33    800 B     5.33
precision_copies      200 B     1.33         0 B     0.00       0 B     0.00    200 B     1.33
└ cast_copies         200 B     1.33         0 B     0.00       0 B     0.00    200 B     1.33
activations          1000 B     6.67         0 B     0.00       0 B     0.00   1000 B     6.67
inputs                 32 B     0.21        32 B     0.21      32 B     0.21     32 B     0.21
temporaries             0 B     0.00         0 B     0.00       0 B     0.00     16 B     0.11
└ in backward                                                                    16 B     0.11
other                  64 B     0.43        64 B     0.43      64 B     0.43     64 B     0.43
total               2.6 KiB    17.97     1.9 KiB    12.64   1.9 KiB    12.64  3.0 KiB    20.75

static memory: what torch.autocast does, with AdamW: 16 bytes per parameter, 18 while the casts live

end of forward       told       B/    measured       B/  why
                             param                param
----------------  -------  -------  ----------  -------  ------------------------------------------
parameters          600 B     4.00       600 B     4.00  as told
cast_copies         300 B     2.00       200 B     1.33  -100 B other parameters of which no cast
                                                           was made (layers.1.weight; 33 % of told)
gradients           600 B     4.00         0 B     0.00  -400 B gradients freed before this mark
                                                           (layers.0.weight; 67 % of told)
                                                         -200 B frozen parameters (layers.1.weight;
                                                           33 % of told)
optimizer_state   1.2 KiB     8.00       800 B     5.33  -400 B frozen parameters (layers.1.weight;
                                                           33 % of told)
                                                         NOT EXPLAINED: more in some tensors and as
                                                           much less in others
total             2.6 KiB    18.00     1.6 KiB    10.67  NOT EXPLAINED: more in some tensors and as
                                                           much less in others

after backward       told       B/    measured       B/  why
                             param                param
----------------  -------  -------  ----------  -------  ------------------------------------------
parameters          600 B     4.00       600 B     4.00  as told
gradients           600 B     4.00       400 B     2.67  -200 B frozen parameters (layers.1.weight;
                                                           33 % of told)
optimizer_state   1.2 KiB     8.00       800 B     5.33  -400 B frozen parameters (layers.1.weight;
                                                           33 % of told)
                                                         NOT EXPLAINED: more in some tensors and as
                                                           much less in others
total             2.3 KiB    16.00     1.8 KiB    12.00  NOT EXPLAINED: more in some tensors and as
                                                           much less in others

after the update: the same

the model does not hold: optimizer_state at the end of forward: not explained: more in some tensors
  and as much less in others; optimizer_state after backward: not explained: more in some tensors
  and as much less in others; optimizer_state after the update: not explained: more in some tensors
  and as much less in others

activations at the end of forward, 1000 B: 0 % are in low precision

saved for    made by    type      tensors    bytes    share
-----------  ---------  ------  ---------  -------  -------
MmBackward0  mm         ?               1   1000 B    100 %

module, with all below it      parameters    activations    cast copies    gradients
---------------------------  ------------  -------------  -------------  -----------
(model)                             600 B         1000 B          200 B        400 B
layers                              600 B         1000 B          200 B        400 B
layers.0                            400 B         1000 B          200 B        400 B
layers.1                            200 B            0 B            0 B          0 B

largest allocations at the peak (step 1, 3.0 KiB)

  bytes  category         name                        module    op
-------  ---------------  --------------------------  --------  --------------
 1000 B  activations      MmBackward0                 layers.0  aten::mm
  800 B  optimizer_state  exp_avg of layers.0.weight  -         -
  400 B  parameters       layers.0.weight             layers.0  -
  400 B  gradients        layers.0.weight             -         -
  200 B  parameters       layers.1.weight             layers.1  -
  200 B  cast_copies      layers.0.weight             layers.0  aten::_to_copy
            at net.py:3 forward
   64 B  other            -                           -         -
   32 B  inputs           -                           -         -
   16 B  temporaries      -                           -         -

conservation: 32 events, residual 0 B
note: something was not seen"""


def small() -> Summary:
    return summarize(small_run().recording())


def hostile() -> Summary:
    """Names of 300 characters with control characters in them, and sizes at their widest."""
    story = Story()
    ugly = "\x1b[31m" + "x" * 295 + "\n"
    size = 1023 * 2**40 + 900 * 2**30  # 1023.9 TiB
    for number in range(2):
        story.parameter(0x1000 + number, f"{ugly}.{number}.weight", 7)
    story.begin(0)
    for number, fact in enumerate(Fact):
        story.enter(Phase.FORWARD if number % 2 else Phase.OPTIMIZER)
        story.alloc(0x2000 + number, size, op=ugly, module=f"{ugly}.{number}", stack=f"{ugly}:1 {ugly}\n{ugly}:2 f")
        story.fact(fact, 0x2000 + number, ugly, f"{ugly}.{number}")
    for phase in Phase:
        story.enter(phase)
        story.alloc(0x3000, size, stack=ugly)
        if phase == Phase.BACKWARD:
            story.alloc(0x4000, size)
            story.fact(Fact.MASTER_COPY, 0x4000, ugly)
        story.free(0x3000)
    story.end(loss=-1.23456e-300, scale=2.0**128)
    story.enter(Phase.BACKWARD)
    recording = story.recording()
    run = replace(
        recording.run, script=ugly, device_name=ugly, torch=ugly, ampmem=ugly, device_type=ugly, rank=7, world_size=8
    )
    optimizers = tuple(replace(recording.optimizers[0], class_name=ugly) for _ in range(3))
    return summarize(replace(recording, run=run, arm=replace(ARM, name=ugly, dtype=ugly), optimizers=optimizers))


def test_a_small_run_in_full() -> None:
    assert render(small(), ["something was not seen"], title="train.py --epochs 1") == GOLDEN


@pytest.mark.parametrize("all_steps", [False, True])
def test_nothing_is_ever_wider_than_the_page(all_steps: bool) -> None:
    summary = hostile()
    ugly = "\x1b[31m" + "x" * 295 + "\n"
    text = render(summary, [ugly, "word " * 100, ""], title=ugly, all_steps=all_steps)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(character.isprintable() or character == "\n" for character in text)


def test_the_widest_figures_fit() -> None:
    summary = hostile()
    widest = dict.fromkeys(summary.peak.categories, 1023 * 2**40 + 900 * 2**30)
    step = summary.steps[0]
    marks = replace(step.marks, after_forward=widest, after_backward=widest, after_optimizer=widest)
    step = replace(step, marks=marks, peak=replace(step.peak, categories=widest))
    lines = render(replace(summary, steps=(step,)), []).splitlines()
    assert any(line.count("1023.9 TiB") == 4 for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_every_step_is_broken_down_when_asked_for() -> None:
    few, all_steps = render(small(), []), render(small(), [], all_steps=True)
    assert [few.count(f"step {index}, peak in backward") for index in (0, 1)] == [0, 1]
    assert [all_steps.count(f"step {index}, peak in backward") for index in (0, 1)] == [1, 1]


def test_a_missing_mark_is_no_zero() -> None:
    story = small_run()
    story.begin(2)
    story.end(skipped=True, loss=None, scale=1024.0)
    text = render(summarize(story.recording()), [])
    assert ["parameters", *["-"] * 6, "600", "B", "4.00"] in [line.split() for line in text.splitlines()]
    assert "2       -          1024  skipped" in text


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_finite_number_is_shown(loss: str, tmp_path: Path) -> None:
    story = small_run()
    story.begin(2)
    story.end(loss=float(loss))
    text = render(summarize(read(write(tmp_path / "run.ampmem", story.recording()))), [])
    assert ["2", loss, "-"] in [line.split()[:3] for line in text.splitlines()]


@pytest.mark.parametrize("name", [f"encoder.layers.{'0.' * 40}in_proj_weight", f"a-{'b-' * 15}c", "w" * 38])
def test_names_in_the_static_model_are_shortened_and_never_broken(name: str) -> None:
    story = Story()
    story.parameter(0x1000, name, 10)
    story.parameter(0x2000, f"{name}.too", 20)
    story.begin(0)
    story.enter(Phase.FORWARD)
    story.enter(Phase.BACKWARD)
    story.fact(Fact.GRADIENT, 0x9000, "another")
    story.end()
    summary = summarize(story.recording())
    (term,) = next(row for row in summary.static_model if row.component == "gradients").terms
    assert term.names == (f"{name}.too", name)
    several = render_static_models([Entry(label=label, summary=summary) for label in ("one", "other")])
    for width, text in ((38, render_static_model(summary)), (60, several)):
        words = [word.strip("(),;:") for word in text.split()]
        assert [words.count(shorten(each, width)) > 0 for each in term.names] == [True, True]
        assert max(map(len, text.splitlines())) <= WIDTH


def test_precision_copies_are_shown_even_when_there_are_none() -> None:
    story = Story()
    story.parameter(0x1000, "weight", 10)
    story.begin(0)
    story.enter(Phase.BACKWARD)
    story.end()
    text = render(summarize(story.recording()), [])
    assert "precision_copies" in text
    breakdown = text.split("static memory")[0]
    assert "cast_copies" not in breakdown
    assert "gradients  " not in breakdown


def test_modules_left_out_are_counted() -> None:
    story = Story()
    for number in range(20):
        story.parameter(0x1000 + number, f"layer{number}.weight", 10 + number)
    story.begin(0)
    story.enter(Phase.BACKWARD)
    story.end()
    text = render(summarize(story.recording()), [])
    assert f"… and {21 - MODULES} smaller modules" in text
    assert "layer19" in text.split("largest")[0]
    assert "layer0 " not in text.split("largest")[0]


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcd…ghijk"
    assert shorten("a\nb\x1bc\ud800", 10) == "a?b?c?"


@pytest.mark.parametrize(
    ("size", "parameters", "text"),
    [
        (0, 10, "0.00"),
        (1, 1000, "<0.01"),
        (40, 10, "4.00"),
        (99999, 10, "9999.90"),
        (100_000, 10, "10000"),
        (99_999_989, 10, "9999999"),
        (10**9, 10, "1.0e+08"),
        (5, 0, "-"),
    ],
)
def test_bytes_per_parameter(size: int, parameters: int, text: str) -> None:
    assert per_parameter(size, parameters) == text
    assert len(text) <= 7


def test_the_users_frame_is_the_innermost_outside_the_libraries() -> None:
    library = "/usr/lib/python3/site-packages/torch/nn/functional.py:1 linear"
    assert user_frame(["a.py:1 main", "b.py:2 forward", library]) == "b.py:2 forward"
    installed = "/env/site-packages/my_project/model.py:5 forward"
    assert user_frame([installed, library]) == installed
    assert user_frame([library]) == library
    assert user_frame([]) is None


def test_show_prints_several_recordings_in_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ampmem", small_run().recording(notes=["something was not seen"]))
    once = CliRunner().invoke(show, [str(path)], catch_exceptions=False)
    assert (once.exit_code, once.output) == (0, GOLDEN + "\n")
    twice = CliRunner().invoke(show, ["--each", str(path), str(path)], catch_exceptions=False)
    assert twice.output.endswith(f"\n\n{'=' * WIDTH}\n\n{GOLDEN}\n\n{'=' * WIDTH}\n\n{GOLDEN}\n")
    steps = CliRunner().invoke(show, ["--steps", str(path)], catch_exceptions=False)
    assert "step 0, peak in" in steps.output


def test_show_json_is_an_object_or_an_array(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ampmem", small_run().recording())
    expected = json.loads(small().to_json())
    one = CliRunner().invoke(show, ["--json", str(path)], catch_exceptions=False)
    assert json.loads(one.output) == expected
    two = CliRunner().invoke(show, ["--json", str(path), str(path)], catch_exceptions=False)
    assert json.loads(two.output) == [expected, expected]


def test_show_names_the_file_that_is_at_fault(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.ampmem", Story().recording())
    with pytest.raises(NothingRecorded, match=r"empty\.ampmem: .*no step ended"):
        CliRunner().invoke(show, [str(empty)], catch_exceptions=False)
    story = small_run()
    story.free(0xDEAD)
    bad = write(tmp_path / "bad.ampmem", story.recording())
    with pytest.raises(RecordingError, match=r"bad\.ampmem: .*damaged"):
        CliRunner().invoke(show, [str(bad)], catch_exceptions=False)
