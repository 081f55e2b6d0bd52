"""The failed request: how much was lacking, what is still to come, what is said of that instant, what to run next."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.build import AMP, RUN, Story
from support.failures import ended, in_backward, in_forward, oom_at

from ampmem.allocator.oom import Reason
from ampmem.analysis.out_of_memory import FailedRequest, ToCome, advise_command
from ampmem.analysis.summary import Summary, summarize
from ampmem.cli.fit import varied_arguments
from ampmem.events import AllocatorRecord, Fact, OptimizerRecord, Phase, Recording
from ampmem.reporters.html.run import said_of
from ampmem.reporters.text.layout import Layout
from ampmem.reporters.text.table import render
from ampmem.vocabulary import SourceKind

ADAM = OptimizerRecord(class_name="Adam", implementation="foreach", bases=("Optimizer",), stepped=False)


def told(recording: Recording) -> FailedRequest:
    return summarize(recording).out_of_memory


def waiting(recording: Recording, *optimizers: OptimizerRecord) -> Recording:
    """None has stepped, and the first has all parameters."""
    parameters = tuple(replace(record, optimizer=0) for record in recording.parameters)
    return replace(recording, optimizers=(), waiting=optimizers, parameters=parameters)


@pytest.mark.parametrize(
    ("changes", "lacking", "reason", "left"),
    [
        # 1,200 bytes are reserved; 8,000 are asked for.
        ({}, 7700, Reason.EXHAUSTED, "the device had 300 B free"),
        ({"free": 9000, "limit": 4200}, 5000, Reason.LIMITED, "2.9 KiB were left of the 4.1 KiB that this process may"),
        ({"free": 300, "limit": 18_000}, 7700, Reason.EXHAUSTED, "the device had 300 B free"),
        ({"free": 9000}, 0, Reason.FRAGMENTED, ""),
    ],
)
def test_what_was_lacking_is_what_the_device_or_the_limit_left(
    changes: dict[str, int], lacking: int, reason: Reason, left: str
) -> None:
    recording = in_forward()
    summary = summarize(replace(recording, ooms=(replace(recording.ooms[0], **changes),)))  # type: ignore[arg-type]
    oom = summary.out_of_memory
    assert (oom.lacking, oom.reason) == (lacking, reason)
    text = " ".join(render(summary, ()).split())
    assert left in text
    assert ("missing" in text) == bool(lacking)
    tiles = {tile.label: tile.bytes for tile in said_of(summary, ()).headlines}
    assert tiles["At the failure"] == 1100 and tiles.get("Missing", 0) == lacking
    assert tiles.get("Left below the limit") == (3000 if reason is Reason.LIMITED else None)
    if oom.allowed is not None:
        assert f"(which may use {'4.1' if oom.reason is Reason.LIMITED else '17.6'} KiB)" in text


def test_what_is_to_come_are_the_gradients_and_the_state_that_do_not_exist() -> None:
    first = waiting(in_backward(), ADAM)  # 100 and 10 elements, the latter with a gradient
    assert told(first).to_come == ToCome(gradients=400, parameters=1, optimizer_state=880, optimizers=("Adam",))
    frozen = tuple(replace(record, trainable=record.elements == 100) for record in first.parameters)
    assert told(replace(first, parameters=frozen)).to_come == ToCome(
        gradients=400, parameters=1, optimizer_state=800, optimizers=("Adam",)
    )
    plain = replace(ADAM, class_name="SGD")
    found = told(waiting(in_backward(), plain)).to_come
    assert found is not None and found.optimizer_state == 0
    unknown = told(waiting(in_backward(), replace(ADAM, class_name="Mine"))).to_come
    assert unknown is not None and unknown.optimizer_state is None
    assert "optimizer state of unknown size" in render(
        summarize(waiting(in_backward(), replace(ADAM, class_name="Mine"))), ()
    )
    none = told(replace(in_backward(), optimizers=())).to_come
    assert none is not None and (none.gradients, none.optimizer_state) == (400, None)


def in_the_first_update() -> Recording:
    """Of two parameters the first has both states of Adam, and the second one of them."""
    story = Story(weight=100, name="a")
    story.parameter(0x1800, "b", 10)
    story.begin(0, Phase.BACKWARD)
    for address, name, size in ((0x3000, "a", 400), (0x3800, "b", 40)):
        story.tensor(Fact.GRADIENT, address, size, name)
    story.enter(Phase.OPTIMIZER)
    for address, name, size in (
        (0x4000, "exp_avg of a", 400),
        (0x4800, "exp_avg_sq of a", 400),
        (0x5000, "exp_avg of b", 40),
    ):
        story.tensor(Fact.OPTIMIZER_STATE, address, size, name)
    story.now += 10
    recording = ended(story, story.now, (400, 40, 400, 40, 400, 400, 40))
    parameters = tuple(replace(record, optimizer=0) for record in recording.parameters)
    return replace(recording, parameters=parameters, optimizers=(replace(ADAM, stepped=True),))


def test_in_the_middle_of_the_first_update_the_rest_of_the_state_is_to_come() -> None:
    oom = told(in_the_first_update())
    assert oom.to_come == ToCome(gradients=0, parameters=0, optimizer_state=40, optimizers=("Adam",))
    changes = [option.change for option in oom.options]
    assert not any("foreach" in change for change in changes), "the state is made before there are temporaries"


def chunks(steps: int = 2) -> Recording:
    """A whole step with 12,000 bytes of a loss's float32 activations; in the next one 4,000 of them are left.

    With one step the first one is that which fails.
    """
    story = Story(weight=100, name="layers.0.weight")
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        for address, size in ((0x2000, 8000), (0x3000, 4000)):
            story.tensor(Fact.SAVED, address, size, "aten::nll_loss_forward", op="aten::_to_copy", dtype="float32")
        story.enter(Phase.BACKWARD)
        story.free(0x2000)
        if step == steps - 1:
            break
        story.free(0x3000)
        story.tensor(Fact.GRADIENT, 0x5000, 400, "layers.0.weight")
        story.enter(Phase.OPTIMIZER)
        story.free(0x5000)
        story.end()
    story.now += 10
    return ended(story, story.now, (400, 4000), step=steps - 1, precision=AMP)


def in_a_first_foreach_update() -> Recording:
    """The state is there, and 800 bytes of the update's temporaries."""
    story = Story(weight=1000, name="a", begins=Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x10000, 4000, "a")
    story.enter(Phase.OPTIMIZER)
    for address, name in ((0x20000, "exp_avg of a"), (0x30000, "exp_avg_sq of a")):
        story.tensor(Fact.OPTIMIZER_STATE, address, 4000, name)
    story.alloc(0x40000, 4000, op="Adam.step")
    story.now += 10
    recording = ended(story, story.now, (4000,) * 5)
    parameters = tuple(replace(record, optimizer=0) for record in recording.parameters)
    optimizer = replace(ADAM, stepped=True, settings={"fused": None})
    return replace(recording, parameters=parameters, optimizers=(optimizer,))


