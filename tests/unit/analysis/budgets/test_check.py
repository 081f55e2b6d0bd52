"""A run against budgets and a baseline: what is measured, what is broken, and what grew."""

import json
from dataclasses import replace

import jsonschema
import pytest
from support.build import RUN, Story, gpu_run, predicted, small_run
from support.golden_sections import Golden

from ampmem.analysis.budgets.budget import NONE_ALLOWED, Allowance, budgets_of, parse_allowance
from ampmem.analysis.budgets.check import TRIALS_NOT_JUDGED, Broken, CheckResult, Limit, check_run, check_schema
from ampmem.analysis.budgets.run import run_of, run_of_side
from ampmem.analysis.difference.sides import side_of
from ampmem.errors import UsageError
from ampmem.events import Fact, Phase, Recording
from ampmem.failure import FailureKind, FailureRecord
from ampmem.names import CUDNN_TRIALS
from ampmem.reporters.text.check import answer, render_check
from ampmem.vocabulary import SourceKind

SCHEMA = check_schema()


def trained(*, saved: int = 1000, kept: int = 0, line: int = 9, steps: int = 3, skipped: tuple[int, ...] = ()) -> Story:
    """Steps of a model with an encoder and a head; each saves so many bytes and leaves ``kept`` behind."""
    story = Story(weight=100, name="encoder.0.weight")
    story.parameter(0x2000, "head.weight", 50)
    for step in range(steps):
        story.begin(step, Phase.FORWARD)
        stack = f"/home/me/train.py:{line + 3} main\n/home/me/net.py:{line} forward"
        story.tensor(Fact.SAVED, 0x4000, saved, "aten::mm", module="encoder.0", op="aten::mm", stack=stack)
        story.tensor(
            Fact.SAVED,
            0x5000,
            500,
            "aten::mm",
            module="head",
            op="aten::mm",
            stack=f"/home/me/net.py:{line + 1} forward",
        )
        story.enter(Phase.BACKWARD)
        story.tensor(Fact.GRADIENT, 0x6000, 400, "encoder.0.weight")
        story.free(0x4000, 0x5000)
        if step not in skipped:
            story.enter(Phase.OPTIMIZER)
            if step == len(skipped):
                story.tensor(Fact.OPTIMIZER_STATE, 0x7000, 800, "exp_avg of encoder.0.weight")
        story.enter(Phase.BETWEEN)
        if kept:
            story.alloc(0x100000 + 0x1000 * step, kept, op="aten::clone", stack="/home/me/train.py:5 main")
        story.end(skipped=step in skipped)
        story.free(0x6000)
    return story


def recording(**given: int) -> Recording:
    return trained(**given).recording()


def judged(
    run: Recording, baseline: Recording | None = None, allow: Allowance = NONE_ALLOWED, **limits: str | int
) -> CheckResult:
    """The result, which is what its schema says."""
    budgets = budgets_of({key.replace("__", "."): limit for key, limit in limits.items()})
    side = None if baseline is None else side_of(baseline, "main.ampmem")
    result = check_run(run_of(run, "run.ampmem"), budgets, side, allow)
    jsonschema.validate(json.loads(result.to_json()), SCHEMA)
    return result


def measured(result: CheckResult) -> dict[str, int | None]:
    return {each.key: each.after for each in result.judged}


def only(result: CheckResult, key: str) -> Broken:
    (found,) = [broken for broken in result.broken if broken.key == key]
    return found


def test_every_key_is_measured_by_hand() -> None:
    # Two parameters, 600 B; 1,500 B of activations until a 400 B gradient is there; 800 B of state from step 0 on.
    limits = {"peak": 3300, "parameters": 600, "activations": 1500, "gradients": 400, "optimizer_state": 800}
    modules = {
        "modules__encoder__activations": 1000,
        "modules__head__activations": 500,
        "modules__head__parameters": 200,
    }
    rest = {"inputs": 0, "precision_copies": 0, "growth": 0, "allocated": 3300}
    result = judged(recording(), **limits, **modules, **rest)
    expected = {key.replace("__", "."): size for key, size in (limits | modules | rest).items()}
    assert measured(result) == expected
    assert result.ok and not result.broken and not result.problems


