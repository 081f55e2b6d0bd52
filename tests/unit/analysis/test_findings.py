import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.build import AMP, FP32, RUN, Story, small_run

from ampmem.allocator.settings import Settings
from ampmem.allocator.trace import CallTrace
from ampmem.analysis.analyse import analyse
from ampmem.analysis.answer import verdict_of_one
from ampmem.analysis.estimate import break_even, first_saving
from ampmem.analysis.findings import CHECKS, OF_INFERENCE, findings, whole_run
from ampmem.analysis.findings.base import Finding, TrainingRun, own_frame
from ampmem.analysis.findings.precision import IN_EVALUATION, fp32_activations
from ampmem.analysis.summary import summarize
from ampmem.events import OTHER_THREADS, Action, Fact, Phase, PrecisionRecord, Recording
from ampmem.names import MAPPED, shape_text
from ampmem.reporters.base import Detail, Report
from ampmem.reporters.text.answer import wording
from ampmem.reporters.text.run import change_of
from ampmem.reporters.text.table import render_reports
from ampmem.vocabulary import SourceKind

MIB = 1 << 20


def told(recording: Recording) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings(analyse(recording))}


def run(
    story: Story,
    steps: int = 3,
    *,
    low: str = "bfloat16",
    copy: int = 2000,
    activation: int = 4000,
    copy_uses: int = 1,
    skipped: bool = False,
) -> Story:
    """Steps of a model with one parameter, one cast copy of it and one activation."""
    story.parameter(0x1000, "weight", 1000)
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        story.tensor(Fact.CAST_COPY, 0x2000, copy, "weight", op="aten::_to_copy")
        for _ in range(copy_uses):
            story.fact(Fact.SAVED, 0x2000, "aten::mm", dtype=low)
        if copy_uses > 1:
            story.fact(Fact.CACHED, 0x2000)
        story.tensor(Fact.SAVED, 0x3000, activation, "aten::relu", op="aten::mm", dtype=low)
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x4000, 4000, "weight")
        story.free(0x2000, 0x3000)
        story.enter(Phase.OPTIMIZER)
        story.enter(Phase.BETWEEN)
        story.free(0x4000)
        story.end(skipped=skipped)
    return story


def with_batch(recording: Recording, batch_size: int) -> Recording:
    return replace(
        recording, steps=tuple(replace(step, batch_size=batch_size, batch_loaded=True) for step in recording.steps)
    )


# -- the formula ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "copies", "saved", "even", "first"),
    [
        (2, 917504, 540672, 2 * 917504 / 540672, 4),
        (8, 100, 100, 8.0, 9),
        (8, 0, 100, 0.0, 1),
        (8, 100, 0, None, None),
        (8, 100, -5, None, None),
        (0, 100, 100, None, None),
        (1, 3 * 10**17, 10**17, 3.0, 4),
    ],
)
def test_break_even(batch_size: int, copies: int, saved: int, even: float | None, first: int | None) -> None:
    assert break_even(batch_size, copies, saved) == even
    assert first_saving(batch_size, copies, saved) == first


def test_amp_saves_or_does_not() -> None:
    saves = told(with_batch(run(Story()).recording(), 8))["amp-saves"]
    assert (saves.bytes, saves.severity) == (4000 - 2000, "info")
    assert "batch size 5 on" in saves.message  # 8 * 2000 / 4000 is 4, where it is even
    assert saves.evidence == (
        "cast copies at the end of forward: 2.0 KiB",
        "activations then: 3.9 KiB, in FP32 about 7.8 KiB",
        "break-even at batch size 4.00: 8 * 2000 / 4000",
    )
    costs = told(with_batch(run(Story(), activation=800).recording(), 8))["amp-saves-nothing"]
    assert (costs.bytes, costs.severity) == (2000 - 800, "info")  # the peak is in backward
    assert costs.change.startswith("batch_size >= 21")
    even = told(run(Story(), activation=2000).recording())["amp-saves-nothing"]
    assert even.bytes is None  # as much as, and no batch size known
    assert "batch size" not in even.message
    # Where no DataLoader made the batch, the first dimension may count tokens.
    recording = with_batch(run(Story(), activation=800).recording(), 8)
    steps = tuple(replace(step, batch_loaded=False) for step in recording.steps)
    unknown = told(replace(recording, steps=steps))["amp-saves-nothing"]
    assert "more than 2.5 times as large as here" in unknown.message
    assert "batch" not in unknown.message and "batch_size" not in unknown.change
    evaluates = run(Story(), activation=800)
    evaluates.begin(3, Phase.EVALUATION)
    evaluates.scratch(0x5000, 20_000)
    evaluates.end()
    there = told(with_batch(evaluates.recording(), 8))["amp-saves-nothing"]
    assert (there.severity, there.change) == ("info", IN_EVALUATION)
    assert "batch size" not in there.message


def test_nothing_in_low_precision_never_pays() -> None:
    costs = told(with_batch(run(Story(), low="float32").recording(), 8))["amp-saves-nothing"]
    assert costs.bytes == 2000
    assert "save nothing" in costs.message and "batch size" not in costs.message


def test_no_estimate_without_the_types_of_the_activations() -> None:
    assert not {"amp-saves", "amp-saves-nothing"} & told(run(Story(), low="").recording()).keys()


@pytest.mark.parametrize(("kept", "sure"), [(200, True), (201, False)])
def test_no_estimate_when_a_librarys_workspace_could_change_it(kept: int, sure: bool) -> None:
    """It may be as large in FP32, or twice as large; the rest saves 2,000 bytes."""
    story = run(Story(), steps=1)
    story.begin(1, Phase.FORWARD)
    for address, size, dtype, name in (
        (0x2000, 2000, "bfloat16", "aten::mm"),
        (0x3000, 4000, "bfloat16", "aten::relu"),
        (0x5000, kept, "uint8", "aten::mkldnn_rnn_layer"),
    ):
        story.tensor(Fact.SAVED, address, size, name, op="aten::_to_copy", dtype=dtype)
    story.fact(Fact.CAST_COPY, 0x2000, "weight")
    story.enter(Phase.BACKWARD)
    story.free(0x2000, 0x3000, 0x5000)
    story.end()
    assert ("amp-saves" in told(story.recording())) == sure


