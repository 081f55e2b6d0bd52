"""Two runs of changed code: which allocations are the same, what grew, and that it all adds up."""

import json
from dataclasses import replace

import jsonschema
import pytest
from support.build import FP32, Story, gpu_run, small_run
from support.changed_code import TORCH, Code, changed, run_of
from support.failures import in_backward, in_forward

from ampmem.analysis.analyse import analyse
from ampmem.analysis.difference.difference import (
    ChangeKind,
    Condition,
    ConditionKind,
    GroupChange,
    Side,
    Tensor,
    WhichRun,
    difference,
    difference_schema,
    folded,
)
from ampmem.analysis.difference.matching import Renamed, RenamedNames, function_of, same_files
from ampmem.analysis.difference.sides import groups_of, side_of
from ampmem.analysis.summary import summarize
from ampmem.analysis.timeline.categories import CATEGORIES, Category
from ampmem.events import Fact, Phase, Recording
from ampmem.names import StateName

CODE = Code()
RUNS = {"small": small_run().recording(), "gpu": gpu_run().recording(), "code": run_of(replace(CODE, kept=7))}


def one(changes: tuple[GroupChange, ...]) -> GroupChange:
    (change,) = changes
    return change


@pytest.mark.parametrize("recording", RUNS.values(), ids=list(RUNS))
def test_groups_add_up_to_what_is_alive(recording: Recording) -> None:
    groups, summary = groups_of(analyse(recording)), summarize(recording)
    assert sum(group.bytes for group in groups.peak) == summary.peak.bytes
    for category in CATEGORIES:
        of_it = [group.bytes for group in groups.peak if group.category == category]
        assert sum(of_it) == summary.peak.categories[category]
        assert sum(group.bytes for group in groups.most[category]) == summary.most[category]
        assert {group.category for group in groups.most[category]} <= {category}


@pytest.mark.parametrize("recording", RUNS.values(), ids=list(RUNS))
def test_the_same_run_twice_has_no_difference(recording: Recording) -> None:
    sides = side_of(recording, "a"), side_of(recording, "b")
    for category in (None, *CATEGORIES):
        found = difference(*sides, category=category)
        assert (found.changes, found.renamed, found.residual, found.grown) == ((), (), 0, 0)
        assert found.conditions == found.doubts == found.without_groups == ()


def test_a_group_is_all_that_the_same_line_made_of_the_same_tensor() -> None:
    recording = run_of(replace(CODE, sizes=(500, 500)))
    (first, second) = [each for each in groups_of(analyse(recording)).peak if each.category == Category.ACTIVATIONS]
    assert (first.bytes, first.count, first.op, first.module) == (500, 1, "aten::mm", "layers.0")
    assert (first.dtype, first.shape, first.name) == ("uint8", (500,), "MmBackward0")
    assert second.stack == ("/home/me/repo/train.py:25 main", "/home/me/repo/net.py:21 Net.forward", TORCH)


@pytest.mark.parametrize(
    "after",
    [
        Code(line=300),
        Code(file="/elsewhere/copy/of/repo/net.py"),
        Code(function="Network.forward"),
        Code(main="train"),
        Code(saved_for="AddmmBackward0"),
    ],
    ids=["lines", "folder", "function", "caller", "saver"],
)
def test_what_did_not_change_but_where_it_is_in_the_code_is_no_change(after: Code) -> None:
    assert changed(CODE, after).changes == ()


def test_what_grew_has_the_line_of_the_run_after() -> None:
    found = changed(CODE, Code(line=300, sizes=(1000, 1600)))
    change = one(found.changes)
    assert (found.before, found.after, found.grown, found.residual) == (2308, 2908, 600, 0)
    assert (change.category, change.module, change.op) == (Category.ACTIVATIONS, "layers.1", "aten::mm")
    assert (change.before, change.after, change.count_before, change.count_after) == (1000, 1600, 1, 1)
    assert change.kind is ChangeKind.GREW and change.grown == 600
    assert change.source_line == "/home/me/repo/net.py:301 Net.forward"
    assert change.stack[-1] == TORCH and change.lines_of is WhichRun.AFTER
    assert (change.tensor_before, change.tensor_after) == (
        Tensor(dtype="uint8", shape=(1000,)),
        Tensor(dtype="uint8", shape=(1600,)),
    )


def test_what_is_gone_has_the_line_of_the_run_before() -> None:
    found = changed(Code(line=300), Code(sizes=(1000,)))
    activation = found.changes[0]
    assert (activation.kind, activation.before, activation.after) == (ChangeKind.GONE, 1000, 0)
    assert activation.source_line == "/home/me/repo/net.py:301 Net.forward" and activation.lines_of is WhichRun.BEFORE
    assert [change.name for change in found.changes[1:]] == ["layers.1.weight"]
    assert sum(change.grown for change in found.changes) == found.grown == -1200