@pytest.mark.parametrize("key", ["peak", "activations", "allocated", "modules__encoder__activations", "gradients"])
def test_a_byte_more_than_the_budget_breaks_it(key: str) -> None:
    at = measured(judged(recording(), **{key: 10**6}))[key.replace("__", ".")]
    assert at is not None
    assert judged(recording(), **{key: at}).ok
    result = judged(recording(), **{key: at - 1})
    (broken,) = result.broken
    assert not result.ok
    assert (broken.limit_of, broken.limit, broken.before, broken.after) == (Limit.BUDGET, at - 1, None, at)
    assert broken.held and not broken.grew
    sizes = [group.bytes for group in broken.held]
    assert sizes == sorted(sizes, reverse=True)
    assert key == "allocated" or sum(sizes) == at


@pytest.mark.parametrize(
    ("key", "instant"),
    [
        ("peak", "at the peak"),
        ("activations", "when activations are largest"),
        ("optimizer_state", "when optimizer_state is largest"),
        ("allocated", "at the peak of tensors alone, without rounding"),
        ("modules__encoder__activations", "at the end of the last forward"),
        ("modules__encoder__gradients", "after the last backward"),
    ],
)
def test_what_is_broken_has_its_instant(key: str, instant: str) -> None:
    (broken,) = judged(recording(), **{key: 1}).broken
    assert broken.instant == instant


@pytest.mark.parametrize("last", [5000, 0])
def test_what_the_last_event_of_a_step_allocates_is_in_it(last: int) -> None:
    story = trained()
    if last:
        story.begin(3, Phase.FORWARD)
        story.enter(Phase.BACKWARD)
        story.alloc(0x9000, last)
        story.end()
    assert measured(judged(story.recording(), allocated=10**6)) == {"allocated": 600 + 800 + last if last else 3300}


def test_what_a_gpu_holds_above_the_tensors() -> None:
    run = gpu_run().recording()
    result = judged(run, allocated=0, reserved=0, device=0)
    steps = run_of(run, "").summary.steps
    reserved = max(step.peak_reserved or 0 for step in steps)
    assert measured(result) == {"allocated": only(result, "allocated").after, "reserved": reserved, "device": None}
    # Blocks of 0x2000 and 0x2200 bytes beside the baseline's and the parameters'.
    assert only(result, "allocated").after == 512 + 400 + 200 + 0x2000 + 0x2200
    assert result.problems == ("device: the memory outside of the allocator is not known",)


PREDICTION = predicted(
    1024,
    outside=1 << 20,
    highest_allocated=5 << 20,
    highest_reserved=6 << 20,
    bounds={"cuDNN's workspaces in convolutions": 4 << 20},
)


def test_what_is_assumed_of_a_simulated_gpu_is_said_where_a_limit_is_broken_by_it(golden: Golden) -> None:
    result = judged(replace(gpu_run().recording(), prediction=PREDICTION), allocated="1MiB")
    assert measured(result) == {"allocated": 5 << 20}
    (broken,) = result.broken
    golden(broken.instant)


def test_an_upper_bound_is_no_fact_and_trials_break_no_budget(golden: Golden) -> None:
    """With the least that is assumed the budget is kept; cudnn.benchmark's trials take what is free."""
    prediction = replace(
        PREDICTION,
        highest_allocated=1 << 29,
        highest_reserved=1 << 29,
        unfilled_allocated=5 << 20,
        unfilled_reserved=6 << 20,
        bounds={CUDNN_TRIALS: 1 << 29, "cuDNN's workspaces in convolutions": 4 << 20},
    )
    run = replace(gpu_run().recording(), prediction=prediction)
    kept = judged(run, allocated="8MiB", device="8MiB")
    assert kept.ok and kept.notes[-1] == TRIALS_NOT_JUDGED
    assert [each.after for each in kept.judged] == [5 << 20, 7 << 20]
    golden(render_check(judged(run, allocated="1MiB")))


def test_what_is_not_known_is_a_failure_and_not_0(golden: Golden) -> None:
    limits = {
        "reserved": "1TiB",
        "growth": "1TiB",
        "modules__encodr__activations": "1TiB",
        "modules__0__activations": 0,
    }
    result = judged(recording(steps=1), **limits)
    assert not result.ok and not result.broken
    assert [each.after for each in result.judged] == [None] * 4
    golden("\n".join(result.problems))