@pytest.mark.parametrize(("dtype", "saved"), [("float16", 4000 + 3000 + 500), ("float32", None)])
def test_what_cudnns_recurrent_layers_keep_is_half_as_large_in_low_precision(dtype: str, saved: int | None) -> None:
    """In FP32 it would take as much again, like the layer's input of 500 bytes; of a layer in FP32 nobody knows."""
    story = run(Story(), steps=1)
    story.begin(1, Phase.FORWARD)
    for address, size, kept, name in (
        (0x2000, 2000, "bfloat16", "aten::mm"),
        (0x3000, 4000, "bfloat16", "aten::relu"),
        (0x5000, 3000, "uint8", "aten::_cudnn_rnn"),
        (0x6000, 500, dtype, "aten::_cudnn_rnn"),
    ):
        story.tensor(Fact.SAVED, address, size, name, op="aten::_to_copy", dtype=kept)
    story.fact(Fact.CAST_COPY, 0x2000, "weight")
    story.enter(Phase.BACKWARD)
    story.free(0x2000, 0x3000, 0x5000, 0x6000)
    story.end()
    found = told(story.recording())
    if saved is None:
        assert "amp-saves" not in found
    else:
        assert found["amp-saves"].bytes == saved - 2000


@pytest.mark.parametrize(
    ("keys", "op", "told_of"),
    [
        (8, "cudnn_attention", True),
        (2, "cudnn_attention", False),
        (2, "flash_attention", False),
        (2, "flash_attention_for_cpu", True),
        (2, "efficient_attention", True),
    ],
)
def test_no_estimate_where_fp32_has_no_kernel_for_shared_heads(keys: int, op: str, told_of: bool) -> None:
    """Of 8 heads of queries; FP32 would keep the weights of attention, of which the run under AMP has none."""
    story = run(Story(), steps=1)
    story.begin(1, Phase.FORWARD)
    for address, heads, width in ((0x2000, 8, 40), (0x3000, keys, 40), (0x4000, 1, 50)):  # the last is a mask
        story.alloc(address, 100 * heads * width, op="aten::mm")
        shape = shape_text((1, heads, 50, width))
        story.fact(Fact.SAVED, address, f"aten::_scaled_dot_product_{op}", dtype="bfloat16", shape=shape)
    story.enter(Phase.BACKWARD)
    story.free(0x2000, 0x3000, 0x4000)
    story.end()
    assert ("amp-saves" in told(story.recording())) == told_of


@pytest.mark.parametrize(("update", "touched"), [(8_599, True), (8_600, False)])
def test_a_peak_in_the_update_that_backward_would_pass_without_amp(update: int, touched: bool) -> None:
    """Backward needs 1,000 + 2,000 + 800 + 4,000 bytes; in FP32 the activation takes 800 more."""
    story = run(Story(), steps=1, activation=800)
    story.begin(1, Phase.FORWARD)
    story.tensor(Fact.CAST_COPY, 0x2000, 2000, "weight", op="aten::_to_copy")
    story.fact(Fact.SAVED, 0x2000, "aten::mm", dtype="bfloat16")
    story.tensor(Fact.SAVED, 0x3000, 800, "aten::relu", op="aten::mm", dtype="bfloat16")
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x4000, 4000, "weight")
    story.free(0x2000, 0x3000)
    story.enter(Phase.OPTIMIZER)
    story.scratch(0x7000, update - 5000)
    story.end(Phase.BETWEEN)
    change = told(story.recording())["amp-saves-nothing"].change
    assert ("which AMP does not touch" not in change) == touched


@pytest.mark.parametrize(("original_dies", "copies", "saved"), [(False, 1, -1000), (True, 1, 1000), (True, 3, -1000)])
def test_copies_of_activations(original_dies: bool, copies: int, saved: int) -> None:
    """One FP32 tensor serves instead of all copies of it; it is there already when the original lives on."""
    story = Story(weight=1000, begins=Phase.FORWARD)
    story.tensor(Fact.OUTPUT, 0x2000, 2000, "aten::add", dtype="float32")
    for number in range(copies):
        story.tensor(Fact.OTHER_CAST, 0x3000 + number, 1000, op="aten::_to_copy", dtype="bfloat16")
        story.fact(Fact.SAVED, 0x3000 + number, "aten::mm", dtype="bfloat16")
    if original_dies:
        story.free(0x2000)
    story.tensor(Fact.SAVED, 0x4000, 5000, "aten::relu", dtype="bfloat16")
    story.end(Phase.BACKWARD)
    assert told(story.recording())["amp-saves"].bytes == 5000 + saved


@pytest.mark.parametrize(
    ("tensors", "saved"),
    [
        # Each: its bytes, its type, whether it lives on; the copy of 1,000 bytes comes last.
        ([(2000, "float32", True)], -1000),
        ([(2000, "float32", False)], 1000),
        ([(2000, "float32", True), (2000, "float32", False)], 1000),  # the youngest that fits
        ([(2000, "float32", False), (2000, "float32", True)], -1000),
        ([(2000, "float32", True), (700, "float32", False)], -1000),  # of other sizes it is none
        ([(2000, "float32", True), (2000, "bfloat16", False)], -1000),  # nor in low precision
        ([(2000, "", True)], -1000),
        ([(700, "float32", True)], 1000),
        ([], 1000),
    ],
)
def test_an_original_that_was_not_seen_is_the_youngest_of_as_many_elements(
    tensors: list[tuple[int, str, bool]], saved: int
) -> None:
    """Where it lives on anyway, the copy is what autocast costs; or else one FP32 tensor would be there instead."""
    story = Story(weight=1000, begins=Phase.FORWARD)
    for number, (size, dtype, _) in enumerate(tensors):
        story.tensor(Fact.OUTPUT, 0x2000 + number, size, "aten::add", dtype=dtype)
        if dtype:
            story.fact(Fact.SAVED, 0x2000 + number, "aten::relu", dtype=dtype)
    story.tensor(Fact.OTHER_CAST, 0x3000, 1000, op="aten::_to_copy", dtype="bfloat16")
    story.fact(Fact.SAVED, 0x3000, "aten::mm", dtype="bfloat16")
    story.free(*(0x2000 + number for number, (_, _, lives) in enumerate(tensors) if not lives))
    story.tensor(Fact.SAVED, 0x4000, 50_000, "aten::relu", dtype="bfloat16")
    story.end(Phase.BACKWARD)
    low = sum(size for size, dtype, lives in tensors if dtype == "bfloat16" and lives)
    assert told(story.recording())["amp-saves"].bytes == 50_000 + low + saved