def test_a_layer_more_is_new_and_the_others_are_as_they_were() -> None:
    found = changed(CODE, Code(sizes=(1000, 1000, 1000)))
    assert [(change.kind, change.module) for change in found.changes] == [
        (ChangeKind.NEW, "layers.2"),
        (ChangeKind.NEW, "layers.2"),
    ]
    assert sum(change.grown for change in found.changes) == found.grown == 1000 + 300


def products(*lines: tuple[int, int]) -> Side:
    """A run whose one function has made so many bytes in each of these lines."""
    story = Story()
    story.parameter(0x10, "weight", 1)
    story.begin(0, Phase.FORWARD)
    for i, (line, size) in enumerate(lines):
        story.alloc(0x20 + i, size, op="aten::mul", module="(model)", stack=f"/home/me/net.py:{line} Net.forward")
        story.fact(Fact.SAVED, 0x20 + i, "MulBackward0")
    story.enter(Phase.BACKWARD)
    story.end(Phase.OPTIMIZER)
    return side_of(story.recording(precision=FP32), "a run")


def test_another_line_of_the_same_function_is_the_one_that_is_named() -> None:
    before, after = products((10, 100), (12, 5000)), products((15, 100), (16, 300), (17, 5000))
    change = one(difference(before, after).changes)
    assert (change.before, change.after, change.count_before, change.count_after) == (5100, 5400, 2, 3)
    assert change.source_line == "/home/me/net.py:16 Net.forward"
    back = one(difference(after, before).changes)
    assert (back.source_line, back.lines_of) == ("/home/me/net.py:16 Net.forward", WhichRun.BEFORE)


def test_what_is_kept_from_step_to_step_grows_the_peak() -> None:
    found = changed(replace(CODE, kept=64), replace(CODE, kept=128))
    change = one(found.changes)
    assert (change.before, change.after, change.count_after) == (128, 256, 2)
    assert change.source_line == "/home/me/repo/train.py:25 main"


def test_of_one_category_its_largest_instant_is_compared() -> None:
    found = changed(replace(CODE, kept=64), replace(CODE, kept=128), Category.ACTIVATIONS)
    assert (found.before, found.after) == (2128, 2256)
    assert found.category is Category.ACTIVATIONS and found.moment_after is not None
    assert (found.moment_after.step, found.moment_after.phase) == (1, "forward")
    assert changed(CODE, replace(CODE, batch=16), Category.ACTIVATIONS).changes == ()


def test_a_module_with_another_name_is_compared_with_the_one_that_is_gone() -> None:
    found = changed(CODE, Code(layers="model.blocks", sizes=(1000, 1600)))
    assert found.renamed == (Renamed(before="layers", after="model.blocks", parameters=2, bytes=300),)
    change = one(found.changes)
    assert (change.module, change.grown) == ("model.blocks.1", 600)


def test_modules_whose_parameters_differ_are_not_taken_for_one_another() -> None:
    found = changed(Code(sizes=(1000,)), Code(layers="blocks", sizes=(1000, 1000)))
    assert found.renamed == ()
    kinds = {(change.kind, change.category, change.module) for change in found.changes}
    assert (ChangeKind.GONE, Category.PARAMETERS, "layers.0") in kinds
    assert (ChangeKind.NEW, Category.PARAMETERS, "blocks.0") in kinds
    assert sum(change.grown for change in found.changes) == found.grown


def test_names_below_a_module_with_another_name() -> None:
    names = RenamedNames([Renamed(before="a.b", after="c", parameters=1, bytes=4)])
    state = str(StateName(state="exp_avg", parameter="a.b.weight"))
    assert [names.of(name) for name in ("a.b.weight", "a.b", "a.bc", "a", None)] == ["c.weight", "c", "a.bc", "a", None]
    assert names.of(state) == "exp_avg of c.weight"
    wrapped = RenamedNames([Renamed(before=None, after="module", parameters=1, bytes=4)])
    assert (wrapped.of("h.0.weight"), wrapped.of("(model)")) == ("module.h.0.weight", "module")
    unwrapped = RenamedNames([Renamed(before="module", after=None, parameters=1, bytes=4)])
    assert (unwrapped.of("module.h.0.weight"), unwrapped.of("module")) == ("h.0.weight", "(model)")