def test_growth_is_of_the_ends_of_steps_and_named() -> None:
    result = judged(recording(kept=64, steps=4), growth=63)
    broken = only(result, "growth")
    assert broken.after == 64
    (change,) = broken.grew
    assert (change.before, change.after, change.source_line) == (64, 256, "/home/me/train.py:5 main")
    assert judged(recording(kept=64), growth=64).ok


def test_growth_begins_with_the_first_update() -> None:
    run = trained(steps=4, skipped=(0, 1)).recording()
    assert measured(judged(run, growth=0)) == {"growth": 0}
    assert "growth: it needs" in judged(trained(steps=3, skipped=(0, 1)).recording(), growth=0).problems[0]


def test_growth_that_is_not_even_is_rounded_up() -> None:
    story = trained(steps=3)
    story.begin(3, Phase.FORWARD)
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.GRADIENT, 0x6000, 400, "encoder.0.weight")
    story.alloc(0x9000, 1)
    story.end()
    assert measured(judged(story.recording(), growth=0)) == {"growth": 1}


def test_the_same_run_is_no_more_than_its_baseline() -> None:
    result = judged(recording(), recording(line=70))
    assert result.ok and not result.shrunk
    assert {each.key for each in result.judged} >= {"peak", "activations", "precision_copies", "other"}
    assert all(each.before == each.after == each.limit for each in result.judged)


def test_what_grew_is_named_by_its_line_though_lines_moved() -> None:
    result = judged(recording(saved=1300, line=40), recording())
    assert [broken.key for broken in result.broken] == ["peak", "activations"]
    for broken in result.broken:
        assert broken.limit_of is Limit.BASELINE and broken.grouped and not broken.shrank
        (change,) = broken.grew
        assert (change.category, change.module, change.before, change.after) == ("activations", "encoder.0", 1000, 1300)
        assert change.source_line == "/home/me/net.py:40 forward"
        assert broken.after - (broken.before or 0) == change.grown == 300


def test_what_grew_in_a_module_is_only_what_is_in_it() -> None:
    result = judged(recording(saved=1300), recording(), modules__head__activations=0, modules__encoder__activations=0)
    assert not only(result, "modules.head.activations").grew
    assert [group.module for group in only(result, "modules.head.activations").held] == ["head"]
    (change,) = only(result, "modules.encoder.activations").grew
    assert change.module == "encoder.0"
    assert only(result, "modules.encoder.activations").before == 1000


def test_what_a_module_holds_is_explained_at_the_instant_at_which_it_is_measured() -> None:
    # The loss is no module's, though it is saved by name; in the next step's forward there are more activations.
    story = trained()
    story.begin(3, Phase.FORWARD)
    story.tensor(Fact.SAVED, 0x4000, 1000, "aten::mm", module="encoder.0", op="aten::mm")
    story.tensor(Fact.SAVED, 0x8000, 70, "LogSoftmaxBackward0", op="aten::log_softmax")
    story.enter(Phase.BACKWARD)
    story.tensor(Fact.SAVED, 0x5000, 300, "aten::mm", module="encoder.0", op="aten::mm")
    story.free(0x4000, 0x5000, 0x8000)
    story.end()
    run = story.recording()
    limits = {f"modules__(model)__{key}": 0 for key in ("activations", "parameters", "gradients")}
    broken = judged(run, None, **limits).broken
    assert len(broken) == 2
    for each in broken:
        assert sum(group.bytes for group in each.held) == each.after
        assert each.instant == "at the end of the last forward"
    for each in judged(run, recording(saved=800), **limits).broken:
        if each.key.startswith("modules"):
            assert sum(change.grown for change in each.grew) + each.shrank == each.after - (each.before or 0)


def moving(*, gelu: int, saved: int = 1000, update: int = 3000, extra: int = 0) -> Recording:
    """A run with its peak in the update of the optimizer or, if ``gelu`` saves enough, in forward."""
    story = Story(weight=100, name="head.weight")
    for step in range(2):
        story.begin(step, Phase.FORWARD)
        story.tensor(
            Fact.SAVED, 0x4000, saved, "aten::mm", module="head", op="aten::mm", stack="/home/me/net.py:7 forward"
        )
        if gelu:
            story.tensor(
                Fact.SAVED, 0x5000, gelu, "aten::gelu", module="act", op="aten::gelu", stack="/home/me/net.py:8 forward"
            )
        story.scratch(0x6000, 900, op="aten::_log_softmax", stack="/home/me/train.py:11 step")
        if extra:
            story.scratch(0x7000, extra, op="aten::_log_softmax", stack="/home/me/train.py:12 step")
        story.enter(Phase.BACKWARD)
        story.free(0x4000, *([0x5000] if gelu else []))
        story.enter(Phase.OPTIMIZER)
        story.scratch(0x8000, update, op="Optimizer.step#AdamW.step")
        story.end()
    return story.recording()