@pytest.mark.parametrize(("size", "lives", "saved"), [(1000, True, -2000), (1000, False, 0), (666, True, 0)])
def test_a_float32_copy_has_a_low_precision_original_of_half_its_bytes(size: int, lives: bool, saved: int) -> None:
    """Where that lives on, autocast has both of them; it would be the only one, and as large as the copy."""
    story = Story(weight=1000, begins=Phase.FORWARD)
    story.tensor(Fact.SAVED, 0x2000, size, "aten::relu", dtype="bfloat16")
    story.tensor(Fact.OTHER_CAST, 0x3000, 2000, op="aten::_to_copy", dtype="float32")
    story.fact(Fact.SAVED, 0x3000, "aten::exp", dtype="float32")
    if not lives:
        story.free(0x2000)
    story.tensor(Fact.SAVED, 0x4000, 50_000, "aten::relu", dtype="bfloat16")
    story.end(Phase.BACKWARD)
    assert told(story.recording())["amp-saves"].bytes == 50_000 + (size if lives else 0) + saved


# -- odd recordings ---------------------------------------------------------------------------


def odd() -> Iterator[Story]:
    yield Story()
    story = Story()
    story.alloc(0x1000, 64, action=Action.BASELINE)
    yield story
    story = Story()
    story.begin(0)
    story.end(skipped=True)
    yield story
    story = Story(weight=10)
    for step in range(4):
        story.begin(step, Phase.OPTIMIZER)
        story.end(skipped=True)
    yield story
    story = Story(begins=Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x1000, 5)
    story.fact(Fact.CAST_COPY, 0x1000)
    story.end()
    story.begin(1, Phase.FORWARD)
    story.end()
    yield story
    yield small_run()
    yield run(Story(), steps=1)


PRECISIONS = [
    FP32,
    AMP,
    replace(AMP, name="amp-nocache", cache=False),
    PrecisionRecord(name="as-is", dtype=None, cache=None, scaler=False),
    replace(AMP, dtype="float16", scaler=True),
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: f"{precision.name}-{precision.dtype}")
@pytest.mark.parametrize("index", range(7))
def test_odd_recordings_break_no_check(index: int, precision: PrecisionRecord) -> None:
    run = TrainingRun(analysis=analyse(list(odd())[index].recording(precision=precision)))
    for check in CHECKS:
        finding = check(run)
        assert finding is None or finding.bytes is None or finding.bytes > 0