def test_files_are_the_same_by_the_end_of_their_paths_where_that_is_unambiguous() -> None:
    before = ["/a/repo/net.py", "/a/repo/one/util.py", "/a/repo/two/util.py", "/lib/torch.py", "/a/repo/old.py"]
    after = ["/b/net.py", "/b/one/util.py", "/b/two/util.py", "/lib/torch.py", "/b/new.py"]
    assert same_files(before, after) == {
        "/a/repo/net.py": "/b/net.py",
        "/a/repo/one/util.py": "/b/one/util.py",
        "/a/repo/two/util.py": "/b/two/util.py",
    }
    assert same_files(["/a/net.py"], ["/b/one/net.py", "/b/two/net.py"]) == {}
    assert same_files(["/a/net.py", "/c/net.py"], ["/b/net.py"]) == {}


@pytest.mark.parametrize(
    ("frame", "function"),
    [
        ("/a/b.py:12 f.<locals>.g", ("/a/b.py", "f.<locals>.g")),
        ("C:/a.py:3 f", ("C:/a.py", "f")),
        ("??:0 at::native::mm(int, long:2 x)", ("??", "at::native::mm(int, long:2 x)")),
        ("no frame", ("", "no frame")),
    ],
)
def test_the_function_of_a_frame(frame: str, function: tuple[str, str]) -> None:
    assert function_of(frame) == function


def test_changes_alike_in_every_layer_are_one_fold() -> None:
    found = changed(CODE, Code(sizes=(1500, 1500)))
    assert len(folded(found.changes)) == 2  # each layer is made by a line of its own
    same_line = tuple(replace(change, source_line="net.py:20 f") for change in found.changes)
    (fold,) = folded(same_line)
    assert (fold.module, fold.before, fold.after, len(fold.changes)) == ("layers.*", 2000, 3000, 2)


def test_what_grew_and_what_shrank_are_never_in_one_fold() -> None:
    found = changed(Code(sizes=(1000, 2000)), Code(sizes=(2000, 1000)))
    same_line = tuple(replace(change, source_line="net.py:20 f") for change in found.changes)
    assert found.grown == 0
    assert sorted(fold.grown for fold in folded(same_line)) == [-1000, 1000]


def test_a_summary_alone_gives_the_changes_of_categories() -> None:
    before = Side(label="main.json", summary=summarize(run_of(CODE)), groups=None)
    after = side_of(run_of(Code(sizes=(1000, 1600), batch=16)), "after")
    found = difference(before, after)
    assert found.without_groups == ("main.json",)
    assert [(change.category, change.grown, change.module) for change in found.changes] == [
        (Category.ACTIVATIONS, 600, None),
        (Category.INPUTS, 8, None),
    ]
    assert (found.residual, found.grown) == (0, 608)
    assert one(difference(before, after, category=Category.ACTIVATIONS).changes).grown == 600


def test_what_differs_beside_the_code_is_said() -> None:
    recording = run_of(CODE)
    other = replace(
        recording,
        run=replace(recording.run, torch="2.99.0", arguments=("--epochs", "2"), device_name="another CPU"),
        steps=recording.steps[:1],
    )
    found = difference(side_of(recording, "a"), side_of(other, "b"))
    assert found.conditions == (
        Condition(what=ConditionKind.DEVICE, before="a CPU", after="another CPU"),
        Condition(what=ConditionKind.STEPS, before="2", after="1"),
        Condition(what=ConditionKind.ARGUMENTS, before="--epochs 1", after="--epochs 2"),
        Condition(what=ConditionKind.TORCH, before="2.13.0", after="2.99.0"),
    )


def test_sums_that_are_not_the_allocators_are_a_doubt() -> None:
    recording = run_of(CODE)
    wrong = replace(recording, events=replace(recording.events, allocated=recording.events.allocated + 100))
    (doubt,) = difference(side_of(recording, "a"), side_of(wrong, "b")).doubts
    assert doubt.startswith("b: the categories are up to 100 B")


def test_of_two_runs_that_ran_out_of_memory_both_are_told() -> None:
    found = difference(side_of(in_forward(), "a"), side_of(in_forward(), "b"))
    assert found.conditions == ()
    assert [doubt.partition(":")[0] for doubt in found.doubts] == [
        f"{label} ran out of memory in forward of step 0" for label in ("a", "b")
    ]
    (end,) = [
        each
        for each in difference(side_of(in_forward(), "a"), side_of(in_backward(), "b")).conditions
        if each.what is ConditionKind.END
    ]
    assert (end.before, end.after) == ("out of memory in forward of step 0", "out of memory in backward of step 0")


def test_the_json_is_as_its_schema_says() -> None:
    found = changed(CODE, Code(layers="blocks", sizes=(1000, 1600)), None)
    document = json.loads(found.to_json())
    jsonschema.Draft202012Validator(difference_schema()).validate(document)
    assert document["schema"] == "ampmem.diff/1"
    assert document["changes"][0]["after"] == 1600
    assert sum(change["after"] - change["before"] for change in document["changes"]) == found.grown