def test_what_is_only_at_another_instant_has_not_grown() -> None:
    broken = only(judged(moving(gelu=1500), moving(gelu=0)), "peak")
    assert [(change.op, change.grown) for change in broken.grew] == [("aten::gelu", 1500)]
    assert [(change.op, change.grown) for change in broken.moved] == [("aten::mm", 1000), ("aten::_log_softmax", 900)]
    assert broken.moment_before is not None and broken.moment_before.phase == "optimizer"
    assert broken.moment_after is not None and broken.moment_after.phase == "forward"
    told = sum(change.grown for change in (*broken.grew, *broken.moved)) + broken.shrank
    assert told == broken.after - (broken.before or 0)
    assert not broken.held


def test_what_grew_is_told_though_it_is_at_another_instant_too() -> None:
    broken = only(judged(moving(gelu=0, saved=2500), moving(gelu=0)), "peak")
    assert [change.op for change in broken.grew] == ["aten::mm"]
    assert [change.op for change in broken.moved] == ["aten::_log_softmax"]


def test_a_new_line_of_the_same_function_is_no_line_of_before() -> None:
    broken = only(judged(moving(gelu=0, extra=2800), moving(gelu=0)), "peak")
    assert {change.source_line for change in broken.grew} == {"/home/me/train.py:12 step"}
    # It makes more in a step, though no more at once.
    twice = only(judged(moving(gelu=1500, extra=900), moving(gelu=0)), "peak")
    assert "aten::_log_softmax" in [change.op for change in twice.grew]


def test_at_the_same_instant_nothing_has_moved() -> None:
    broken = only(judged(recording(saved=1300), recording()), "peak")
    assert not broken.moved and (broken.moment_before, broken.moment_after) == (None, None)


def test_of_a_summary_each_categorys_most_is_compared_and_not_two_instants() -> None:
    baseline = replace(side_of(moving(gelu=0), "main.json"), groups=None)
    (change,) = only(check_run(run_of(moving(gelu=1500), "run"), (), baseline), "peak").grew
    assert (change.category, change.before, change.after) == ("activations", 1000, 2500)


def test_of_a_summary_what_is_in_no_module_is_told_with_the_category() -> None:
    baseline = replace(side_of(moving(gelu=0), "main.json"), groups=None)
    lost = replace(baseline.summary, modules=())
    (change,) = only(
        check_run(run_of(moving(gelu=1500), "run"), (), replace(baseline, summary=lost)), "activations"
    ).grew
    assert (change.module, change.before, change.after) == (None, 1000, 2500)


def test_of_a_summary_what_grew_is_told_by_module() -> None:
    baseline = replace(side_of(recording(), "main.json"), groups=None)
    result = check_run(run_of(recording(saved=1300), "run"), (), baseline)
    broken = only(result, "activations")
    assert not broken.grouped and result.baseline is not None and not result.baseline.grouped
    (change,) = broken.grew
    assert (change.module, change.before, change.after) == ("encoder.0", 1000, 1300)
    (whole,) = only(result, "peak").grew
    assert (whole.category, whole.module, whole.grown) == ("activations", None, 300)


@pytest.mark.parametrize(("module", "grew"), [("encoder", ["encoder.0"]), ("head", []), ("(model)", ["encoder.0"])])
def test_of_a_summary_what_grew_in_a_module_is_told_by_those_in_it(module: str, grew: list[str]) -> None:
    baseline = replace(side_of(recording(), "main.json"), groups=None)
    key = f"modules.{module}.activations"
    broken = only(check_run(run_of(recording(saved=1300), "run"), budgets_of({key: 1}), baseline), key)
    assert ([change.module for change in broken.grew], broken.grouped) == (grew, False)