def with_a_number() -> set[str]:
    """The codes of the findings that may say what their change takes off, as the source of the checks has it."""
    found = set()
    for check in (*CHECKS, *OF_INFERENCE):
        for node in nodes_of(check, set()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if "advice" in given.get("severity", "advice") or {"off_peak", "off_reserved"} & given.keys():
                    found.add(check.__name__.replace("_", "-"))
    return found


def nodes_of(function: Callable[..., object], seen: set[object]) -> Iterator[ast.AST]:
    """The syntax of a function and of those of its module that it names."""
    seen.add(function)
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        yield node
        named = getattr(inspect.getmodule(function), node.id, None) if isinstance(node, ast.Name) else None
        if inspect.isfunction(named) and named.__module__ == function.__module__ and named not in seen:
            yield from nodes_of(named, seen)


def test_the_change_of_every_finding_with_a_number_is_made_in_a_test() -> None:
    folder = Path(__file__).parents[2] / "integration" / "advice"
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    missing = {code for code in with_a_number() if f'"{code}"' not in sources}
    assert missing == set(), f"no test in {folder} makes the change of these findings"
    assert len(with_a_number()) > 5


def test_what_is_wrong_comes_before_what_could_be_better() -> None:
    recording = run(Story(), skipped=True).recording(precision=replace(AMP, dtype="float16"))
    severities = [finding.severity for finding in findings(analyse(recording))]
    assert severities == sorted(severities, key=["warning", "advice", "info"].index)
    assert {"warning", "info"} <= set(severities)


def test_a_small_run_has_nothing_to_tell() -> None:
    assert told(small_run().recording()) == {}


@pytest.mark.parametrize(
    ("copy", "rest", "shown"), [(1024, 0, True), (1023, 0, False), (2000, 380_000, True), (2000, 400_000, False)]
)
def test_a_finding_is_shown_from_a_kibibyte_and_half_a_percent_of_the_peak_on(
    copy: int, rest: int, shown: bool
) -> None:
    """Whatever the finding; a warning is shown at any size, since it says that something is wrong."""
    story = Story()
    story.parameter(0x9000, "rest", rest // 4)
    recording = run(story, copy=copy, activation=4, copy_uses=2).recording()
    assert ("cache-off-costs" in told(recording)) == shown
    outlives = run(Story(), copy=copy)
    outlives.begin(3)
    outlives.tensor(Fact.CAST_COPY, 0x5000, 1, "weight", op="aten::_to_copy")
    outlives.end()
    outlives.begin(4, Phase.FORWARD)
    outlives.end()
    assert told(outlives.recording())["copies-survive"].bytes == 1


# -- single findings --------------------------------------------------------------------------


def test_float16_without_a_scaler() -> None:
    found = told(run(Story()).recording(precision=replace(AMP, dtype="float16")))["fp16-without-scaler"]
    assert (found.bytes, found.severity) == (None, "warning")
    for precision in (AMP, FP32, replace(AMP, dtype="float16", scaler=True)):
        assert "fp16-without-scaler" not in told(run(Story()).recording(precision=precision))


@pytest.mark.parametrize(
    ("seen", "precision", "change"),
    [
        ("float32", AMP, "with torch.autocast("),
        ("bfloat16", AMP, None),
        ("", AMP, None),  # of no type, which says nothing
        ("float32", FP32, None),
        ("float32", replace(AMP, dtype=None), "with torch.autocast("),
    ],
)
def test_autocast_that_casts_nothing(seen: str, precision: PrecisionRecord, change: str | None) -> None:
    story = Story(weight=100, begins=Phase.FORWARD)
    for number in range(3):
        story.tensor(Fact.OUTPUT, 0x2000 + number, 400, "aten::mm", op="aten::mm", dtype=seen)
    story.end(Phase.BACKWARD)
    found = told(story.recording(precision=precision)).get("no-autocast-effect")
    assert (found is None) == (change is None)
    if found is not None and change is not None:
        assert found.change.startswith(change)
        assert found.evidence == ("device: cpu", "op results seen, none in low precision: 3")
        assert found.message.startswith("autocast was on" if precision.dtype else "autocast was requested")
    story.fact(Fact.CAST_COPY, 0x2000, "weight")
    assert "no-autocast-effect" not in told(story.recording(precision=precision))


def test_a_model_in_float64_is_told_that_autocast_leaves_that() -> None:
    story = Story(weight=100, begins=Phase.FORWARD)
    story.tensor(Fact.OUTPUT, 0x2000, 400, "aten::mm", op="aten::mm", dtype="float64")
    story.end(Phase.BACKWARD)
    recording = story.recording()
    (record,) = recording.parameters
    doubles = replace(recording, parameters=(replace(record, dtype="float64"),))
    assert told(doubles)["no-autocast-effect"].change.startswith("make the model and its inputs float32")
    mixed = replace(recording, parameters=(record, replace(record, name="other", dtype="float64")))
    assert told(mixed)["no-autocast-effect"].change.startswith("with torch.autocast(")


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.13.0", True),
        ("2.13.0a0+git1234", True),
        ("2.14", True),
        ("3.0.0", True),
        ("2.12.1", False),
        ("1.99.0", False),
        ("2", False),
        ("2.x", False),
        ("unknown", False),
    ],
)
def test_the_fused_loss_is_named_where_this_torch_has_it(version: str, known: bool) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    story.tensor(Fact.SAVED, 0x2000, 5000, "aten::_log_softmax", dtype="float32")
    story.end(Phase.BACKWARD)
    found = told(story.recording(run=replace(RUN, torch=version)))["fp32-activations"]
    assert any("F.linear_cross_entropy" in line for line in found.evidence) == known


@pytest.mark.parametrize(("shape", "known"), [((50, 25), True), ((2, 25, 5, 5), False)])
def test_the_fused_loss_is_not_named_for_the_classes_of_pixels(shape: tuple[int, ...], known: bool) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    story.tensor(Fact.SAVED, 0x2000, 5000, "aten::_log_softmax", dtype="float32", shape=shape_text(shape))
    story.end(Phase.BACKWARD)
    found = told(story.recording(run=replace(RUN, torch="2.13.0")))["fp32-activations"]
    assert any("F.linear_cross_entropy" in line for line in found.evidence) == known


def test_backward_in_autocast_without_copies_of_the_cache_has_no_size() -> None:
    recording = run(Story()).recording()
    inside = replace(recording, steps=tuple(replace(step, autocast_in_backward=True) for step in recording.steps))
    assert told(inside)["autocast-in-backward"].bytes is None
    assert "autocast-in-backward" not in told(recording)


def test_state_that_is_still_to_come() -> None:
    found = told(run(Story(), skipped=True).recording())["state-not-there-yet"]
    assert (found.bytes, found.severity) == (8 * 1000, "info")
    assert "state-not-there-yet" not in told(run(Story()).recording())


def test_state_of_an_optimizer_that_was_never_called_has_no_known_size() -> None:
    recording = replace(run(Story(), skipped=True).recording(), optimizers=())
    assert told(recording)["state-not-there-yet"].bytes is None


def test_gradients_of_a_shared_bucket_are_let_be() -> None:
    story = Story(weight=1000, name="a")
    story.parameter(0x1001, "b", 1000)
    story.alloc(0x4000, 8000)
    for step in range(3):
        story.begin(step, Phase.FORWARD)
        story.enter(Phase.BACKWARD)
        story.fact(Fact.GRADIENT, 0x4000, "a")
        story.fact(Fact.GRADIENT, 0x4000, "b")
        story.end(Phase.OPTIMIZER)
    assert "gradients-through-forward" not in told(story.recording(precision=FP32))


def closures(*, zero_first: bool, file: str = "train.py") -> Story:
    """Three steps of two micro-batches, the second in the optimizer's closure, with 4000 bytes of gradients.

    They are zeroed before the first forward or after it; the peak is in the second backward.
    """
    story = Story(weight=1000)
    for step in range(3):
        story.begin(step)
        if step and zero_first:
            story.free(0x4000)
        story.enter(Phase.FORWARD)
        story.alloc(0x3000, 8000, stack=f"train.py:9 main\n{file}:3 run")
        if step and not zero_first:
            story.free(0x4000)
        story.enter(Phase.BACKWARD)
        story.free(0x3000)
        story.tensor(Fact.GRADIENT, 0x4000, 4000, "weight")
        story.enter(Phase.OPTIMIZER)
        story.enter(Phase.FORWARD)
        story.alloc(0x3000, 8000)
        story.enter(Phase.BACKWARD)
        story.alloc(0x5000, 4000)
        story.fact(Fact.GRADIENT, 0x4000, "weight")
        story.free(0x5000, 0x3000)
        story.enter(Phase.OPTIMIZER)
        story.end(Phase.BETWEEN)
    return story