@pytest.mark.parametrize(
    ("recording", "code", "size"),
    [(chunks(1), "fp32-activations", 3500), (in_a_first_foreach_update(), "foreach-temporaries", 4000)],
)
def test_what_is_known_at_the_failure_is_told_of_a_first_step_too(recording: Recording, code: str, size: int) -> None:
    summary = summarize(recording)
    assert not any(step.finished for step in summary.steps)
    (finding,) = [each for each in summary.findings if each.code == code]
    assert (finding.off_failure, finding.off_peak, finding.severity) == (size, None, "advice")
    assert f"- {finding.at_least}{size / 1024:.1f} KiB less at the failure: {finding.change[:20]}" in render(
        summary, ()
    )


def test_an_advice_has_the_bytes_that_it_saves_at_the_failure() -> None:
    summary = summarize(chunks())
    (finding,) = [each for each in summary.findings if each.code == "fp32-activations"]
    assert summary.peak.bytes == 12_400
    assert (finding.off_failure, finding.off_peak, finding.severity) == (4000 * 7 // 8, None, "advice")
    assert "3.9 KiB of the 3.9 KiB that autograd keeps at the failure" in finding.message
    text = " ".join(render(summary, ()).split())
    assert "- at least 3.4 KiB less at the failure: compute the loss in 8 chunks" in text
    assert "Largest saving found, at least 3.4 KiB at the failure" in text
    went_on = replace(chunks(), steps=tuple(replace(step, finished=True) for step in chunks().steps))
    (same,) = [each for each in summarize(went_on).findings if each.code == "fp32-activations"]
    assert (same.off_failure, same.off_peak) == (4000 * 7 // 8, 12_000 * 7 // 8)


def test_advice_for_the_peak_that_would_not_have_helped_is_not_given() -> None:
    story = Story(weight=100, name="layers.0.weight")
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        if step:
            break
        story.tensor(Fact.SAVED, 0x2000, 8000, "aten::nll_loss_forward", op="aten::_to_copy", dtype="float32")
        story.enter(Phase.BACKWARD)
        story.free(0x2000)
        story.end(Phase.OPTIMIZER)
    story.now += 10
    failed = ended(story, story.now, (400,), step=1, precision=AMP)
    went_on = replace(failed, steps=tuple(replace(step, finished=True) for step in failed.steps))
    assert "fp32-activations" in [finding.code for finding in summarize(went_on).findings]
    assert "fp32-activations" not in [finding.code for finding in summarize(failed).findings]


def test_the_answer_is_of_the_failure_and_not_of_the_peak() -> None:
    summary = summarize(chunks())
    first, second = render(summary, ()).splitlines()[:2]
    assert first == "Out of memory at 4.3 KiB: 91 % activations, 9 % parameters."
    assert second.startswith(
        "In backward of step 1, a block of 4.9 KiB in a new segment of 7.8 KiB was requested: 7.5 KiB"
    )
    assert [(item.bytes, item.category) for item in summary.ended_by.largest] == [
        (4000, "activations"),
        (400, "parameters"),
    ]


def test_of_several_failures_the_last_one_is_told() -> None:
    recording = in_forward()
    (once,) = [each for each in summarize(recording).findings if each.code == "out-of-memory"]
    assert "requests failed" not in once.message
    (last,) = recording.ooms
    twice = replace(recording, ooms=(replace(last, time_ns=last.time_ns - 1), last))
    (found,) = [each for each in summarize(twice).findings if each.code == "out-of-memory"]
    assert "(2 requests failed; this is the last)" in found.message


def elsewhere() -> Summary:
    recording = in_forward()

    here = AllocatorRecord(
        variable="", settings="", expandable_segments=False, streams=1, private_pools=0, device=0, peaks=(1, 2)
    )
    oom = replace(oom_at(recording.ooms[0].time_ns, (3000, 2000)), device=1)
    return summarize(replace(recording, ooms=(oom,), allocator=here))


def test_another_device_is_explained_without_the_categories_of_the_recorded_one() -> None:
    summary = elsewhere()
    oom = summary.out_of_memory
    assert (oom.device, oom.recorded, oom.residual_bytes) == (1, False, 0)
    assert {str(category): size for category, size in oom.alive.items() if size} == {"other": 5000}
    assert (oom.reserved, oom.lacking, oom.to_come, oom.largest, oom.next_commands) == (5100, 7700, None, (), ())
    assert summary.findings[0].message.startswith("cuda:1 (not the recorded device) ran out of memory")
    text = " ".join(render(summary, ()).split())
    assert "a block of 4.9 KiB in a new segment of 7.8 KiB on cuda:1 was requested" in text
    assert "device cuda:1 (not the recorded device): 19.5 KiB, of which 300 B were free" in text


@pytest.mark.parametrize(
    ("arguments", "varied"),
    [
        (("--batch-size", "16"), ["--vary", "--batch-size 1:16"]),
        (("--epochs", "1", "--batch_size=8", "x"), ["--epochs", "1", "x", "--vary", "--batch_size=1:8"]),
        (("train.batch_size=32",), ["--vary", "train.batch_size=1:32"]),
        (("--per_device_train_batch_size", "4"), None),
        (("-b", "4"), ["--vary", "-b 1:4"]),
        (("--batch-sizes", "a"), ()),
        (("--epochs", "1"), ()),
    ],
)
def test_the_commands_run_the_same_script_with_the_same_options(
    arguments: tuple[str, ...], varied: Sequence[str] | None
) -> None:
    if varied is None:
        varied = ["--vary", "--per_device_train_batch_size 1:4"]
    run = replace(
        RUN,
        source=SourceKind.SIMULATED,
        device_name="NVIDIA H100 80GB HBM3",
        script="my train.py",
        arguments=arguments,
        step_on="backward",
        assume=("nonzero=0.5",),
    )
    recording = in_forward()
    forced = replace(AMP, forced=True)
    oom = replace(recording.ooms[0], total=81_090 << 20)
    commands = [
        shlex.split(line) for line in told(replace(recording, run=run, precision=forced, ooms=(oom,))).next_commands
    ]
    shared = ["--assume", "nonzero=0.5", "--dtype", "bf16", "--step-on", "backward"]
    assert commands[-1] == [
        *("ampmem", "profile", "--device", "sim", "--gpu", "b200", "--precision", "amp"),
        *(*shared, "my train.py", *arguments),
    ]
    fit = ["ampmem", "fit", "--gpu", "h100", "--precision", "amp", *shared, "my train.py", *varied]
    advise = ["ampmem", "advise", "--gpu", "h100", "--precision", "amp", *shared, "my train.py", *arguments]
    assert commands[:-1] == ([advise, fit] if varied else [advise])
    narrow = render(summarize(replace(recording, run=run, precision=forced, ooms=(oom,))), (), layout=Layout(width=40))
    printed = narrow.partition("to run next\n\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    assert [shlex.split(line) for line in printed.splitlines()][: len(commands)] == commands
    if varied:
        varied_arguments((), varied)  # it is understood
    else:
        assert "name the argument for the batch size" in render(summarize(replace(recording, run=run, ooms=(oom,))), ())


def test_what_no_command_line_has_started_has_no_command_that_proves_it() -> None:
    recording = in_forward()
    simulated = replace(recording.run, source=SourceKind.SIMULATED, device_name="24GiB", arguments=("a b",))
    assert advise_command(replace(recording, run=simulated), None) == "ampmem advise --gpu 24GiB train.py 'a b'"
    unknown = replace(simulated, source=SourceKind.CUDA, device_name="a GPU")
    assert advise_command(replace(recording, run=unknown), None) is None
    cell = replace(simulated, script="<cell>")
    assert advise_command(replace(recording, run=cell), None) is None