def test_a_summary_is_judged_as_far_as_it_goes() -> None:
    side = replace(side_of(recording(), "run.json"), groups=None)
    result = check_run(run_of_side(side), budgets_of({"peak": 1, "growth": 1, "allocated": 1}))
    assert measured(result) == {"peak": 3300, "growth": None, "allocated": None}
    assert all("give the recording" in problem for problem in result.problems)


@pytest.mark.parametrize(("allow", "ok"), [("299", False), ("300", True), ("9%", False), ("20%", True)])
def test_what_is_allowed_is_no_failure(allow: str, ok: bool) -> None:
    # 300 B more: a fifth of the activations, and 9 % of the peak.
    assert judged(recording(saved=1300), recording(), parse_allowance(allow)).ok is ok


def test_less_is_never_a_failure_and_is_told() -> None:
    result = judged(recording(saved=900), recording())
    assert result.ok
    assert [each.key for each in result.shrunk] == ["peak", "activations"]


def test_only_runs_of_the_same_device_are_compared(golden: Golden) -> None:
    def on(source: SourceKind, name: str, device: str = "cuda") -> Recording:
        return replace(recording(), run=replace(RUN, source=source, device_type=device, device_name=name))

    h100, cuda = on(SourceKind.SIMULATED, "H100"), on(SourceKind.CUDA, "H100")
    snapshot = on(SourceKind.SNAPSHOT, "device 0 of a snapshot")
    said = []
    for before, after in (
        (recording(), h100),
        (h100, on(SourceKind.SIMULATED, "A100")),
        (cuda, on(SourceKind.CUDA, "A100")),
        (h100, cuda),
        (h100, snapshot),
    ):
        with pytest.raises(UsageError) as error:
            judged(after, before)
        said.append(str(error.value))
    golden("\n".join(said))
    cpus = (on(SourceKind.CPU, name, "cpu") for name in ("x86_64", "aarch64"))
    for before, after in ((h100, h100), (cuda, snapshot), tuple(cpus)):
        assert judged(after, before).ok


def test_a_category_that_was_not_there_may_grow_by_a_share_of_the_peak(golden: Golden) -> None:
    # The peak has 3,300 B, of which 10 % of 10 % are 33 B.
    for kept, ok in ((11, True), (12, False)):
        result = judged(recording(kept=kept), recording(), parse_allowance("10%"))
        assert (only(result, "other").limit, result.ok) == (33, ok) if not ok else result.ok
    golden(render_check(result))


def test_what_is_broken_is_said_beside_what_could_not_be_judged(golden: Golden) -> None:
    result = judged(recording(), peak=1, modules__encodr__activations=1)
    assert not result.ok
    golden(answer(result))


def test_lines_that_grew_from_step_to_step_are_told_though_the_baseline_is_a_summary() -> None:
    baseline = replace(side_of(recording(), "main.json"), groups=None)
    run = run_of(recording(kept=64), "run")
    text = render_check(check_run(run, budgets_of({"growth": 0}), baseline, parse_allowance("1MiB")))
    assert "/home/me/train.py:5 main" in text and "one of the two is a summary" not in text


def test_what_else_differs_is_said() -> None:
    before = replace(recording(), run=replace(RUN, torch="2.12.1"))
    result = judged(recording(steps=4), before)
    assert result.ok and result.baseline is not None
    assert [(each.what, each.before, each.after) for each in result.baseline.conditions] == [
        ("recorded steps", "3", "4"),
        ("torch", "2.12.1", "2.13.0"),
    ]


def test_what_cannot_be_trusted_is_not_judged(golden: Golden) -> None:
    good = recording()
    allocated = good.events.allocated.copy()
    allocated[-1] += 8
    failure = FailureRecord(kind=FailureKind.RAISED, error="ValueError", message="no")
    results = [
        judged(run, peak="1TiB")
        for run in (
            replace(good, events=replace(good.events, allocated=allocated)),
            replace(good, ended=False),
            replace(good, run=replace(RUN, failure=failure)),
            replace(good, steps=(*good.steps[:-1], replace(good.steps[-1], finished=False))),
        )
    ]
    assert not any(result.ok or result.broken or result.judged[0].kept for result in results)
    golden("\n".join(map(render_check, results)))


def test_a_static_model_that_does_not_hold_is_no_matter_for_budgets() -> None:
    assert judged(small_run().recording(), peak="1TiB").ok