def test_gradients_that_this_step_made_itself_are_none_that_can_go() -> None:
    found = told(closures(zero_first=False).recording(precision=FP32))["gradients-through-forward"]
    assert (found.bytes, found.off_peak) == (4000, None)
    assert found.change.endswith("optimizer.zero_grad() right after optimizer.step()")
    assert "gradients-through-forward" not in told(closures(zero_first=True).recording(precision=FP32))


def test_where_lightning_steps_the_change_is_one_of_its_module() -> None:
    file = "/venv/lightning/pytorch/loops/optimization/automatic.py"
    found = told(closures(zero_first=False, file=file).recording(precision=FP32))["gradients-through-forward"]
    assert found.change.endswith("in the LightningModule's optimizer_step, after super().optimizer_step(...)")


@pytest.mark.parametrize(("steps", "size", "expected"), [(3, 1024, 1024), (3, 1023, None), (2, 4096, None)])
def test_growth_is_told_from_three_steps_and_a_kibibyte_on(steps: int, size: int, expected: int | None) -> None:
    story = Story(weight=10)
    for step in range(steps):
        story.begin(step, Phase.BACKWARD)
        story.alloc(0x2000 + step, size, op="aten::clone", stack="train.py:3 main")
        story.end()
    found = told(story.recording(precision=FP32)).get("steady-growth")
    assert (None if found is None else found.bytes) == expected
    if found is not None:
        assert found.evidence[1] == "aten::clone at train.py:3 main: 1.0 KiB (1,024 bytes) per step"


@pytest.mark.parametrize(("size", "held_from"), [(40_000, 0), (40_000, 2), (512, 0)])
def test_what_grows_between_the_steps_is_named_by_its_holder(size: int, held_from: int) -> None:
    story = Story(weight=10)
    for step in range(4):
        story.begin(step, Phase.BACKWARD)
        story.enter(Phase.BETWEEN)
        story.alloc(0x2000 + step, size)
        story.end()
    for step in range(held_from, 4):
        story.fact(Fact.HELD, 0x2000 + step, f"kept[{step}]")
    found = told(story.recording(precision=FP32)).get("steady-growth")
    if size < 1024:
        assert found is None
        return
    assert found.bytes == size
    assert "thread's" not in found.message
    if held_from == 0:
        assert found.severity == "warning"
        assert ", held by kept[*]: nothing has freed it" in found.message
        assert found.evidence[1:] == (
            "held by kept[*], allocated outside of forward, backward and update: 39.1 KiB (40,000 bytes) per step",
        )
    else:
        assert found.severity == "info"
        assert "the recorded thread allocates it in ops that were not recorded" in found.message
        assert "look at what the training keeps" in found.change


def test_what_an_op_allocated_and_a_variable_holds_is_counted_once() -> None:
    story = Story(weight=10)
    for step in range(4):
        story.begin(step, Phase.BACKWARD)
        story.enter(Phase.BETWEEN)
        story.alloc(0x2000 + step, 4000, op="aten::clone")
        story.end()
    for step in range(4):
        story.fact(Fact.HELD, 0x2000 + step, f"kept[{step}]")
    found = told(story.recording(precision=FP32))["steady-growth"]
    assert found.bytes == 4000
    assert found.evidence[1:] == ("aten::clone: 3.9 KiB (4,000 bytes) per step",)


def test_holders_have_kept_no_more_than_all_such_memory_grew_by() -> None:
    """In each step two lists get 4,000 bytes each, and 3,000 bytes that the script had before are gone."""
    story = Story(weight=10)
    for step in range(4):
        story.alloc(0x8000 + step, 3000)
    for step in range(4):
        story.begin(step, Phase.BACKWARD)
        story.enter(Phase.BETWEEN)
        story.alloc(0x2000 + step, 4000)
        story.alloc(0x3000 + step, 4000)
        story.free(0x8000 + step)
        story.end()
    for step in range(4):
        story.fact(Fact.HELD, 0x2000 + step, f"first[{step}]")
        story.fact(Fact.HELD, 0x3000 + step, f"second[{step}]")
    found = told(story.recording(precision=FP32))["steady-growth"]
    assert found.bytes == 5000
    assert [line.partition(",")[0] for line in found.evidence[1:]] == ["held by first[*]", "held by second[*]"]
    assert [line.rpartition(": ")[2] for line in found.evidence[1:]] == [
        "3.9 KiB (4,000 bytes) per step",
        "1000 B (1,000 bytes) per step",
    ]


@pytest.mark.parametrize("source", [SourceKind.CPU, SourceKind.CUDA])
def test_growth_may_be_another_threads_only_where_it_was_not_seen_to_be_the_recorded_ones(source: SourceKind) -> None:
    story = Story(weight=10)
    for step in range(4):
        story.begin(step, Phase.BACKWARD)
        if source is SourceKind.CPU:
            if step:
                story.free(OTHER_THREADS)
            story.alloc(OTHER_THREADS, 4096 * (step + 1))
        else:
            story.alloc(0x2000 + step, 4096)
        story.end()
    recording = story.recording(precision=FP32)
    found = told(replace(recording, run=replace(recording.run, source=source)))["steady-growth"]
    assert found.severity == "info"
    assert "it may be another thread's or a library's" in found.message


@pytest.mark.parametrize("named", [True, False])
def test_a_batch_that_is_loaded_a_step_ahead_is_no_growth(named: bool) -> None:
    story = Story(weight=10)
    story.alloc(0x2000, 8192)
    for step in range(3):
        story.begin(step)
        if step > 0:
            story.free(0x2000 + step - 1)
        story.alloc(0x2001 + step, 8192, op="aten::stack" if named else "")
        story.end(Phase.BACKWARD)
    assert "steady-growth" not in told(story.recording(precision=FP32))


def test_two_micro_batches_a_step_of_which_one_is_loaded_ahead_do_not_grow() -> None:
    """The loader holds one batch and the loop two: holders are known of what is alive at the end alone."""
    story = Story(weight=10)
    for number in range(3):
        story.alloc(0x2000 + number, 8192)
    for step in range(3):
        story.begin(step)
        if step > 0:
            for number in (2 * step - 2, 2 * step - 1):
                story.free(0x2000 + number)
                story.alloc(0x2003 + number, 8192)
        story.enter(Phase.BACKWARD)
        story.end(Phase.BETWEEN)
    for number, holder in ((4, "group[0][x]"), (5, "group[1][x]"), (6, "ahead[x]")):
        story.fact(Fact.HELD, 0x2000 + number, holder)
    assert "steady-growth" not in told(story.recording(precision=FP32))


@pytest.mark.parametrize("kept", [True, False])
def test_batches_of_workers_grow_only_if_those_that_a_model_was_given_stay(kept: bool) -> None:
    """The loader reads ahead: in step 0 two batches, in step 1 one, in step 2 three, in step 3 none."""
    story = Story(weight=10)
    loaded = 0
    for step, read in enumerate((2, 1, 3, 0)):
        story.begin(step)
        for _ in range(read):
            story.alloc(0x2000 + loaded, 4096, op=MAPPED)
            loaded += 1
        if step > 0 and not kept:
            story.free(0x2000 + step - 1)
        story.fact(Fact.INPUT, 0x2000 + step)
        story.enter(Phase.BACKWARD)
        story.scratch(0x8000, 10, op="aten::mm")
        story.end()
    found = told(story.recording(precision=FP32)).get("steady-growth")
    assert (found is not None) == kept
    if found is not None:
        assert (found.severity, found.bytes) == ("warning", 4096)
        assert found.evidence[0] == "left behind by steps 1 to 3: 4.0 KiB, 4.0 KiB, 4.0 KiB"


@pytest.mark.parametrize(("before", "grows"), [(0, True), (4096, False)])
def test_batches_that_were_loaded_before_the_recording_make_room_for_others(before: int, grows: bool) -> None:
    """A step uses two batches, of which each is loaded two steps ahead."""
    story = Story(weight=10)
    for number in range(3):
        story.alloc(0x2000 + number, before, action=Action.BASELINE)
    story.begin(0, Phase.BACKWARD)
    story.end()
    for step in (1, 2):
        story.begin(step)
        story.free(0x2000 + step)
        story.alloc(0x3000 + step, 4096)
        story.end(Phase.BACKWARD)
    assert ("steady-growth" in told(story.recording(precision=FP32))) == grows


@pytest.mark.parametrize(
    ("op", "word", "off_peak"),
    [
        ("aten::native_layer_norm", "norms", None),
        ("aten::native_group_norm", "norms", None),
        ("aten::_log_softmax", "each under torch.utils.checkpoint", 4375),
        ("aten::nll_loss_forward", "each under torch.utils.checkpoint", 4375),
        ("aten::_softmax", "autocast itself runs aten::_softmax in float32", None),
        ("aten::mm", "where the input of aten::mm becomes float32", None),
        ("aten::exp", "autocast itself runs aten::exp in float32", None),
    ],
)
def test_what_to_do_about_float32_activations(op: str, word: str, off_peak: int | None) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    for address, size, dtype in ((0x2000, 5000, "float32"), (0x3000, 4999, "bfloat16")):
        story.tensor(Fact.SAVED, address, size, op, dtype=dtype)
    story.end(Phase.BACKWARD)
    found = told(story.recording())["fp32-activations"]
    assert found.bytes == 5000
    assert word in found.change
    assert found.message.endswith(f"float32 in spite of autocast, kept for {op}.")
    assert found.evidence[0] == f"kept for {op}: 4.9 KiB"
    assert found.off_peak == off_peak
    assert found.severity == ("info" if off_peak is None else "advice")
    assert fp32_activations(TrainingRun(analysis=analyse(story.recording(precision=FP32)))) is None


@pytest.mark.parametrize(
    ("module", "place"), [("token_embedding", "after the embedding"), ("encoder", "before the norm")]
)
def test_where_a_norm_gets_its_input_from(module: str, place: str) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    story.alloc(0x2000, 5000, module=module)
    story.fact(Fact.SAVED, 0x2000, "aten::native_layer_norm", dtype="float32")
    story.end(Phase.BACKWARD)
    assert f"x = x.to(torch.bfloat16) {place}, and" in told(story.recording())["fp32-activations"].change


@pytest.mark.parametrize(("op", "attention"), [("aten::bmm", True), ("aten::mm", False)])
def test_only_a_softmax_before_a_product_of_batches_is_taken_for_attention(op: str, attention: bool) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    for address, size, saver, dtype in ((0x2000, 5000, "aten::_softmax", "float32"), (0x3000, 2500, op, "bfloat16")):
        story.tensor(Fact.SAVED, address, size, saver, dtype=dtype)
    story.end(Phase.BACKWARD)
    found = told(story.recording())["fp32-activations"]
    assert ("scaled_dot_product_attention" in found.change) == attention
    assert found.off_peak == (5000 if attention else None)


def with_held_outputs(*variables: tuple[int, str]) -> Recording:
    """A step with outputs of 4000 and 6000 bytes that live through its backward, and the variables of each."""
    story = Story(weight=10)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        for address, size in ((0x2000, 4000), (0x3000, 6000)):
            story.tensor(Fact.OUTPUT, address, size, "aten::mm", op="aten::mm")
        for address, name in variables:
            story.fact(Fact.VARIABLE, address, name, "/home/train.py:42 train")
        story.enter(Phase.BACKWARD)
        story.scratch(0x4000, 5000)
        story.enter(Phase.OPTIMIZER)
        story.end(Phase.BETWEEN)
        story.free(0x2000, 0x3000)
    return story.recording(precision=FP32)


@pytest.mark.parametrize(
    ("variables", "held_by", "change", "off_peak"),
    [
        ([], "variables of the script", "del the variable", 5000),
        ([(0x2000, "a")], "the local variable `a` of train (train.py:42) and others", "del a after the loss", 4000),
        (
            [(0x2000, "out.a"), (0x3000, "out.b")],
            "the local variable `out.b` of train (train.py:42) and the local variable `out.a` of train (train.py:42)",
            "del out after the loss",
            5000,
        ),
        (
            [(0x3000, "kept[0]")],
            "the local variable `kept[0]` of train (train.py:42) and others",
            "drop `kept[0]`",
            5000,
        ),
    ],
)
def test_outputs_that_variables_hold(
    variables: list[tuple[int, str]], held_by: str, change: str, off_peak: int
) -> None:
    found = told(with_held_outputs(*variables))["outputs-kept"]
    assert found.message.endswith(f"they are held by {held_by}.")
    assert found.change.startswith(change)
    assert found.off_peak == off_peak


def test_an_activation_that_no_op_saved_is_told_with_the_variable_that_holds_it() -> None:
    summary = summarize(with_held_outputs((0x3000, "out.b")))
    assert [(each.bytes, each.name) for each in summary.top if each.category == "activations"] == [
        (6000, "held by out.b of train.py:42 (in train)"),
        (4000, None),
    ]
    said = render_reports([Report(title="", summary=summary, notes=())], details=frozenset({Detail.LARGEST}))
    assert "held by out.b of train.py:42 (in train)" in said and "saved for" not in said


SCORES = (2, 4, 16, 16)


@pytest.mark.parametrize(
    ("device", "weights", "added", "parameter", "known"),
    [
        ("cpu", SCORES, "", (64, 4), True),  # of a Linear, with as many outputs as heads
        ("cpu", (8, 16, 16), "", (64, 4), False),
        ("cuda", (8, 16, 16), "", (64, 4), False),
        ("cpu", SCORES, "aten::add", (64, 4), False),
        ("cpu", SCORES, "aten::add_", (64, 4), False),
        ("cpu", SCORES, "", (4, 16, 16), False),
        ("cuda", SCORES, "aten::add", (4, 16, 16), True),
        ("cuda", SCORES, "aten::gather", (64, 4), False),
    ],
)
def test_attention_has_a_number_only_where_a_kernel_takes_it(
    device: str, weights: tuple[int, ...], added: str, parameter: tuple[int, ...], known: bool
) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    if added:
        story.tensor(Fact.OUTPUT, 0x4000, 8192, added, op=added, dtype="float32", shape=shape_text(weights))
        story.free(0x4000)
    story.tensor(Fact.SAVED, 0x2000, 8192, "aten::_softmax", dtype="float32", shape=shape_text(weights))
    story.tensor(Fact.SAVED, 0x3000, 4096, "aten::bmm", dtype="bfloat16", shape="[8, 16, 16]")
    story.end(Phase.BACKWARD)
    recording = story.recording(run=replace(RUN, device_type=device))
    (record,) = recording.parameters
    recording = replace(recording, parameters=(replace(record, shape=parameter, kind="Linear"),))
    found = told(recording)["fp32-activations"]
    assert (found.off_peak is not None) == known
    assert ("of four dimensions" in found.change) == (len(weights) == 3)


@pytest.mark.parametrize(
    ("op", "saved_for", "words"),
    [
        ("aten::addmm", "aten::pow", "output of addmm in fc at net.py:3 forward, saved for pow"),
        ("aten::sigmoid", "aten::sigmoid", "output of sigmoid in fc at net.py:3 forward"),
        ("", "aten::pow", "in fc at net.py:3 forward, saved for pow"),
    ],
)
def test_what_made_a_tensor_is_told_from_what_it_was_saved_for(op: str, saved_for: str, words: str) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    story.alloc(0x2000, 4096, op=op, module="fc", stack="net.py:3 forward")
    story.fact(Fact.SAVED, 0x2000, saved_for)
    story.end(Phase.BACKWARD)
    found = TrainingRun(analysis=analyse(story.recording(precision=FP32)))
    (place,) = np.flatnonzero(found.analysis.lifetimes.bytes == 4096)
    assert found.describe(int(place)) == words


def test_the_frame_that_is_told_is_the_scripts_own() -> None:
    stack = ["train.py:9 main", "net.py:3 forward", "/v/site-packages/torch/nn/modules/linear.py:134 Linear.forward"]
    assert own_frame(stack) == "net.py:3 forward"
    assert own_frame(["/v/torch/nn/a.py:1 f"]) == "/v/torch/nn/a.py:1 f"


def test_max_split_size_is_named_where_it_saves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Settings] = []

    def peak(trace: CallTrace, settings: Settings) -> int:
        """What is reserved falls with the setting, by so many MiB."""
        tried.append(settings)
        saved = 90 if settings.expandable_segments else 120 if settings.max_split_size == 512 * MIB else 0
        return (302 - saved) * MIB

    assert "expandable_segments:True" in told(growing(100))["fragmentation"].change, "of equal ones the first"
    monkeypatch.setattr(whole_run, "peak_reserved", peak)
    found = told(growing(100))["fragmentation"]
    assert [each.max_split_size for each in tried] == [None, None, 128 * MIB, 512 * MIB]
    assert (found.off_reserved, found.severity) == (120 * MIB, "advice")
    assert found.change.startswith("PYTORCH_ALLOC_CONF=max_split_size_mb:512 in the environment")
    assert found.evidence[-1].endswith("182.0 MiB with max_split_size_mb:512, 212.0 MiB with expandable_segments:True")


def growing(mib: int, *, more: int = 0, expandable: bool = False) -> Recording:
    """Two steps with one block each of which the second is twice as large, each in a segment of its own, on a GPU.

    ``more`` MiB are reserved for nothing that the recording has.
    """
    story = Story()
    story.segment(0x1000, 2 * MIB, small=True, expandable=expandable)
    story.parameter(0x1000, "weight", 100)
    if more:
        story.segment(0x2000, more * MIB, expandable=expandable)
    for step, size in enumerate((mib * MIB, 2 * mib * MIB)):
        story.begin(step)
        story.segment((step + 1) << 40, size, expandable=expandable)
        story.enter(Phase.FORWARD)
        story.alloc((step + 1) << 40, size)
        story.enter(Phase.BACKWARD)
        story.free((step + 1) << 40)
        story.end(Phase.OPTIMIZER)
    recording = story.recording()
    return replace(recording, run=replace(recording.run, source=SourceKind.CUDA))


@pytest.mark.parametrize(
    ("recording", "severity", "off_reserved"),
    [
        (growing(100), "advice", 100 * MIB),
        (growing(100, more=2), "advice", 100 * MIB),  # a replay of 302 MiB is near enough to 304
        (growing(100, more=4), "info", None),  # and too far from 306, by more than one percent
        (growing(100, more=50), "info", None),  # a replay from an empty allocator does not reach what was recorded
        (growing(50), None, None),  # so little is how the allocator works
        (growing(100, expandable=True), None, None),
        (replace(growing(100), run=RUN), None, None),  # of the CPU
    ],
)
def test_reserved_memory_that_does_not_serve(
    recording: Recording, severity: str | None, off_reserved: int | None
) -> None:
    found = told(recording).get("fragmentation")
    assert (found and found.severity, found and found.off_reserved) == (severity, off_reserved)
    if found is not None:
        assert found.off_peak is None
        assert change_of(found).startswith("to take 100.0 MiB off reserved memory: " if off_reserved else "hint: ")


EFFICIENT = "aten::_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("dtype", "width", "others", "disabled", "why"),
    [
        ("float32", 32, (), "", "q, k and v are float32"),
        ("bfloat16", 512, (), "", "the head size is 512"),
        ("bfloat16", 32, ((2, 4, 20, 32), (2, 1, 16, 20)), "", "it was given an attn_mask"),
        ("bfloat16", 32, ((2, 1, 16, 16),), "", "it was given an attn_mask"),
        ("bfloat16", 128, ((2, 4, 16, 384),), "", "the head size is 384"),
        ("bfloat16", 32, ((2, 4, 16, 48),), "", "q and k have the head size 48, v has 32"),
        ("bfloat16", 32, ((2, 4, 20, 32),), "", "is_causal only where there are as many keys as queries"),
        ("bfloat16", 32, (), "", "do not take its arguments on this device"),
        (
            "bfloat16",
            32,
            (),
            "flash",
            "kernel, which keeps 8.8 KiB for backward: the script disabled the flash kernel.",
        ),
        ("bfloat16", 512, (), "flash, cuDNN", "at most 256; the script disabled the flash and cuDNN kernels."),
    ],
)
def test_why_another_attention_kernel_did_not_run(
    dtype: str, width: int, others: tuple[tuple[int, ...], ...], disabled: str, why: str
) -> None:
    story = Story(weight=10, begins=Phase.FORWARD)
    story.tensor(
        Fact.OUTPUT, 0x2000, 9000, EFFICIENT, module="block.3", dtype=dtype, shape=shape_text((2, 4, 16, width))
    )
    if disabled:
        story.fact(Fact.DISABLED, 0x2000, disabled)
    for shape in ((2, 4, 16, width), *others):
        story.fact(Fact.SAVED, 0x2000, EFFICIENT, dtype=dtype, shape=shape_text(shape))
    story.enter(Phase.BACKWARD)
    story.free(0x2000)
    story.end(Phase.OPTIMIZER)
    found = told(story.recording(run=replace(RUN, device_type="cuda")))["attention-kernel"]
    assert found.message.startswith("F.scaled_dot_product_attention in block.* ran its memory-efficient kernel")
    assert why in found.message
    assert (found.severity, found.bytes, found.off_peak) == ("info", 9000, None)


def test_masks_of_one_size_in_one_step_are_one_too_many_each() -> None:
    story = Story(weight=10)
    result, mask = (shape_text(shape) for shape in ((2, 4, 16, 32), (2, 1, 16, 20)))
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        for layer in (1, 2, 3):
            story.tensor(Fact.OUTPUT, layer << 16, 1280, "aten::where", dtype="bfloat16", shape=mask)
            story.fact(Fact.SAVED, layer << 16, EFFICIENT, dtype="bfloat16", shape=shape_text((2, 4, 16, 20)))
            story.tensor(Fact.OUTPUT, layer << 24, 8192, EFFICIENT, dtype="bfloat16", shape=result)
            story.fact(Fact.SAVED, layer << 24, EFFICIENT, dtype="bfloat16", shape=result)
        story.enter(Phase.BACKWARD)
        story.free(*(layer << shift for layer in (3, 2, 1) for shift in (24, 16)))
        story.end(Phase.OPTIMIZER)
    found = told(story.recording(run=replace(RUN, device_type="cuda")))["attention-masks"]
    assert (found.severity, found.bytes, found.off_peak) == ("advice", 2 * 1280, 2 * 1280)
    assert found.message.startswith("3 calls of")


def test_what_the_second_step_needs_more_is_what_the_first_update_made() -> None:
    story = Story(weight=1000)
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.tensor(Fact.SAVED, 0x2000, 9000, "aten::mm")
        story.enter(Phase.BACKWARD)
        story.free(0x2000)
        story.enter(Phase.OPTIMIZER)
        if not step:
            story.tensor(Fact.OPTIMIZER_STATE, 0x3000, 8000, "exp_avg of weight")
        story.end()
    (said,) = (each for each in wording(verdict_of_one(summarize(story.recording()))).more if each.startswith("Step "))
    assert said == "Step 1 needs 7.8 KiB more than step 0: optimizer state adds 7.8 KiB, which the first update made."
